"""The engine behind a socket gives the same answers, and neither end waits for the other."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import socket
import threading
from typing import Any

import grpc
import pytest
from service_scene import (
    MAX_TOKENS,
    WAIT_S,
    EngineThread,
    error_of,
    make_host,
    outputs_of,
    play,
    request,
    served,
    stub_of,
    tokens_of,
)
from waiting import wait_for

from draftwire.contract.errors import DraftwireError, InvalidArgumentError, QueueFullError, ServerError
from draftwire.contract.retry import retry_after_s
from draftwire.contract.validation import build_sampling_params
from draftwire.v1 import generate_pb2 as pb
from verifier_service.core.request import NoiseKeys
from verifier_service.engine import outputs
from verifier_service.host import process as engine_process
from verifier_service.host.access import Submission
from verifier_service.host.channel import Outbox, pack, receive
from verifier_service.host.host import EngineHost
from verifier_service.options import VerifierOptions

INTERNAL = grpc.StatusCode.INTERNAL


def test_output_is_the_same_behind_a_socket():
    """Tokens, logprobs, counts and error texts are equal; only request ids, times and memory differ."""
    requests = [
        request(logprobs=3),
        request(temperature=0.8, seed=7, stop_token_ids=[5]),
        request(max_tokens=2, min_tokens=2),
        request(stop=["a"]),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[99])),
    ]

    async def answers(*, behind_socket: bool) -> list[Any]:
        seen: list[Any] = []
        async with stub_of(served(behind_socket=behind_socket)) as stub:
            for one in requests:
                try:
                    messages = await outputs_of(stub.Generate(one))
                except grpc.RpcError as error:
                    seen.append((error.code(), error.details()))
                    continue
                for message in messages:
                    message.request_id = ""
                    for field in ("time_to_first_token_s", "total_time_s", "queue_time_s"):
                        if message.HasField("statistics"):
                            message.statistics.ClearField(field)
                seen.append(messages)
            info = await stub.GetVerifierInfo(pb.GetVerifierInfoRequest())
            info.counters.ClearField("times")
            assert info.HasField("server_memory") == behind_socket
            for field in ("memory", "server_memory"):
                info.ClearField(field)
            seen.append(info)
        return seen

    direct, proxied = (asyncio.run(answers(behind_socket=behind)) for behind in (False, True))
    assert direct == proxied
    assert sum(len(message.token_ids) for message in direct[0]) == MAX_TOKENS
    assert [answer[0] for answer in direct[3:5]] == 2 * [grpc.StatusCode.INVALID_ARGUMENT]
    assert direct[5].counters.verify_steps > 0


@play
async def test_a_full_queue_says_when_to_come_again():
    async with stub_of(served()) as stub:
        calls = [stub.Generate(request()) for _ in range(5)]
        ended = await asyncio.gather(*map(outputs_of, calls), return_exceptions=True)
        refused = [one for one in ended if isinstance(one, grpc.RpcError)]
        assert 0 < len(refused) < len(calls)
        for one in refused:
            assert one.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert one.details() == "the queue is full: 1 requests are waiting; try again later"
            assert retry_after_s(one.trailing_metadata()) > 0


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
@play
async def test_a_request_that_nobody_waits_for_leaves_the_batch(how):
    one = served()
    # Until this is set, each step takes 0.2 s longer.
    pause = threading.Event()
    async with stub_of(one) as stub:
        slow_down(one.host, pause)
        call = stub.Generate(request(), timeout=5.0 if how == "deadline" else None)
        await call.read()
        assert one.host.engine.scheduler.running
        if how == "cancelled":
            call.cancel()
        while one.host.engine.scheduler.running:
            await asyncio.sleep(0.01)
        assert one.host.engine.counters().verify_steps < MAX_TOKENS - 1
        pause.set()


def slow_down(host: EngineHost, until: threading.Event) -> None:
    """Delay each step by 0.2 s until the event is set."""
    count_step = host.engine.times.count_step

    def count_slowly(**counts: Any) -> None:
        until.wait(0.2)
        count_step(**counts)

    host.engine.times.count_step = count_slowly  # type: ignore[method-assign]


@play
async def test_loss_of_the_process_ends_present_and_later_requests():
    one = served()
    pause = threading.Event()
    async with stub_of(one) as stub:
        slow_down(one.host, pause)
        calls = [stub.Generate(request()) for _ in range(3)]
        while not one.host.engine.scheduler.running:  # any of the requests may be the first to run
            await asyncio.sleep(0.01)
        one.process.kill()
        for call in [*calls, stub.Generate(request())]:
            details = "the engine's process has ended unexpectedly; the server's log has the cause"
            assert await error_of(outputs_of(call)) == (INTERNAL, details)
        code, _ = await error_of(stub.GetVerifierInfo(pb.GetVerifierInfoRequest()))
        assert code == grpc.StatusCode.UNAVAILABLE
        await asyncio.to_thread(one.has_failed.wait, WAIT_S)
        pause.set()
    assert one.has_failed.is_set()


@play
async def test_an_engine_that_fails_ends_its_requests_and_says_so(monkeypatch):
    one = served()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of order")

    async with stub_of(one) as stub:
        monkeypatch.setattr(outputs, "check_context", fail)
        monkeypatch.setattr(one.host.engine.times, "count_step", fail)
        assert await error_of(outputs_of(stub.Generate(request()))) == (INTERNAL, "the engine failed: out of order")
        assert await asyncio.to_thread(one.has_failed.wait, WAIT_S)


@play
async def test_a_call_that_cannot_be_sent_or_taken_ends_alone():
    one = served()
    host = one.host
    info, submit = host.info, host.submit
    async with stub_of(one) as stub:

        def fail(*_: Any) -> None:
            host.info, host.submit = info, submit
            raise OSError("too many open files")

        host.info = fail
        code, _ = await error_of(stub.GetVerifierInfo(pb.GetVerifierInfoRequest()))
        assert code == INTERNAL
        assert (await stub.GetVerifierInfo(pb.GetVerifierInfoRequest())).max_num_seqs == 2
        host.submit = fail
        details = "the request cannot be submitted: too many open files"
        assert await error_of(outputs_of(stub.Generate(request()))) == (INTERNAL, details)
        assert is_whole(await outputs_of(stub.Generate(request())))
    assert not one.has_failed.is_set()


def test_an_engine_does_not_wait_for_a_reader_that_stands_still():
    """The output of ten requests exceeds the socket's buffer. The test reads none of it before all have ended."""
    params = build_sampling_params(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=15)
    host = make_host()
    process = EngineThread(host)
    connection = process.connection
    try:
        assert receive(connection) == ("ready", host.facts)
        output: dict[int, list[pb.GenerateResponse]] = {}
        for number in range(10):
            keys = (NoiseKeys(1, 2, 3),)
            submission = Submission((number,), f"r{number}", [3, 1, 4], params, 0, keys, 3 + MAX_TOKENS)
            connection.sendall(pack(("submit", submission)))
            # The prompt's step gives the first token and is not a verify step.
            wait_for(lambda: host.engine.counters().verify_steps == (number + 1) * (MAX_TOKENS - 1))  # noqa: B023
        while len(output) < 10 or not all(is_whole(messages) for messages in output.values()):
            kind, items = receive(connection)
            assert kind == "deliver"
            for number, data in items:
                output.setdefault(number, []).append(pb.GenerateResponse.FromString(data))
    finally:
        connection.close()
        process.join()
    tokens = list(map(tokens_of, output.values()))
    assert tokens == 10 * [tokens[0]]
    assert sum(message.ByteSize() for messages in output.values() for message in messages) > 10 * 4096


def is_whole(messages: list[pb.GenerateResponse]) -> bool:
    return len(tokens_of(messages)) == MAX_TOKENS


def test_messages_larger_than_the_socket_come_whole_and_in_order():
    here, there = socket.socketpair()
    outbox = Outbox(there)
    sent = [("deliver", [(number, bytes([number]) * (1 + number * 100_000))]) for number in range(20)]
    for message in sent:
        outbox.send(message)
    assert [receive(here) for _ in sent] == sent
    outbox.close()
    there.close()
    with pytest.raises(EOFError):
        receive(here)
    here.close()


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("max_num_seqs", 0, "allowed range [1, 4096]"),
        InvalidArgumentError.from_text("a server's own words"),
        QueueFullError("full", 1.5),
        ServerError("it broke"),
    ],
)
def test_errors_arrive_as_they_were(error: DraftwireError):
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)


@pytest.mark.parametrize(
    ("device", "given", "has"),
    [("cuda:1", None, True), ("cpu", None, False), ("cuda", False, False), ("cpu", True, True)],
)
def test_a_gpu_has_an_engine_process_unless_set_otherwise(device, given, has):
    assert engine_process.has_engine_process(VerifierOptions("t", device=device, engine_process=given)) is has


def test_an_error_in_the_process_is_on_stderr_and_in_its_status(capfd):
    ours, theirs = socket.socketpair()
    options = VerifierOptions("t", log_level="loud")
    process = multiprocessing.get_context("spawn").Process(target=engine_process.run_engine, args=(options, theirs))
    process.start()
    process.join()
    ours.close()
    theirs.close()
    assert process.exitcode == 1
    assert "Traceback" in capfd.readouterr().err
