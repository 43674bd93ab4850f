"""Explanations of steps without drafts."""

from __future__ import annotations

from collections.abc import Iterable

from draftwire.client.output import Statistics
from draftwire.v1 import generate_pb2 as pb

_TEXTS = {
    pb.FALLBACK_CAUSE_NOT_ASKED: "the request asked for none",
    pb.FALLBACK_CAUSE_LAST_TOKEN: "the output had room for only one more token",
    pb.FALLBACK_CAUSE_NO_DRAFTER: "the verifier has no connected drafter",
    pb.FALLBACK_CAUSE_EXPELLED: "its drafter was expelled for a wrong answer",
    pb.FALLBACK_CAUSE_AT_CAPACITY: "no drafter takes another sequence",
    pb.FALLBACK_CAUSE_TOO_LONG: "no drafter takes a sequence so long",
    pb.FALLBACK_CAUSE_NOT_TAKEN: "its drafter had no room for it or had lost its state",
    pb.FALLBACK_CAUSE_LATE: "its drafter missed the draft deadline",
    pb.FALLBACK_CAUSE_CATCHING_UP: "its drafter did not have all of its rows yet",
    pb.FALLBACK_CAUSE_NO_FEATURES: "the verifier no longer has its features",
    pb.FALLBACK_CAUSE_PACE: "pacing has switched drafting off: decoding without drafts is faster, or is being measured",
    pb.FALLBACK_CAUSE_EMPTY_ANSWER: "its drafter answered without drafts",
    pb.FALLBACK_CAUSE_KV_CACHE: "the verifier's cache had no free blocks for drafts",
    pb.FALLBACK_CAUSE_STRUCTURED_OUTPUT: "the drafts violated the grammar of the structured output",
}
# Steps without drafts that need no explanation: the first ones, before the drafter has the prompt, and the last one.
_USUAL_STEPS = 3


def cause_text(cause: pb.FallbackCause) -> str:
    """Return the rest of a sentence that begins with "there were no drafts because"."""
    return _TEXTS.get(cause, "of a cause that this version does not know")


def counted(fallbacks: Iterable[pb.FallbackCount]) -> dict[pb.FallbackCause, int]:
    """Return the tokens without drafts by cause."""
    return {fallback.cause: fallback.tokens for fallback in fallbacks}


def explain_missing_drafts(
    statistics: Statistics, before: pb.GetVerifierInfoResponse, after: pb.GetVerifierInfoResponse
) -> str | None:
    """Explain why a quarter or more of a request's steps had no drafts, from the verifier's counters.

    Return None for fewer such steps, and if no cause is known. The verifier counts all requests together, so under
    load the cause may be another request's.
    """
    steps = statistics.verify_steps
    without = steps - (statistics.drafted[0] if statistics.drafted else 0)
    if without == 0 or (without < steps and (without <= _USUAL_STEPS or 4 * without < steps)):
        return None
    earlier = counted(before.counters.fallbacks)
    causes = counted(after.counters.fallbacks)
    new = {cause: tokens - earlier.get(cause, 0) for cause, tokens in causes.items()}
    cause = max(new, key=lambda one: (one != pb.FALLBACK_CAUSE_LAST_TOKEN, new[one]), default=None)
    if cause is None or new[cause] <= 0:
        return None
    text = f"{without} of {steps} steps had no drafts: {cause_text(cause)}"
    return text + _measured(after) if cause == pb.FALLBACK_CAUSE_PACE else text


def _measured(info: pb.GetVerifierInfoResponse) -> str:
    """Return the throughput that pacing measured without drafts and with the best number of drafts, if known."""
    for drafter in info.drafters:
        none, *some = drafter.plan.tokens_per_s or (0.0,)
        if none and any(some):
            best = max(range(len(some)), key=some.__getitem__)
            return f" (measured: {none:.0f} tokens/s of a request without drafts, {some[best]:.0f} with {best + 1})"
    return ""
