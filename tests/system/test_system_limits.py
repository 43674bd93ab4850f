"""Limits set by the operator: exceeding one gives an error that names it, and other requests are not affected."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from services import Continuation, crowd, drafted_share, drafter_status, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.client import Completion
from draftwire.contract.addresses import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from draftwire.contract.errors import DraftwireError
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("limits")

MAX_NUM_SEQS = 2
MAX_MODEL_LEN = 100
GREEDY = {"temperature": 0, "max_tokens": 48}


@dataclass(frozen=True)
class Limited:
    """A drafter with room for one verifier and two sequences, and a verifier with a short context."""

    target: Path
    drafter: ServiceProcess
    verifier: ServiceProcess
    client: Client
    greedy: list[Continuation]

    def generate(self, client: Client) -> list[Completion]:
        """Return the completions of all reference prompts, run concurrently; check their tokens."""
        done = crowd(client, [(one.prompt, GREEDY) for one in self.greedy])
        assert [list(one.token_ids) for one in done] == [one.tokens for one in self.greedy]
        return done


@pytest.fixture(scope="module")
def limited(shelf, references, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    target, head, logs = shelf.target("llama"), shelf.head("llama", "good"), tmp_path_factory.mktemp("logs")
    few = ("--max-sessions", "1", "--max-num-seqs", str(MAX_NUM_SEQS))
    options = ("--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN), "--draft-deadline-ms", "off")
    with (
        start_drafter(head, target, "--device", "cpu", *few, log_path=logs / "drafter.log") as drafter,
        start_verifier(
            target, [drafter.address], *options, "--metrics-listen", "127.0.0.1:0", log_path=logs / "verifier.log"
        ) as verifier,
        Client(verifier.address) as client,
    ):
        wait_for_drafter(client, drafter.address)
        yield Limited(target, drafter, verifier, client, references("llama").continuations)


def refusal(call: grpc.Call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def test_sequences_past_those_of_the_drafter_go_without_drafts(limited):
    assert len(limited.greedy) > MAX_NUM_SEQS
    assert 0 < drafted_share(limited.generate(limited.client)) < 0.9
    url = re.search(r"metrics on (http://\S+)", limited.verifier.log_text())[1]
    with urllib.request.urlopen(url, timeout=20) as response:
        page = response.read().decode()
    counted = re.search(r'^draftwire_fallback_tokens_total\{cause="at_capacity",.*\} (\S+)$', page, re.MULTILINE)
    assert float(counted[1]) > 0


def test_a_message_past_the_limit_is_refused_unread(limited):
    refused = []
    for service, method, most in (
        (limited.verifier, "/draftwire.v1.Generation/Generate", MAX_REQUEST_BYTES),
        (limited.drafter, "/draftwire.v1.Drafting/Draft", MAX_MESSAGE_BYTES),
    ):
        running = limited.client.generate(limited.greedy[0].prompt, **GREEDY)
        output = list(next(running).token_ids)
        with grpc.insecure_channel(service.address, [("grpc.max_send_message_length", -1)]) as channel:
            refused.append(refusal(channel.stream_stream(method)(iter([bytes(most + 1)]))))
        output += [token for response in running for token in response.token_ids]
        assert output == limited.greedy[0].tokens
        assert refused[-1][0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"message larger than max ({most + 1} vs. {most})" in refused[-1][1]
    assert drafter_status(limited.client, limited.drafter.address).state == pb.DRAFTER_STATE_READY


@pytest.mark.parametrize(
    "prompt", [[5] * MAX_MODEL_LEN, "word " * MAX_MODEL_LEN, "word " * 100_000], ids=["ids", "text", "long text"]
)
def test_a_prompt_past_the_context_learns_the_longest_length(limited, prompt):
    with pytest.raises(DraftwireError, match=rf"prompt = \d+ (tokens|bytes): allowed range \[1, {MAX_MODEL_LEN - 1}\]"):
        limited.client.complete(prompt)
    limited.generate(limited.client)


def test_a_second_verifier_serves_without_drafts_until_room(limited, tmp_path):
    options = ("--device", "cpu", "--draft-deadline-ms", "off")
    address = limited.drafter.address
    with (
        start_verifier(limited.target, [address], *options, log_path=tmp_path / "second.log") as second,
        Client(second.address) as client,
    ):
        detail = "max_sessions = 1: as many verifiers are already connected"
        wait_for(lambda: detail in drafter_status(client, address).detail, "the drafter has no room")
        assert drafted_share(limited.generate(client)) == 0
        assert drafter_status(limited.client, address).state == pb.DRAFTER_STATE_READY
        limited.verifier.stop()  # this test runs last
        wait_for_drafter(client, address)
        assert drafted_share(limited.generate(client)) > 0
