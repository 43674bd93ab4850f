"""Both ends of one direction over one segment: tensors that arrive, refused messages, and the reuse of room."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from fake_driver import FakeDriver
from outgoing import finish, send

from draftwire.contract.errors import InvalidArgumentError
from draftwire.transport import TensorReceiver, TensorSender
from draftwire.transport.cuda_segment import CudaSegment
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.segment import ALIGNMENT, MAX_SPANS, Segment
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")
SIZE = 16 * 1024


def host_segments() -> tuple[Segment, Segment]:
    made, fds = HostSegment.create(SIZE, CPU)
    attached = HostSegment.attach(fds, SIZE, CPU)
    for fd in fds:
        os.close(fd)
    return attached, made


def cuda_segments() -> tuple[Segment, Segment]:
    driver = FakeDriver()
    made, fds = CudaSegment.create(SIZE, CPU, driver)
    attached = CudaSegment.attach(fds, SIZE, CPU, driver)
    for fd in fds:
        os.close(fd)
    return attached, made


@pytest.fixture(params=[host_segments, cuda_segments], ids=["shm", "cuda_ipc"])
def ends(request: pytest.FixtureRequest) -> tuple[TensorSender, TensorReceiver]:
    """A sender and a receiver over two mappings of the same memory."""
    attached, made = request.param()
    return TensorSender(CPU, attached), TensorReceiver(CPU, made)


def take(receiver: TensorReceiver, message: pb.Tensor, like: torch.Tensor) -> torch.Tensor:
    return receiver.claim(message, "features", like.dtype, tuple(like.shape)).load()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_arrive_as_they_were_sent(ends, dtype):
    sender, receiver = ends
    sent = [(100 * torch.randn(rows, 7)).to(dtype) for rows in (1, 5, 40)]
    messages = [send(sender, tensor) for tensor in sent]
    assert [message.WhichOneof("storage") for message in messages] == ["span"] * 3
    for tensor, message in zip(sent, messages, strict=True):
        assert torch.equal(take(receiver, message, tensor), tensor)


def test_without_a_segment_tensors_go_in_the_message():
    sender, receiver = TensorSender(CPU), TensorReceiver(CPU)
    tensor = torch.randn(3, 5)
    message = send(sender, tensor)
    assert message.data == tensor.numpy().tobytes()
    assert torch.equal(take(receiver, message, tensor), tensor)
    assert (sender.carrier, receiver.carrier) == (pb.CARRIER_BYTES, pb.CARRIER_BYTES)


def test_tensors_without_elements_go_in_the_message(ends):
    sender, receiver = ends
    empty = torch.empty(0, 5)
    message = send(sender, empty)
    assert message.WhichOneof("storage") == "data"
    assert take(receiver, message, empty).shape == (0, 5)
    assert torch.equal(take(receiver, send(sender, torch.ones(2)), torch.ones(2)), torch.ones(2))


def test_without_room_it_goes_in_the_message_until_a_read(ends):
    sender, receiver = ends
    tensor = torch.randn(SIZE // 4 // 3)  # a third of the segment: two fit
    messages = [send(sender, tensor) for _ in range(3)]
    assert [message.WhichOneof("storage") for message in messages] == ["span", "span", "data"]
    for message in messages:
        assert torch.equal(take(receiver, message, tensor), tensor)
    assert send(sender, tensor).WhichOneof("storage") == "data"
    sender.release(receiver.generation_read, "features_read")
    assert send(sender, tensor).WhichOneof("storage") == "span"


def test_no_more_spans_are_unread_than_may_be():
    driver = FakeDriver()
    segment, fds = CudaSegment.create(2 * MAX_SPANS * 2 * ALIGNMENT, CPU, driver)
    for fd in fds:
        os.close(fd)
    sender, receiver = TensorSender(CPU, segment), TensorReceiver(CPU, segment)
    sent = [torch.full((4,), i) for i in range(MAX_SPANS + 1)]
    messages = [send(sender, tensor) for tensor in sent]
    assert [message.WhichOneof("storage") for message in messages] == ["span"] * MAX_SPANS + ["data"]
    for tensor, message in zip(sent, messages, strict=True):
        assert torch.equal(take(receiver, message, tensor), tensor)
    sender.release(receiver.generation_read, "features_read")
    message = send(sender, sent[1])
    assert message.WhichOneof("storage") == "span"
    assert torch.equal(take(receiver, message, sent[1]), sent[1])


def test_room_is_given_back_only_for_what_was_loaded_in_order(ends):
    sender, receiver = ends
    tensor = torch.randn(4)
    first, second, third = (receiver.claim(send(sender, tensor), "x", torch.float32, (4,)) for _ in range(3))
    assert receiver.generation_read == 0
    second.load()
    assert receiver.generation_read == 0
    first.load()
    assert receiver.generation_read == 2
    third.load()
    assert receiver.generation_read == 3


def test_loaded_rows_do_not_change_when_the_room_is_reused(ends):
    sender, receiver = ends
    tensor = torch.randn(64)
    loaded = take(receiver, send(sender, tensor), tensor)
    sender.release(receiver.generation_read, "features_read")
    send(sender, torch.zeros(64))
    assert torch.equal(loaded, tensor)


def test_a_tensor_says_what_carries_it(ends):
    sender, receiver = ends
    assert sender.carrier == receiver.carrier
    for size, carrier in ((100, sender.carrier), (SIZE // 4, pb.CARRIER_BYTES)):  # the second does not fit
        outgoing = sender.begin(torch.float32, (size,))
        outgoing.seal()
        finish(outgoing, message := pb.Tensor())
        incoming = receiver.claim(message, "x", torch.float32, (size,))
        assert (outgoing.carrier, incoming.carrier) == (carrier, carrier)
        assert incoming.num_bytes == 4 * size


# Peers that break the rules.

TENSOR = torch.arange(32, dtype=torch.float32)


def span(**changes: int) -> Callable[[pb.Tensor], None]:
    def change(message: pb.Tensor) -> None:
        for name, value in changes.items():
            setattr(message.span, name, value)

    return change


def shape(*sizes: int) -> Callable[[pb.Tensor], None]:
    def change(message: pb.Tensor) -> None:
        del message.shape[:]
        message.shape.extend(sizes)

    return change


MALFORMED: dict[str, tuple[Callable[[pb.Tensor], None], str]] = {
    "stale generation": (span(generation=1), "features.span.generation = 1: must be 2"),
    "generation skipped": (span(generation=3), "features.span.generation = 3: must be 2"),
    "no generation": (span(generation=0), "features.span.generation = 0"),
    "largest generation": (span(generation=2**64 - 1), "features.span.generation"),
    "place of the nonce": (span(offset=0), "features.span.offset = 0: 128 bytes must lie in"),
    "before the first span": (span(offset=ALIGNMENT), f"features.span.offset = {ALIGNMENT}"),
    "not aligned": (span(offset=2 * ALIGNMENT + 4), "features.span.offset"),
    "end past the segment": (span(offset=SIZE - ALIGNMENT), f"must lie in [{2 * ALIGNMENT}, {SIZE})"),
    "far outside": (span(offset=2**64 - ALIGNMENT), "features.span.offset"),
    "place that is unread": (span(offset=2 * ALIGNMENT), "lies in a span that has not been read"),
    "other shape": (shape(33), "features.shape = (33,): must be [32]"),
    "other dtype": (lambda message: setattr(message, "dtype", pb.DTYPE_INT32), "features.dtype = 4"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_span_is_refused_by_name(ends, name):
    sender, receiver = ends
    change, text = MALFORMED[name]
    claimed = receiver.claim(send(sender, TENSOR), "features", TENSOR.dtype, (32,))
    message = send(sender, TENSOR + 1)
    good = pb.Tensor.FromString(message.SerializeToString())
    change(message)
    with pytest.raises(InvalidArgumentError) as raised:
        receiver.claim(message, "features", TENSOR.dtype, (32,))
    assert text in str(raised.value)
    assert torch.equal(take(receiver, good, TENSOR), TENSOR + 1)
    assert torch.equal(claimed.load(), TENSOR)


def test_a_span_larger_than_the_segment_is_refused(ends):
    sender, receiver = ends
    message = send(sender, TENSOR)
    shape(2**31, 2**31)(message)
    with pytest.raises(InvalidArgumentError, match=r"features.span.offset"):
        receiver.claim(message, "features", torch.float32, (None, None))


def test_a_span_without_an_agreed_segment_is_refused(ends):
    sender, _ = ends
    with pytest.raises(InvalidArgumentError, match="no shared memory was agreed on"):
        take(TensorReceiver(CPU), send(sender, TENSOR), TENSOR)


@pytest.mark.parametrize("number", [2, 2**64 - 1])
def test_reading_what_was_not_sent_is_refused(ends, number):
    sender, _ = ends
    send(sender, TENSOR)
    with pytest.raises(InvalidArgumentError, match="features_read"):
        sender.release(number, "features_read")
    with pytest.raises(InvalidArgumentError, match="no tensor was sent in shared memory"):
        TensorSender(CPU).release(number, "features_read")
