"""Wrong requests and streams: each gets an error that names the problem, and both services keep serving."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from model_configs import write_config
from services import Pair, acceptance_rate, drafter_status, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.contract.errors import QueueFullError
from draftwire.v1 import config_pb2 as config
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc as pb_grpc
from draftwire_bench.processes import start_drafter, start_verifier
from models import CONTEXT, VOCAB_SIZE

pytestmark = pytest.mark.xdist_group("llama")
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def serving(llama, references) -> Iterator[Pair]:
    """The pair; after the test both services must serve as before."""
    processes = (llama.verifier.pid, llama.drafter.pid)
    yield llama
    good = references("llama").continuations[0]
    wait_for_drafter(llama.client, llama.drafter_address)
    completion = llama.client.complete(good.prompt, temperature=0, max_tokens=48)
    assert list(completion.token_ids) == good.tokens
    assert acceptance_rate([completion]) > 0
    assert processes == (llama.verifier.pid, llama.drafter.pid)
    assert llama.verifier.running
    assert llama.drafter.running


@pytest.fixture
def generation(llama) -> Iterator[pb_grpc.GenerationStub]:
    """The bare stub; `Client` would refuse most of these requests before sending them."""
    with grpc.insecure_channel(llama.verifier.address) as channel:
        yield pb_grpc.GenerationStub(channel)


def refusal(call) -> tuple[grpc.StatusCode, str]:
    """Return status and message of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def tokens_request(ids=(1, 2, 3), **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **options)


# One value for each kind of limit; tests/contract/test_validation.py covers every parameter.
SAMPLING = [
    ({"temperature": NAN}, "temperature = nan: allowed range [0, inf)"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens = 5: allowed range [0, max_tokens = 4]"),
    ({"logit_bias": {5: 101.0}}, "logit_bias = 101.0: allowed range [-100, 100]"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias = {VOCAB_SIZE}: token ids must be in [0, {VOCAB_SIZE})"),
    ({"stop": ["é" * 513]}, "allowed length 1 to 1024 bytes, got 1026"),
    ({"stop_token_ids": [VOCAB_SIZE]}, f"stop_token_ids = {VOCAB_SIZE}: token ids must be in [0, {VOCAB_SIZE})"),
    ({"bad_word_ids": [config.TokenSequence(ids=[1])] * 129}, "bad_word_ids = 129 entries: at most 128 entries"),
]


def test_sampling_parameters_out_of_range_are_named(serving, generation):  # noqa: ARG001
    for options, message in SAMPLING:
        request = tokens_request(sampling_params=config.SamplingParams(**options))
        code, details = refusal(generation.Generate(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT, options
        assert details.startswith("sampling_params."), options
        assert message in details


REQUESTS = [
    (pb.GenerateRequest(), "prompt = None: exactly one of text, token_ids and chat is required"),
    (pb.GenerateRequest(text=""), "text = '': must not be empty"),
    (tokens_request(()), "token_ids.ids = no token: at least one token is required"),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages = []: at least one message is required"),
    (tokens_request((1, VOCAB_SIZE)), f"token_ids.ids = {VOCAB_SIZE}: token ids must be in [0, {VOCAB_SIZE})"),
    (tokens_request((2**32 - 1,)), f"token_ids.ids = 4294967295: token ids must be in [0, {VOCAB_SIZE})"),
    (tokens_request([5] * CONTEXT), f"prompt = {CONTEXT} tokens: allowed range [1, {CONTEXT - 1}] tokens"),
    (pb.GenerateRequest(text="word " * CONTEXT), f"allowed range [1, {CONTEXT - 1}] tokens: the context has {CONTEXT}"),
    (tokens_request([5] * 100_000), f"prompt = 100000 tokens: allowed range [1, {CONTEXT - 1}] tokens"),
    (pb.GenerateRequest(text="word " * 100_000), f"prompt = 500000 bytes: allowed range [1, {CONTEXT - 1}] tokens"),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="word " * 100_000)])),
        f"prompt = 500000 bytes: allowed range [1, {CONTEXT - 1}] tokens",
    ),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 4097)),
        "chat.messages = 4097 entries: at most 4096 entries",
    ),
    (tokens_request(num_speculative_tokens=8), "num_speculative_tokens = 8: allowed range [0, 7] on this server"),
    (tokens_request(num_speculative_tokens=17), "num_speculative_tokens = 17: allowed range [0, 16]"),
    (tokens_request(request_id="x" * 129), "allowed: 1 to 128 visible ASCII characters"),
    (tokens_request(request_id="two\nlines"), "request_id = 'two\\nlines': allowed: 1 to 128 visible ASCII characters"),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="r" * 65, content="x")])),
        "allowed length 1 to 64 bytes, got 65",
    ),
]


def test_wrong_requests_learn_what_is_allowed(serving, generation):  # noqa: ARG001
    for request, message in REQUESTS:
        code, details = refusal(generation.Generate(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert message in details


def test_longest_prompt_is_served(serving, generation):  # noqa: ARG001
    responses = list(generation.Generate(tokens_request([5] * (CONTEXT - 1))))
    assert sum(len(response.token_ids) for response in responses) == 1
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


def test_bytes_that_are_no_message_fail_alone(serving):
    for address, method in (
        (serving.verifier.address, "/draftwire.v1.Generation/Generate"),
        (serving.drafter_address, "/draftwire.v1.Drafting/Draft"),
    ):
        with grpc.insecure_channel(address) as channel:
            code, details = refusal(channel.stream_stream(method)(iter([b"\xff\xff\xff\xff"])))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("message = 4 bytes: cannot be decoded: ")
        assert "Traceback" not in serving.verifier.log_text() + serving.drafter.log_text()


def test_a_method_whose_name_is_no_text_is_refused_alone(serving):
    """Plain grpc.aio stops accepting calls after such a name."""
    path = b"/draftwire.v1.Drafting/\xff"
    headers = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    headers[b"content-type"] = b"application/grpc"
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(text)]) + text for name, text in headers.items())
    frames = struct.pack(">IBI", 4, 0, 0) + struct.pack(">IBI", len(block) << 8 | 1, 5, 1) + block
    for address in (serving.verifier.address, serving.drafter_address):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames)
            answer = b""
            while b"Method not found!" not in answer:
                answer += (piece := connection.recv(4096))
                assert piece, answer


def test_bytes_that_are_no_http2_fail_alone(serving):
    for address in (serving.verifier.address, serving.drafter_address):
        host, _, port = address.rpartition(":")
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096, b"\0" * 4096):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(noise)


CLIENT = """
import sys
from draftwire import Client
streams = [Client(sys.argv[1]).generate([5, 6, 7], max_tokens=200, ignore_eos=True) for _ in range(4)]
for stream in streams:
    next(stream)
print("streaming", flush=True)
for stream in streams:
    list(stream)
"""


def test_a_client_that_vanishes_mid_stream_leaves_nothing_behind(serving):
    """The drafter is stopped and the requests wait for drafts, so they can end only because their client is gone."""
    serving.drafter.send_signal(signal.SIGSTOP)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, serving.verifier.address], stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout.readline() == "streaming\n"
            assert serving.client.info().requests_running == 4
            client.kill()
        wait_for(lambda: serving.client.info().requests_running == 0, "no request is running")
        assert drafter_status(serving.client, serving.drafter_address).state == pb.DRAFTER_STATE_READY
    finally:
        serving.drafter.send_signal(signal.SIGCONT)


def test_passed_deadline_ends_the_request(serving, generation):
    serving.drafter.send_signal(signal.SIGSTOP)
    try:
        request = tokens_request(sampling_params=config.SamplingParams(max_tokens=200, ignore_eos=True))
        assert refusal(generation.Generate(request, timeout=1.0))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: serving.client.info().requests_running == 0, "no request is running")
    finally:
        serving.drafter.send_signal(signal.SIGCONT)


def test_a_drafter_for_another_target_is_refused(shelf, references, tmp_path):
    """The verifier also runs one request at a time and queues at most one, for `check_full_queue`."""
    target = write_config(tmp_path / "target")
    head = write_config(tmp_path / "head", draft_vocab_size=200, num_hidden_layers=1)
    drafter = start_drafter(
        head, target, "--device", "cpu", "--load-format", "dummy", log_path=tmp_path / "drafter.log"
    )
    verifier = start_verifier(
        shelf.target("llama"),
        [drafter.address],
        *("--device", "cpu", "--max-num-seqs", "1", "--max-queue", "1"),
        log_path=tmp_path / "verifier.log",
    )
    try:
        with Client(verifier.address) as client:
            wait_for_drafter(client, drafter.address, pb.DRAFTER_STATE_REFUSED)
            detail = drafter_status(client, drafter.address).detail
            assert "vocab_size" in detail
            assert "300" in detail
            assert "310" in detail
            good = references("llama").continuations[0]
            completion = client.complete(good.prompt, temperature=0, max_tokens=48)
            assert list(completion.token_ids) == good.tokens
            assert sum(completion.statistics.drafted) == 0
            check_full_queue(client)
    finally:
        verifier.kill()
        drafter.kill()


def check_full_queue(client: Client) -> None:
    """Check that some of many concurrent long requests are refused, and that the rest and later ones are served."""

    def outcome(_: int) -> tuple[int, ...] | str:
        try:
            return client.complete([5, 6], temperature=0, max_tokens=200, ignore_eos=True).token_ids
        except QueueFullError as error:
            return str(error)

    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(outcome, range(12)))
    assert set(map(type, outcomes)) == {tuple, str}
    assert {text for text in outcomes if isinstance(text, str)} == {
        "the queue is full: 1 requests are waiting; try again later"
    }
    assert {tokens for tokens in outcomes if isinstance(tokens, tuple)} == {outcome(0)}
