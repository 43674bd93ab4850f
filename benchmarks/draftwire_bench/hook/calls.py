"""The calls that `draftwire_bench.timeline` records, and the ways of a step through both engines."""

from __future__ import annotations

from typing import Literal, NamedTuple

CALLS = {
    "verifier_service.engine.engine": (
        "Engine._execute_next",
        "Engine._prelaunch",
        "Engine._commit",
        "Engine._count",
    ),
    "verifier_service.engine.planner": ("Planner.plan", "Planner.plan_awaited"),
    "verifier_service.engine.executor": ("Executor.execute", "Executor.take_early_drafts"),
    "verifier_service.drafters.drafting": ("Drafting.flush", "Drafting.handle"),
    "verifier_service.engine.outputs": ("RequestOutputs.commit", "RequestOutputs.deliver"),
    "verifier_service.drafters.budgeting": ("DraftBudget.choose", "DraftBudget.learn"),
    "verifier_service.drafters.sender": ("StepSender._send_step",),
    "draftwire.transport.sender": ("Outgoing.finish",),
    "draftwire.transport.channel": ("Channel.send",),
    "verifier_service.drafters.stream": ("Stream.send", "Stream.read_direct"),
    "verifier_service.engine.prelaunch": (
        "Prelaunch.launch",
        "Prelaunch.expect",
        "Prelaunch.release",
        "Prelaunch.confirm",
        "Prelaunch.abandon",
        "Prelaunch.release_with_known_drafts",
    ),
    "verifier_service.target.step_graph": ("StepGraph.launch", "StepGraph.prelaunch"),
    "verifier_service.target.graph_inputs": ("StagedInputs.set_rows",),
    "verifier_service.target.runner": ("TargetRunner.release",),
    "verifier_service.sampling.sampler": ("TokenSampler.launch", "TokenSampler.finish"),
    "drafter_service.server.stream": ("DraftStream._take_record", "DraftStream.deliver", "DraftStream._send_directly"),
    "drafter_service.server.step_decoder": ("StepDecoder.decode",),
    "drafter_service.engine.engine": ("DraftEngine.iterate", "DraftEngine._draft", "DraftEngine._feed"),
    "drafter_service.engine.early_drafts": ("EarlyDrafts.begin",),
    "drafter_service.engine.proposer": ("Proposer.launch", "Proposer.start", "Proposer.finish"),
    "drafter_service.draft_loop.graphs": ("LoopGraphs.replay",),
}
"""Methods by module."""


class Mark(NamedTuple):
    """The begin or end of a call, on the way from a step's tokens to the next step."""

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
    Mark("Proposer.finish", "begin"),
    Mark("Proposer.finish", "end"),
    Mark("DraftStream.deliver", "begin"),
    Mark("DraftStream._send_directly", "end"),
    Mark("Stream.read_direct", "end"),
    Mark("Prelaunch.release", "end"),
)
"""The calls of steps that are not announced: everything waits for the message."""

_BEGUN_EARLY = (
    Mark("EarlyDrafts.begin", "begin"),  # the drafter has seen that the tokens are sampled
    Mark("Proposer.start", "begin"),
    Mark("EarlyDrafts.begin", "end"),
)
WAYS_EARLY = (
    (*_BEGUN_EARLY, *WAY[10:]),
    (*WAY[:7], Mark("Proposer.finish", "begin")),
)
"""The calls of announced steps: those of the drafts, and those of the message."""

WAYS_BOTH_EARLY = (
    (*_BEGUN_EARLY, Mark("Executor.take_early_drafts", "begin"), WAY[-1]),
    (*WAY[:7], *WAY[9:14]),
)
"""The same if the forward pass begins with early drafts, before their answer; the message's way ends with the answer.
"""

WAY_WITHOUT_DRAFTS = (
    WAY[0],
    Mark("Executor.execute", "begin"),
    Mark("StepGraph.launch", "begin"),
    Mark("StepGraph.launch", "end"),
    Mark("Executor.execute", "end"),
    Mark("TokenSampler.finish", "end"),
)
"""The calls of a step without drafts: the launch of the next step, and the arrival of its tokens."""

DRAFTED = Mark("DraftEngine._draft", "end")
"""Occurs around each step with drafts."""
