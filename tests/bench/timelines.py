"""Token streams and counters written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from draftwire.client import Statistics
from draftwire.v1 import draft_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.serve.load import Timeline

ROW_BYTES = 24


def timeline(
    steps: Sequence[tuple[int, int]],
    *,
    k: int = 2,
    prompt_tokens: int = 5,
    sent: float = 0.0,
    arrivals: Sequence[float] | None = None,
    asked: int | None = None,
) -> Timeline:
    """Return a stream whose first token is the prompt's; each verify step is (drafts made, drafts accepted)."""
    counts = [1, *(accepted + 1 for _, accepted in steps)]
    drafted, accepted = [0] * k, [0] * k
    for made, taken in steps:
        for position in range(made):
            drafted[position] += 1
        for position in range(taken):
            accepted[position] += 1
    flags = [False, *(flag for _, taken in steps for flag in [True] * taken + [False])]
    return Timeline(
        sent=sent,
        arrivals=tuple(arrivals if arrivals is not None else (sent + 1.0 + i for i in range(len(counts)))),
        counts=tuple(counts),
        token_ids=tuple(range(len(flags))),
        drafted=tuple(flags),
        num_speculative_tokens=asked,
        statistics=Statistics(
            prompt_tokens=prompt_tokens,
            output_tokens=len(flags),
            verify_steps=len(steps),
            verify_tokens=sum(counts) - 1,
            drafted=tuple(drafted),
            accepted=tuple(accepted),
        ),
    )


def counters(
    *, prompt_rows: int, verify_steps: int, verify_rows: int, feature_rows: int = 0, feature_bytes: int | None = None
) -> pb.EngineCounters:
    """Return an engine's counters; by default each feature row has ROW_BYTES."""
    result = pb.EngineCounters(
        steps=verify_steps, prompt_rows=prompt_rows, verify_steps=verify_steps, verify_rows=verify_rows
    )
    if feature_rows:
        size = feature_rows * ROW_BYTES if feature_bytes is None else feature_bytes
        result.traffic.add(
            carrier=draft_pb2.CARRIER_BYTES, steps=verify_steps, feature_rows=feature_rows, feature_bytes=size
        )
    return result
