"""Features are read from shared memory, which is released after the last read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from harness import UNKNOWN, Rows, Stream, Text, connect, draft_alone, make_engine, make_step, opened, replies, run
from tiny_head import HIDDEN, WIDTH, TinyHead

from draftwire.transport import TensorReceiver, TensorSender
from draftwire.transport.host_segment import HostSegment
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")
SIZE = 1 << 20


class Wire:
    """Both ends of the shared memory that carries features."""

    def __init__(self) -> None:
        segment, fds = HostSegment.create(SIZE, CPU)
        self._sender = TensorSender(CPU, HostSegment.attach(fds, SIZE, CPU))
        for fd in fds:
            os.close(fd)
        self.receiver = TensorReceiver(CPU, segment)

    def send(self, stream: Stream, rows: list[Rows], new: list[int] | None = None, *, is_fused: bool = False) -> None:
        """Queue a step whose features are in shared memory."""
        stream.num_steps += 1
        step = make_step(stream.num_steps, rows, [opened(sequence_id) for sequence_id in new or []])
        features = step.features.tensor
        if is_fused:
            features = stream.engine.head.fuse(features)
        outgoing = self._sender.begin(features.dtype, features.shape)
        outgoing.tensor.copy_(features)
        outgoing.seal()
        message = pb.Tensor()
        outgoing.finish(message)
        width = HIDDEN if is_fused else WIDTH
        incoming = self.receiver.claim(message, "features", torch.float32, (len(features), width))
        assert incoming.carrier == pb.CARRIER_SHM
        stream.engine.submit(stream.session, step._replace(features=incoming, is_fused=is_fused))


@pytest.fixture
def wire() -> Iterator[Wire]:
    return Wire()


@pytest.mark.parametrize("is_fused", [True, False])
def test_drafts_are_those_of_features_that_came_otherwise(head: TinyHead, wire: Wire, is_fused: bool) -> None:
    stream = connect(make_engine(head))
    texts = [Text(1), Text(2)]
    wire.send(stream, [Rows(i, texts[i], 0, 7 + i, drafts=4 * i) for i in range(2)], [0, 1], is_fused=is_fused)
    wire.send(stream, [Rows(i, texts[i], 7 + i, 3, drafts=4) for i in range(2)], is_fused=is_fused)
    run(stream.engine)
    found = replies(stream.answers[1])
    assert [found[i] for i in range(2)] == [draft_alone(head, texts[i], 10 + i, 4) for i in range(2)]
    assert wire.receiver.generation_read == 2


def test_a_long_step_is_read_in_pieces_and_its_memory_returned(head: TinyHead, wire: Wire) -> None:
    engine = make_engine(head, max_batch_rows=64)
    stream, text = connect(engine), Text(3)
    wire.send(stream, [Rows(1, Text(4), 0, 90), Rows(2, text, 0, 70, drafts=4)], [1, 2])
    read = []
    while engine.has_work:
        read.append(wire.receiver.generation_read)
        engine.iterate()
    assert read == [0, 0, 0]
    assert wire.receiver.generation_read == 1
    assert replies(stream.answers[0])[2] == draft_alone(head, text, 70, 4)


def test_memory_of_rows_not_taken_is_returned_with_the_answer(head: TinyHead, wire: Wire) -> None:
    stream = connect(make_engine(head))
    wire.send(stream, [Rows(1, Text(5), 0, 5, drafts=4)], [1])
    wire.send(stream, [Rows(1, Text(5), 5, 1, drafts=4), Rows(7, Text(6), 0, 5, drafts=4)])
    wire.send(stream, [Rows(8, Text(6), 0, 5, drafts=4)])
    run(stream.engine)
    assert [replies(stream.answers[1])[7].status, replies(stream.answers[2])[8].status] == [UNKNOWN, UNKNOWN]
    assert wire.receiver.generation_read == 3


def test_memory_is_given_back_once_all_that_lies_before_it_is(head: TinyHead, wire: Wire) -> None:
    """A prompt's rows are computed after later drafts, so the drafts' answer releases no memory yet."""
    engine = make_engine(head)
    first, second = connect(engine), connect(engine)
    generations = []
    second.session.deliver = lambda _: generations.append(wire.receiver.generation_read)
    wire.send(first, [Rows(1, Text(1), 0, 60)], [1])
    wire.send(second, [Rows(1, Text(2), 0, 5, drafts=4)], [1])
    run(engine)
    assert generations == [0]
    assert wire.receiver.generation_read == 2
