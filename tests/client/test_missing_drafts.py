"""The last line of `draftwire generate`: the cause of missing drafts, or the statistics at Ctrl-C."""

from __future__ import annotations

import pytest

from draftwire.client import Chunk, Statistics
from draftwire.client.missing_drafts import cause_text, explain_missing_drafts
from draftwire.v1 import generate_pb2 as pb
from draftwire_cli.output import interrupted_text


def info(tokens_per_s: tuple[float, ...] = (), **tokens: int) -> pb.GetVerifierInfoResponse:
    """Return a verifier's info with throughputs by number of drafts, and with tokens without drafts by cause."""
    plan = pb.DraftPlan(tokens_per_s=tokens_per_s)
    info = pb.GetVerifierInfoResponse(drafters=[pb.DrafterStatus(plan=plan)])
    for cause, count in tokens.items():
        info.counters.fallbacks.add(cause=pb.FallbackCause.Value(f"FALLBACK_CAUSE_{cause}"), tokens=count)
    return info


def explained(drafted: int, steps: int, before: pb.GetVerifierInfoResponse, after: pb.GetVerifierInfoResponse) -> str:
    return explain_missing_drafts(Statistics(verify_steps=steps, drafted=(drafted, 0)), before, after) or ""


def test_pacing_is_shown_with_its_measurements() -> None:
    before, after = info(PACE=5, LATE=90), info((40.4, 0.0, 33.2), PACE=33, LATE=92, LAST_TOKEN=99)
    assert explained(3, 31, before, after) == (
        "28 of 31 steps had no drafts: pacing has switched drafting off: decoding without drafts is faster, or is "
        "being measured (measured: 40 tokens/s of a request without drafts, 33 with 2)"
    )
    assert explained(3, 31, before, info(PACE=33, LATE=92)).endswith("or is being measured")


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("NO_DRAFTER", "the verifier has no connected drafter"),
        ("NOT_ASKED", "the request asked for none"),
        ("LATE", "its drafter missed the draft deadline"),
    ],
)
def test_other_causes_are_described(cause: str, text: str) -> None:
    assert explained(0, 2, info(), info(**{cause: 2})) == f"2 of 2 steps had no drafts: {text}"


def test_few_missing_drafts_and_unknown_causes_go_unexplained() -> None:
    after = info(PACE=9)
    assert explained(20, 20, info(), after) == ""
    assert explained(7, 10, info(), after) == ""  # usual: a request's first and last steps have no drafts
    assert explained(40, 50, info(), after) == ""
    assert explained(0, 0, info(), after) == ""
    assert explained(0, 9, after, after) == ""
    assert explained(0, 9, info(), info()) == ""


def test_every_cause_has_a_text() -> None:
    known = [number for number in pb.FallbackCause.values() if number]
    assert len({cause_text(cause) for cause in known}) == len(known)
    assert not any("does not know" in cause_text(cause) for cause in known)


def test_an_interrupt_tells_what_came_so_far() -> None:
    chunks = [Chunk(text="a"), Chunk(token_ids=(5, 6), drafted=(False, True)), Chunk(token_ids=(7,), drafted=(True,))]
    assert interrupted_text(chunks, [0.01, 0.25, 1.0], 3.21) == (
        "interrupted after 3 tokens in 3.2 s, first token 250 ms, 2 tokens were accepted drafts"
    )
    assert interrupted_text([], [], 0.5) == "interrupted after 0 tokens in 0.5 s"
