"""Room in a segment: spans that are in use never overlap, and room comes back in the order of use."""

from __future__ import annotations

import random

import pytest

from draftwire.carriers.ring import Ring, Span
from draftwire.carriers.segment import ALIGNMENT
from draftwire.errors import InvalidArgumentError


def begun(ring: Ring, num_bytes: int) -> Span:
    span = ring.allocate(num_bytes)
    assert span is not None
    return span


def sent(ring: Ring, num_bytes: int) -> tuple[int, int] | None:
    """Generation and offset of a new span that is sent at once."""
    span = ring.allocate(num_bytes)
    return None if span is None else (ring.number(span), span.offset)


def test_spans_leave_room_for_their_stamps_and_the_nonce():
    ring = Ring(10 * ALIGNMENT)
    assert sent(ring, 1) == (1, 2 * ALIGNMENT)
    assert sent(ring, ALIGNMENT + 1) == (2, 4 * ALIGNMENT)
    assert sent(ring, ALIGNMENT) == (3, 7 * ALIGNMENT)


def test_a_full_ring_says_so_until_the_oldest_span_is_read():
    ring = Ring(7 * ALIGNMENT)
    assert [sent(ring, ALIGNMENT) for _ in range(4)][3] is None
    ring.release(1, "read")
    # The room of the first span ends where the second's begins; one that filled it would leave the ring as if empty.
    assert ring.allocate(ALIGNMENT) is None
    ring.release(2, "read")
    assert sent(ring, ALIGNMENT) == (4, 2 * ALIGNMENT)


def test_a_span_as_large_as_the_segment_has_room_when_nothing_is_in_use():
    ring = Ring(4 * ALIGNMENT)
    assert sent(ring, 2 * ALIGNMENT) == (1, 2 * ALIGNMENT)
    ring.release(1, "read")
    assert ring.allocate(2 * ALIGNMENT + 1) is None
    assert sent(ring, 2 * ALIGNMENT) == (2, 2 * ALIGNMENT)


@pytest.mark.parametrize("seed", range(20))
def test_spans_in_use_do_not_overlap(seed):
    draw = random.Random(seed)
    size = ALIGNMENT * draw.randint(8, 40)
    ring, used, generation, refusals = Ring(size), {}, 0, 0
    for _ in range(2000):
        num_bytes = draw.randint(1, size // 3)
        span = sent(ring, num_bytes)
        if span is None:
            refusals += 1
            assert used, "an empty ring has room for a third of its size"
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
            ring.release(read, "read")
            used = {number: span for number, span in used.items() if number > read}
    assert generation > 500
    assert refusals > 20


@pytest.mark.parametrize("wrong", [0, 3], ids=["taken back already", "never sent"])
def test_only_spans_that_are_in_use_can_be_taken_back(wrong):
    ring = Ring(1024)
    sent(ring, 1)
    sent(ring, 1)
    begun(ring, 1)
    ring.release(1, "features_read")
    ring.release(1, "features_read")
    with pytest.raises(InvalidArgumentError, match=r"features_read = \d: allowed range \[1, 2\]"):
        ring.release(wrong, "features_read")


def test_a_span_that_was_begun_first_and_is_sent_later_keeps_its_room_until_it_is_read():
    ring = Ring(7 * ALIGNMENT)
    first, second = begun(ring, ALIGNMENT), begun(ring, ALIGNMENT)
    assert (ring.number(second), ring.number(first)) == (1, 2)
    ring.release(1, "read")
    assert [ring.allocate(ALIGNMENT) is None for _ in range(2)] == [False, True]
    ring.release(2, "read")
    assert begun(ring, ALIGNMENT).offset == first.offset


def test_room_that_is_given_up_comes_back_when_all_before_it_has():
    ring = Ring(7 * ALIGNMENT)
    first, second, _ = (begun(ring, ALIGNMENT) for _ in range(3))
    ring.give_up(second)
    assert ring.allocate(ALIGNMENT) is None
    assert ring.number(first) == 1
    ring.release(1, "read")
    assert begun(ring, ALIGNMENT).offset == first.offset
