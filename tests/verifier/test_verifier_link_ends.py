"""How a stream to a drafter ends, and when the next stream is opened."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from link_scene import CONNECTING, READY, WAIT_S, Drafter, Linked, end, linked, make_info, on_loop, serve

from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.drafters import connection as drafter_link
from verifier_service.drafters.stream import Answered, Disconnected

# Longer than immediate events take on a busy machine, and shorter than a link waits for a connection.
AT_ONCE_S = 4.0


@on_loop
async def test_a_failed_stream_ends_at_once_and_a_new_one_is_opened():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        stream.fail("no answer in 10 s")
        event = await own.next(AT_ONCE_S)
        assert isinstance(event, Disconnected)
        assert event.stream is stream
        assert await own.connected() is not stream


@on_loop
async def test_the_first_failure_of_a_stream_counts():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        stream.fail("first")
        stream.fail("second", expel=True)
        assert (stream.failure, stream.is_expelled) == ("first", False)
        await own.next()
        await own.connected()


@on_loop
async def test_a_stream_whose_peer_never_reads_ends_when_it_is_failed():
    drafter = Drafter()
    drafter.reads = False
    async with linked(drafter) as own:
        stream = await own.connected()
        features = pb.Tensor(data=bytes(8 << 20))
        for step_id in range(1, 5):
            stream.send(pb.DraftStep(step_id=step_id, features=features))
        await asyncio.sleep(0.2)
        assert not stream.outbox.empty()  # a message is blocked
        began = time.monotonic()
        stream.fail("too much is unanswered")
        assert isinstance(await own.next(AT_ONCE_S), Disconnected)
        drafter.reads = True
        await own.connected()
        assert time.monotonic() - began < AT_ONCE_S


@on_loop
async def test_a_failure_from_another_thread_ends_the_stream():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        await asyncio.to_thread(stream.fail, "lost")
        assert isinstance(await own.next(AT_ONCE_S), Disconnected)


@on_loop
async def test_an_expelled_drafter_is_left_alone():
    drafter = Drafter()
    async with linked(drafter) as own:
        (await own.connected()).fail("wrong answer: drafts.tokens", expel=True)
        assert isinstance(await own.next(AT_ONCE_S), Disconnected)
        detail = await own.wait_for_state(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert detail == "expelled: wrong answer: drafts.tokens"
        await asyncio.sleep(0.3)
        assert own.events.empty()
        assert len(drafter.hellos) == 1


class Leaving(Drafter):
    """A drafter that ends its first stream after its first answer, with status `ends_with` or, if None, OK."""

    def __init__(self, ends_with: grpc.StatusCode | None) -> None:
        super().__init__()
        self.ends_with = ends_with

    async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for response in super().Draft(request_iterator, context):
            yield response
            if response.HasField("drafts") and len(self.hellos) == 1:
                break
        if self.ends_with is not None:
            await context.abort(self.ends_with, "the head is on fire")


@pytest.mark.parametrize("ends_with", [None, grpc.StatusCode.INTERNAL])
@on_loop
async def test_a_drafter_that_leaves_with_its_wrong_answer_is_expelled(ends_with):
    """The engine checks the answer after the stream has ended."""
    drafter = Leaving(ends_with)
    async with linked(drafter) as own:
        own.releases = False
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        assert isinstance(await own.next(), Disconnected)
        await asyncio.sleep(0.3)
        stream.fail("wrong answer: drafts.tokens", expel=True)
        stream.release()
        detail = await own.wait_for_state(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert detail == "expelled: wrong answer: drafts.tokens"
        assert len(drafter.hellos) == 1


@on_loop
async def test_an_expulsion_outlives_the_name_servers_answers(monkeypatch):
    """A link that is not needed is dropped with its name; a new link would not know of the expulsion."""
    async with linked(Drafter()) as own:
        stream = await own.connected()
        assert own.link.is_needed
        stream.fail("the connection broke")
        assert isinstance(await own.next(), Disconnected)
        await own.wait_for_state(CONNECTING)
        assert not own.link.is_needed
        (await own.connected()).fail("wrong answer", expel=True)
        await own.wait_for_state(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert own.link.is_needed
        monkeypatch.setattr(drafter_link, "EXPELLED_RETRY_S", (0.0, 0.0))  # the expulsion is over
        assert not own.link.is_needed


@on_loop
async def test_an_expelled_drafter_is_taken_back_after_a_while(monkeypatch):
    monkeypatch.setattr(drafter_link, "EXPELLED_RETRY_S", (0.05, 0.1))
    async with linked(Drafter()) as own:
        for on_trial in (False, True, True):
            stream = await own.connected()
            assert stream.on_trial == on_trial
            stream.fail("wrong answer", expel=True)
            assert isinstance(await own.next(), Disconnected)


@on_loop
async def test_a_drafter_is_shown_as_its_stream_is_judged(monkeypatch):
    monkeypatch.setattr(drafter_link, "EXPELLED_RETRY_S", (0.05, 0.1))
    async with linked(Drafter()) as own:
        first = await own.connected()
        first.fail("wrong answer", expel=True)
        await own.next()
        second = await own.connected()
        second.report(generate_pb2.DRAFTER_STATE_PROBING)
        assert "on trial" in await own.wait_for_state(generate_pb2.DRAFTER_STATE_PROBING)
        first.report(generate_pb2.DRAFTER_STATE_SLOW)  # of a stream that has ended
        second.report(READY)
        second.fail("the connection broke")
        await own.next()
        assert own.link.status.state == CONNECTING
        assert not (await own.connected()).on_trial


@on_loop
async def test_a_stream_that_the_drafter_ends_is_posted_and_reopened():
    async with linked(Leaving(grpc.StatusCode.INTERNAL)) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        event = await own.next()
        assert isinstance(event, Disconnected)
        assert event.stream is stream
        assert await own.wait_for_state(CONNECTING) == "INTERNAL: the head is on fire"
        await own.connected()


@on_loop
async def test_an_unreachable_drafter_is_tried_again_until_it_is_there():
    server, port = await serve(Drafter())
    await server.stop(None)
    own = Linked(port, {})
    assert "UNAVAILABLE" in await own.wait_for_state(CONNECTING)
    server, _ = await serve(Drafter(), port)
    await own.connected()
    own.task.cancel()
    await asyncio.gather(own.task, return_exceptions=True)
    await server.stop(None)


@on_loop
async def test_a_drafter_that_was_restarted_is_connected_again():
    server, port = await serve(Drafter())
    own = Linked(port, {})
    first = await own.connected()
    await server.stop(None)
    event = await own.next()
    assert isinstance(event, Disconnected)
    assert event.stream is first
    server, _ = await serve(Drafter(make_info(head_fingerprint="1234")), port)
    second = await own.connected()
    assert (second.head.fingerprint, own.link.status.head_fingerprint) == ("1234", "1234")
    own.task.cancel()
    await asyncio.gather(own.task, return_exceptions=True)
    await server.stop(None)


@on_loop
async def test_a_cancelled_link_ends_at_once_and_posts_its_end():
    async with linked(Drafter()) as own:
        await own.connected()
        assert await end(own) < AT_ONCE_S
        assert isinstance(await own.next(), Disconnected)


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.3])
@pytest.mark.parametrize("expel", [False, True])
@on_loop
async def test_a_link_cancelled_after_its_stream_failed_ends_at_once(expel, pause_s, monkeypatch):
    monkeypatch.setattr(drafter_link, "BACKOFF_S", (60.0, 60.0))
    monkeypatch.setattr(drafter_link, "CONNECT_TIMEOUT_S", WAIT_S)  # the test sees one attempt only
    async with linked(Drafter()) as own:
        (await own.connected()).fail("lost", expel=expel)
        await asyncio.sleep(pause_s)
        assert await end(own) < AT_ONCE_S
        assert isinstance(await own.next(), Disconnected)
