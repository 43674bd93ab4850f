"""The stream to a drafter: its hello, steps, answers and load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import grpc
import torch
from link_scene import (
    CONNECTING,
    HIDDEN,
    NUM_LAYERS,
    READY,
    VOCAB,
    WAIT_S,
    Drafter,
    direct_stream,
    linked,
    make_info,
    on_loop,
)
from rings import channel_ends

from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.tensors import encode_tensor
from draftwire.transport.ring import MAX_MESSAGE_BYTES
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from draftwire_kernels import NOISE_VERSION
from verifier_service.drafters import connection as drafter_link
from verifier_service.drafters.stream import Answered, Disconnected, Draining


@on_loop
async def test_a_drafter_that_fits_is_connected():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        assert (stream.address, stream.failure) == (own.link.status.address, None)
        head = stream.head
        assert (head.fingerprint, head.layers, head.dtype) == ("f00d", (1, 3), torch.bfloat16)
        assert (head.draft_vocab_size, head.draft_token_ids, head.row_bytes) == (VOCAB, None, 2 * 2 * HIDDEN)
        assert (head.max_drafts, head.max_sequences, head.max_model_len) == (6, 5, 48)
        assert (own.link.status.head_fingerprint, own.link.status.detail) == ("f00d", "")


@on_loop
async def test_a_verifier_with_nothing_to_send_sends_keep_alives(monkeypatch):
    monkeypatch.setattr(drafter_link, "KEEP_ALIVE_S", 0.05)
    drafter = Drafter()
    async with linked(drafter) as own:
        stream = await own.connected()
        end = time.monotonic() + WAIT_S
        while drafter.num_keep_alives < 3:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        stream.send(pb.DraftStep(step_id=1))
        event = await own.next()
        assert isinstance(event, Answered)
        assert event.drafts.step_id == 1  # KeepAlives get no answer
        assert own.link.status.state == READY


@on_loop
async def test_without_a_place_for_a_rendezvous_tensors_go_in_messages(tmp_path):
    drafter = Drafter()
    async with linked(drafter, rendezvous_dir=tmp_path / "gone") as own:
        stream = await own.connected()
        assert stream.sender.carrier == pb.CARRIER_BYTES
    assert not drafter.hellos[0].HasField("rendezvous")


@on_loop
async def test_a_drafter_is_shown_ready_when_the_engine_knows_it():
    async with linked(Drafter()) as own:
        await own.connected()
        assert own.shown == [generate_pb2.DRAFTER_STATE_CONNECTING] * 2  # once for the state and once for the load


@on_loop
async def test_the_hello_says_what_the_target_is_and_what_will_be_sent():
    drafter = Drafter()
    async with linked(drafter, {"num_speculative_tokens": 2}) as own:
        await own.connected()
    (hello,) = drafter.hellos
    assert (hello.protocol_version, hello.noise_version) == (PROTOCOL_VERSION, NOISE_VERSION)
    assert (hello.verifier, hello.target.name, hello.target.fingerprint) == ("target", "org/target", "beef")
    target = hello.target
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (VOCAB, HIDDEN, NUM_LAYERS)
    assert hello.features == drafter.info.features
    assert hello.speculative_config.num_speculative_tokens == 2
    assert (hello.max_sequences, list(hello.carriers)) == (5, [pb.CARRIER_SHM, pb.CARRIER_BYTES])


@on_loop
async def test_target_ids_of_a_reduced_vocabulary_come_with_the_hello():
    ids = torch.tensor([2, 3, 19], dtype=torch.int32)
    async with linked(Drafter(make_info(draft_vocab_size=3), {"draft_token_ids": encode_tensor(ids)})) as own:
        head = (await own.connected()).head
        assert (head.draft_vocab_size, head.draft_token_ids.dtype) == (3, torch.int64)
        assert head.draft_token_ids.tolist() == [2, 3, 19]


@on_loop
async def test_a_head_without_its_targets_number_of_layers_is_taken():
    async with linked(Drafter(make_info(target_num_layers=0))) as own:
        await own.connected()


@on_loop
async def test_steps_go_out_in_order_and_answers_are_posted():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        for step_id in (1, 2, 3):
            stream.send(pb.DraftStep(step_id=step_id))
        for step_id in (1, 2, 3):
            event = await own.next()
            assert isinstance(event, Answered)
            assert (event.stream, event.drafts.step_id) == (stream, step_id)


@on_loop
async def test_a_message_is_encoded_once(encodings: Counter[str]):
    async with linked(Drafter()) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        assert encodings == {"DraftRequest": 2, "DraftResponse": 2}  # a hello and one message each


@on_loop
async def test_the_status_counts_the_bytes_of_steps_and_answers_alone():
    class Leaving(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in super().Draft(request_iterator, context):
                yield response
            yield pb.DraftResponse(draining=pb.Draining(timeout_s=5))

    async with linked(Leaving()) as own:
        stream = await own.connected()
        for step_id in (1, 1000):
            stream.send(pb.DraftStep(step_id=step_id))
            assert isinstance(await own.next(), Answered)
        stream.end()
        assert isinstance(await own.next(), Draining)
        status, ids = own.link.status, (1, 1000)
        steps = [pb.DraftRequest(step=pb.DraftStep(step_id=step_id)) for step_id in ids]
        assert status.sent_message_bytes == sum(len(step.SerializeToString()) for step in steps)
        answers = [pb.DraftResponse(drafts=pb.Drafts(step_id=step_id)) for step_id in ids]
        assert status.received_message_bytes == sum(len(answer.SerializeToString()) for answer in answers)


@on_loop
async def test_a_drafter_without_room_is_tried_again():
    drafter = Drafter()
    drafter.abort = (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 8)")
    async with linked(drafter) as own:
        assert "RESOURCE_EXHAUSTED" in await own.wait_for_state(CONNECTING)
        drafter.abort = None
        await own.connected()


@on_loop
async def test_the_load_is_asked_for_while_no_answer_tells_it(monkeypatch):
    monkeypatch.setattr(drafter_link, "INFO_EVERY_S", 0.02)
    drafter = Drafter(make_info(load=pb.DrafterLoad(sequences=3)))
    async with linked(drafter) as own:
        await own.connected()
        assert [load.sequences for load in own.loads] == [3]
        drafter.info.load.sequences = 9
        end = time.monotonic() + WAIT_S
        while own.loads[-1].sequences != 9:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)


@on_loop
async def test_the_memory_is_noted_and_noted_anew_while_answers_come(monkeypatch):
    monkeypatch.setattr(drafter_link, "INFO_EVERY_S", 0.02)
    drafter = Drafter(make_info(memory=pb.MemoryUse(peak_host_bytes=3)))
    async with linked(drafter) as own:
        stream = await own.connected()
        assert own.link.status.memory.peak_host_bytes == 3
        unknown = b"\x98\x06\x01"  # field 99
        drafter.info.memory.MergeFromString(pb.MemoryUse(peak_host_bytes=9).SerializeToString() + unknown)
        end, step_id = time.monotonic() + WAIT_S, 0
        while own.link.status.memory.peak_host_bytes != 9:
            assert time.monotonic() < end
            stream.send(pb.DraftStep(step_id=(step_id := step_id + 1)))
            await asyncio.sleep(0.005)
        # Unknown fields are not passed on to clients.
        assert own.link.status.memory == pb.MemoryUse(peak_host_bytes=9)


@on_loop
async def test_a_draining_drafter_is_logged_and_left_when_streams_end():
    drafter = Drafter()

    class Leaving(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in drafter.Draft(request_iterator, context):
                yield response
                if response.HasField("drafts"):
                    yield pb.DraftResponse(draining=pb.Draining(timeout_s=5))

    async with linked(Leaving()) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        assert isinstance(await own.next(), Draining)
        assert own.link.status.state == generate_pb2.DRAFTER_STATE_DRAINING
        stream.end()
        assert isinstance(await own.next(), Disconnected)
        assert "drained" in await own.wait_for_state(CONNECTING)


@on_loop
async def test_a_drafter_that_says_no_hello_is_tried_again(monkeypatch):
    monkeypatch.setattr(drafter_link, "HELLO_TIMEOUT_S", 0.2)
    drafter = Drafter()

    class Silent(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            if len(drafter.hellos) == 0:
                drafter.hellos.append((await anext(request_iterator)).hello)
                await asyncio.Event().wait()
            async for response in drafter.Draft(request_iterator, context):
                yield response

    async with linked(Silent()) as own:
        await own.connected()
        assert len(drafter.hellos) == 2


@on_loop
async def test_a_drafter_may_capture_its_graphs_before_its_hello(monkeypatch):
    """The capture takes longer than CONNECT_TIMEOUT_S; a new stream would start it again."""
    monkeypatch.setattr(drafter_link, "CONNECT_TIMEOUT_S", 1.0)

    class Capturing(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in super().Draft(request_iterator, context):
                await asyncio.sleep(2.0)
                yield response

    drafter = Capturing()
    async with linked(drafter) as own:
        await own.connected()
        assert len(drafter.hellos) == 1


# Steps sent directly to the drafter's engine.


@on_loop
async def test_steps_go_directly_unless_too_long_or_overtaking():
    ours, theirs = channel_ends()
    stream = direct_stream(ours)

    def sent(step_id: int, num_bytes: int = 0) -> str:
        """Send a step; return whether it goes through the ring or the stream."""
        features = None
        if num_bytes:
            features = stream.sender.begin(torch.float32, (num_bytes // 4,))
            features.seal()
        stream.send(pb.DraftStep(step_id=step_id), features)
        return "ring" if theirs.receive() else "stream"

    assert [sent(1), sent(2)] == ["ring", "ring"]
    assert sent(3, 4 * MAX_MESSAGE_BYTES) == "stream"
    assert sent(4) == "stream"
    stream.record_answer(pb.Drafts(step_id=2))
    assert sent(5) == "stream"
    stream.record_answer(pb.Drafts(step_id=3))
    stream.record_answer(pb.Drafts(step_id=4))
    assert sent(6) == "stream"
    for step_id in (5, 6):
        stream.record_answer(pb.Drafts(step_id=step_id))
    assert sent(7) == "ring"
    await asyncio.sleep(0)
    assert [stream.outbox.get_nowait()[0].step_id for _ in range(stream.outbox.qsize())] == [3, 4, 5, 6]
    theirs.close()
    stream.send(pb.DraftStep(step_id=8))
    await asyncio.sleep(0)
    assert stream.outbox.get_nowait()[0].step_id == 8
    ours.close()


@on_loop
async def test_answers_are_read_directly_until_nonsense_comes():
    ours, theirs = channel_ends()
    cancelled = asyncio.Event()
    stream = direct_stream(ours, cancelled.set)
    for step_id in (1, 2):
        stream.send(pb.DraftStep(step_id=step_id))
        theirs.send(pb.DraftResponse(drafts=pb.Drafts(step_id=step_id)).SerializeToString())
    assert [event.drafts.step_id for event in stream.read_direct() or ()] == [1, 2]
    theirs.send(b"\xff" * 20)
    assert stream.read_direct() is None
    assert stream.is_expelled
    await asyncio.wait_for(cancelled.wait(), WAIT_S)
    theirs.send(pb.DraftResponse(drafts=pb.Drafts(step_id=3)).SerializeToString())
    assert stream.read_direct() is None
    ours.close()
    theirs.close()
