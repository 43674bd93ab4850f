"""Peers that go or hang on the verifier's other side: clients that do not read, and a verifier that is killed."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from addresses import free_address
from services import DEMO, wait_for, wait_for_drafter

from draftwire import Client
from draftwire.processes import start_drafter, start_verifier
from draftwire.v1 import config_pb2, draft_pb2, draft_pb2_grpc, generate_pb2, generate_pb2_grpc

pytestmark = pytest.mark.long

CPU = ("--device", "cpu")
NUM_STALLED = 16
NUM_TOKENS = 200
# A window that a few messages fill, and that does not grow.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
# What the unread output of all stalled clients may take in the verifier: some KiB for each token's message.
MOST_GROWTH_BYTES = NUM_STALLED * NUM_TOKENS * 16 * 1024


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def test_clients_that_do_not_read_delay_no_other_and_get_everything_when_they_do(tmp_path):
    with (
        start_verifier(DEMO / "target", [], *CPU, log_path=tmp_path / "verifier.log") as verifier,
        Client(verifier.address) as client,
        grpc.insecure_channel(verifier.address, SMALL_WINDOW) as channel,
    ):
        prompt = [5, 6, 7]
        alone = client.complete(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
        before = resident_bytes(verifier.pid)
        params = config_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
        request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling_params=params)
        stalled = [generate_pb2_grpc.GenerationStub(channel).Generate(request) for _ in range(NUM_STALLED)]
        first = [next(call) for call in stalled]
        # Nobody reads, and yet all of them are computed, and others are served meanwhile.
        beside = client.complete(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert beside.token_ids == alone.token_ids
        wait_for(lambda: client.info().requests_running == 0, "all are computed", 300)
        assert resident_bytes(verifier.pid) - before < MOST_GROWTH_BYTES
        for begin, call in zip(first, stalled, strict=True):
            tokens = [*begin.token_ids, *(token for message in call for token in message.token_ids)]
            assert tuple(tokens) == alone.token_ids


def test_a_verifier_that_is_killed_leaves_nothing_at_its_drafter_and_drafts_again_when_it_is_back(tmp_path):
    address = free_address()
    with (
        start_drafter(DEMO / "head", DEMO / "target", *CPU, log_path=tmp_path / "drafter.log") as drafter,
        grpc.insecure_channel(drafter.address) as channel,
    ):
        stub = draft_pb2_grpc.DraftingStub(channel)

        def load() -> draft_pb2.DrafterLoad:
            return stub.GetDrafterInfo(draft_pb2.GetDrafterInfoRequest()).load

        for _ in range(2):
            options = (*CPU, "--listen", address, "--draft-deadline-ms", "off")
            verifier = start_verifier(
                DEMO / "target", [drafter.address], *options, log_path=tmp_path / "verifier.log"
            )
            try:
                with Client(address) as client:
                    wait_for_drafter(client, drafter.address)
                    streams = [client.generate([5, 6, 7], max_tokens=1000, ignore_eos=True) for _ in range(4)]
                    for stream in streams:
                        next(stream)
                    wait_for(lambda: load().sequences == 4, "all sequences are open")
                    assert load().sessions == 1
                    verifier.kill()
            finally:
                verifier.kill()
            wait_for(lambda: load() == draft_pb2.DrafterLoad(), "sessions, sequences and cache are free")
