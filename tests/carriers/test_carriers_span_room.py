"""Room in a segment: spans in use never overlap, and room is freed in the order of use."""

from __future__ import annotations

import random

import pytest

from draftwire.contract.errors import InvalidArgumentError
from draftwire.transport.segment import ALIGNMENT
from draftwire.transport.span_room import Span, SpanRoom


def begun(room: SpanRoom, num_bytes: int) -> Span:
    span = room.allocate(num_bytes)
    assert span is not None
    return span


def sent(room: SpanRoom, num_bytes: int) -> tuple[int, int] | None:
    """Allocate a span and send it at once; return its generation and offset, or None if there is no room."""
    span = room.allocate(num_bytes)
    return None if span is None else (room.number(span), span.offset)


def test_spans_leave_room_for_the_nonce():
    room = SpanRoom(10 * ALIGNMENT)
    assert sent(room, 1) == (1, 2 * ALIGNMENT)
    assert sent(room, ALIGNMENT + 1) == (2, 4 * ALIGNMENT)
    assert sent(room, ALIGNMENT) == (3, 7 * ALIGNMENT)


def test_a_full_room_says_so_until_the_oldest_span_is_read():
    room = SpanRoom(7 * ALIGNMENT)
    assert [sent(room, ALIGNMENT) for _ in range(4)][3] is None
    room.release(1, "read")
    # A span that exactly filled the first span's room would make the full segment look empty.
    assert room.allocate(ALIGNMENT) is None
    room.release(2, "read")
    assert sent(room, ALIGNMENT) == (4, 2 * ALIGNMENT)


def test_a_span_as_large_as_the_segment_fits_an_empty_one():
    room = SpanRoom(4 * ALIGNMENT)
    assert sent(room, 2 * ALIGNMENT) == (1, 2 * ALIGNMENT)
    room.release(1, "read")
    assert room.allocate(2 * ALIGNMENT + 1) is None
    assert sent(room, 2 * ALIGNMENT) == (2, 2 * ALIGNMENT)


@pytest.mark.parametrize("seed", range(20))
def test_spans_in_use_do_not_overlap(seed):
    draw = random.Random(seed)
    size = ALIGNMENT * draw.randint(8, 40)
    room, used, generation, refusals = SpanRoom(size), {}, 0, 0
    for _ in range(2000):
        num_bytes = draw.randint(1, size // 3)
        span = sent(room, num_bytes)
        if span is None:
            refusals += 1
            assert used, "an empty room has room for a third of its size"
        else:
            generation += 1
            assert span[0] == generation
            begin, end = span[1] - ALIGNMENT, span[1] + num_bytes
            assert begin >= ALIGNMENT
            assert end <= size
            assert all(end <= other or other_end <= begin for other, other_end in used.values())
            used[generation] = (begin, end)
        if used and draw.random() < 0.6:
            read = draw.choice(list(used))
            room.release(read, "read")
            used = {number: span for number, span in used.items() if number > read}
    assert generation > 500
    assert refusals > 20


@pytest.mark.parametrize("wrong", [0, 3], ids=["below an earlier number", "never sent"])
def test_only_spans_that_are_in_use_can_be_taken_back(wrong):
    room = SpanRoom(1024)
    sent(room, 1)
    sent(room, 1)
    begun(room, 1)
    room.release(1, "features_read")
    room.release(1, "features_read")
    with pytest.raises(InvalidArgumentError, match=r"features_read = \d: allowed range \[1, 2\]"):
        room.release(wrong, "features_read")


def test_a_span_begun_first_and_sent_later_keeps_its_room():
    room = SpanRoom(7 * ALIGNMENT)
    first, second = begun(room, ALIGNMENT), begun(room, ALIGNMENT)
    assert (room.number(second), room.number(first)) == (1, 2)
    room.release(1, "read")
    assert [room.allocate(ALIGNMENT) is None for _ in range(2)] == [False, True]
    room.release(2, "read")
    assert begun(room, ALIGNMENT).offset == first.offset


def test_room_that_is_given_up_comes_back_when_all_before_it_has():
    room = SpanRoom(7 * ALIGNMENT)
    first, second, _ = (begun(room, ALIGNMENT) for _ in range(3))
    room.give_up(second)
    assert room.allocate(ALIGNMENT) is None
    assert room.number(first) == 1
    room.release(1, "read")
    assert begun(room, ALIGNMENT).offset == first.offset
