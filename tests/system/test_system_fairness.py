"""Two verifiers share a drafter that has room for a few sequences: the flood of one leaves the other its part."""

from __future__ import annotations

import threading

import pytest
from services import acceptance_rate, crowd, drafted_share, drafter_status, wait_for, wait_for_drafter

from draftwire import Client
from draftwire.processes import start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("fairness")

SLOTS = 4
GREEDY = {"temperature": 0, "max_tokens": 48, "num_speculative_tokens": 4}


def test_the_flood_of_one_verifier_does_not_starve_the_sequences_of_another(shelf, references, tmp_path):
    target, head, cpu = shelf.target("llama"), shelf.head("llama", "good"), ("--device", "cpu")
    greedy = references("llama").continuations
    options = (*cpu, "--draft-deadline-ms", "off")
    with (
        start_drafter(head, target, *cpu, "--max-num-seqs", str(SLOTS), log_path=tmp_path / "drafter.log") as drafter,
        start_verifier(target, [drafter.address], *options, log_path=tmp_path / "flooding.log") as flooding,
        start_verifier(target, [drafter.address], *options, log_path=tmp_path / "other.log") as other,
        Client(flooding.address) as flood,
        Client(other.address) as client,
    ):
        for one in (flood, client):
            wait_for_drafter(one, drafter.address)
        calls = [(continuation.prompt, GREEDY) for continuation in greedy]
        is_done = threading.Event()

        def keep_flooding() -> None:
            while not is_done.is_set():
                crowd(flood, calls, at_once=32)

        flooder = threading.Thread(target=keep_flooding)
        flooder.start()
        try:
            wait_for(lambda: drafter_status(flood, drafter.address).sequences >= SLOTS, "the flood has all slots")
            completions = crowd(client, calls, at_once=SLOTS // 2)
        finally:
            is_done.set()
            flooder.join()
    assert [list(completion.token_ids) for completion in completions] == [c.tokens for c in greedy]
    assert drafted_share(completions) > 0.5
    assert acceptance_rate(completions) > 0.5
