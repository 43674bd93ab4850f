"""Two verifiers share a drafter with few slots: a flood of requests at one does not reduce the other's drafts.

Draft deadlines are off, which also turns adaptive k off. With either, step times decide how many steps have drafts,
and the flood takes CPU cores too (figures: docs/operations.md). Without both, only the drafter's slots and cache
decide.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from services import acceptance_rate, crowd, drafter_status, wait_for_drafter
from waiting import wait_for

from draftwire import Client, Completion
from draftwire_bench.processes import start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("fairness")

SLOTS = 4
GREEDY = {"temperature": 0, "max_tokens": 48, "num_speculative_tokens": 4}
MAX_LOSS = 0.05


def drafted_steps(completions: Sequence[Completion]) -> float:
    """Return the share of verify steps that had drafts."""
    statistics = [completion.statistics for completion in completions]
    return sum(one.drafted[0] for one in statistics) / sum(one.verify_steps for one in statistics)


def test_one_verifiers_flood_takes_no_drafts_from_another(shelf, references, tmp_path):
    target, head, cpu = shelf.target("llama"), shelf.head("llama", "good"), ("--device", "cpu")
    greedy = references("llama").continuations[:8]
    options = (*cpu, "--draft-deadline-ms", "off")
    with (
        start_drafter(head, target, *cpu, "--max-num-seqs", str(SLOTS), log_path=tmp_path / "drafter.log") as drafter,
        start_verifier(target, [drafter.address], *options, log_path=tmp_path / "flooding.log") as flooding,
        start_verifier(target, [drafter.address], *options, log_path=tmp_path / "other.log") as other,
        Client(flooding.address) as flood,
        Client(other.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for one in (flood, client):
            wait_for_drafter(one, drafter.address)
        calls = [(continuation.prompt, GREEDY) for continuation in greedy]
        alone = crowd(client, calls, at_once=SLOTS // 2)
        is_done = threading.Event()

        def keep_flooding() -> None:
            while not is_done.is_set():
                crowd(flood, 3 * calls, at_once=24)

        flooder = pool.submit(keep_flooding)
        try:
            wait_for(lambda: drafter_status(flood, drafter.address).sequences >= SLOTS, "the flood has all slots")
            beside = crowd(client, calls, at_once=SLOTS // 2)
        finally:
            is_done.set()
        flooder.result()
    for completions in (alone, beside):
        assert [list(completion.token_ids) for completion in completions] == [c.tokens for c in greedy]
    figures = [(drafted_steps(completions), acceptance_rate(completions)) for completions in (alone, beside)]
    print("steps with drafts and acceptance, alone and beside the flood:", figures)
    assert drafted_steps(beside) >= drafted_steps(alone) - MAX_LOSS
    assert acceptance_rate(beside) >= acceptance_rate(alone) - MAX_LOSS
