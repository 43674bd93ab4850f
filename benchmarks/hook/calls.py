"""What `benchmarks.timeline` records, and the ways of a step through both engines."""

from __future__ import annotations

from typing import Literal, NamedTuple

CALLS = {
    "verifier_service.engine": (
        "Engine._execute_next",
        "Engine._prepare",
        "Engine._commit",
        "Engine._count",
    ),
    "verifier_service.planner": ("Planner.plan",),
    "verifier_service.executor": ("Executor.execute", "Executor.take_early_drafts"),
    "verifier_service.drafting": ("Drafting.flush", "Drafting.handle"),
    "verifier_service.outputs": ("RequestOutputs.commit", "RequestOutputs.deliver"),
    "verifier_service.step_sender": ("StepSender._send_step",),
    "draftwire.carriers.sender": ("Outgoing.finish",),
    "draftwire.carriers.channel": ("Channel.send",),
    "verifier_service.draft_stream": ("Stream.send", "Stream.read_direct"),
    "verifier_service.prelaunch": ("Prelaunch.launch", "Prelaunch.release", "Prelaunch.release_with_known_drafts"),
    "verifier_service.target_runner": ("_Graph._launch",),
    "verifier_service.sampler": ("TokenSampler.launch", "TokenSampler.finish"),
    "drafter_service.stream": ("DraftStream._take_record", "DraftStream.deliver", "DraftStream._send_directly"),
    "drafter_service.step_decoder": ("StepDecoder.decode",),
    "drafter_service.engine": ("DraftEngine.iterate", "DraftEngine._draft", "DraftEngine._feed"),
    "drafter_service.early_drafts": ("EarlyDrafts.begin",),
    "drafter_service.proposer": ("Proposer.launch", "Proposer.start", "Proposer.take"),
    "drafter_service.loop_graphs": ("LoopGraphs.replay",),
}
"""Methods by module."""


class Mark(NamedTuple):
    """One end of a call, on the way from a step's tokens to the next step."""

    call: str
    end: Literal["begin", "end"]


WAY = (
    Mark("TokenSampler.finish", "end"),
    Mark("Drafting.flush", "begin"),
    Mark("StepSender._send_step", "begin"),
    Mark("Stream.send", "begin"),
    Mark("Stream.send", "end"),
    Mark("DraftStream._take_record", "end"),
    Mark("DraftEngine.iterate", "begin"),
    Mark("Proposer.launch", "begin"),
    Mark("Proposer.launch", "end"),
    Mark("Proposer.take", "begin"),
    Mark("Proposer.take", "end"),
    Mark("DraftStream.deliver", "begin"),
    Mark("DraftStream._send_directly", "end"),
    Mark("Stream.read_direct", "end"),
    Mark("Prelaunch.release", "end"),
)
"""Where steps are not announced: all waits for the message."""

_BEGUN_EARLY = (
    Mark("EarlyDrafts.begin", "begin"),  # the drafter sees that the tokens have been drawn
    Mark("Proposer.start", "begin"),
    Mark("EarlyDrafts.begin", "end"),
)
WAYS_EARLY = (
    (*_BEGUN_EARLY, *WAY[10:]),
    (*WAY[:7], Mark("Proposer.take", "begin")),
)
"""Where they are: the drafts' way, and beside it that of the message."""

WAYS_BOTH_EARLY = (
    (*_BEGUN_EARLY, Mark("Executor.take_early_drafts", "begin"), WAY[-1]),
    (*WAY[:7], *WAY[9:14]),
)
"""And where the pass begins with early drafts, before their answer has come: the message's way ends with that.
"""

WAY_WITHOUT_DRAFTS = (
    WAY[0],
    Mark("Executor.execute", "begin"),
    Mark("_Graph._launch", "begin"),
    Mark("_Graph._launch", "end"),
    Mark("Executor.execute", "end"),
    Mark("TokenSampler.finish", "end"),
)
"""Of a step in which nobody drafts: when the one behind it is launched, and when its own tokens come."""

DRAFTED = Mark("DraftEngine._draft", "end")
"""Comes around each step that has drafts."""
