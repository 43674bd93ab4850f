"""Checks that a run did all of its work: all rows verified, all drafts made, all features sent, no prefix reused.

The expected work follows from the token streams that the clients received; the verifier counts the work that was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.serve.load import Timeline
from draftwire_bench.serve.metrics import acceptance, sums


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one request if nothing is skipped."""

    verify_steps: int
    drafted: tuple[int, ...]  # at each draft position
    feature_rows: int  # which the drafter needs for the last drafts


def expected_work(timeline: Timeline, k: int, max_tokens: int) -> Work:
    """Return the work of a token stream of `max_tokens` tokens.

    The prompt's step emits the first token. Each verify step has k drafts, or fewer if the output has fewer than k + 1
    tokens left, and emits the accepted drafts and one token sampled from the target.
    """
    drafted = [0] * k
    steps = feature_rows = 0
    emitted, step_start = 1, 1  # output tokens now, and when the step began
    for is_draft in timeline.drafted[1:]:
        emitted += 1
        if is_draft and emitted < len(timeline.drafted):
            continue
        steps += 1
        num_drafts = min(k, max_tokens - step_start - 1)
        for position in range(num_drafts):
            drafted[position] += 1
        if num_drafts > 0:
            # Row i of the head needs the token at i + 1, so the last output token has no row yet.
            feature_rows = timeline.statistics.prompt_tokens + step_start - 1
        step_start = emitted
    return Work(steps, tuple(drafted), feature_rows)


def find_skipped(
    timelines: Sequence[Timeline],
    k: int,
    max_tokens: int,
    counters: pb.EngineCounters,
    feature_row_bytes: int,
) -> list[str]:
    """Return descriptions of skipped or repeated work.

    Args:
        timelines: All requests.
        k: Drafts per verify step of requests that set no number.
        max_tokens: Tokens of each output; requests ignore the end of sequence.
        counters: The engine's counters for only these requests.
        feature_row_bytes: Bytes of features per row.
    """
    ks = [k if timeline.num_speculative_tokens is None else timeline.num_speculative_tokens for timeline in timelines]
    works = [expected_work(timeline, own, max_tokens) for timeline, own in zip(timelines, ks, strict=True)]
    seen = acceptance(timelines)
    steps = sum(work.verify_steps for work in works)
    drafted = sums([work.drafted for work in works])
    pairs = [
        ("output tokens", max_tokens * len(timelines), sum(sum(t.counts) for t in timelines)),
        ("verify steps in the requests' statistics", steps, seen.verify_steps),
        ("verify steps in the engine's counters", steps, counters.verify_steps),
        ("rows were verified", steps + sum(drafted), counters.verify_rows),
        ("prompt rows were computed (fewer with prefix hits)", _prompt_tokens(timelines), counters.prompt_rows),
    ]
    for position, (due, made) in enumerate(zip_longest(drafted, seen.drafted, fillvalue=0), start=1):
        pairs.append((f"drafts were verified at position {position}", due, made))
    problems = [f"{done} {name} instead of {due}" for name, due, done in pairs if due != done]
    least = sum(work.feature_rows for work in works)
    most = sum(t.statistics.prompt_tokens + len(t.drafted) - 1 for t, own in zip(timelines, ks, strict=True) if own)
    return problems + _find_unsent(least, most, counters, feature_row_bytes)


def _prompt_tokens(timelines: Sequence[Timeline]) -> int:
    return sum(timeline.statistics.prompt_tokens for timeline in timelines)


def _find_unsent(least: int, most: int, counters: pb.EngineCounters, feature_row_bytes: int) -> list[str]:
    """The last drafts need `least` rows; `most` is the number of tokens that have a successor."""
    from draftwire.transport.carriers import carrier_name  # imports torch, which takes seconds

    rows = sum(traffic.feature_rows for traffic in counters.traffic)
    problems = [] if least <= rows <= most else [f"{rows} feature rows were sent instead of {least} to {most}"]
    for traffic in counters.traffic:
        due = traffic.feature_rows * feature_row_bytes
        if traffic.feature_bytes != due:
            problems.append(
                f"{traffic.feature_bytes} feature bytes were sent by {carrier_name(traffic.carrier)} instead of {due}, "
                f"which are {traffic.feature_rows} rows of {feature_row_bytes} bytes"
            )
    return problems
