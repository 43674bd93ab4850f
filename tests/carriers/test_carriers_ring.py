"""Room in a segment: spans that are in use never overlap, and room comes back in the order of use."""

from __future__ import annotations

import random

import pytest

from draftwire.carriers.ring import Ring
from draftwire.carriers.segment import ALIGNMENT
from draftwire.errors import InvalidArgumentError


def test_spans_leave_room_for_their_stamps_and_the_nonce():
    ring = Ring(10 * ALIGNMENT)
    assert ring.allocate(1) == (1, 2 * ALIGNMENT)
    assert ring.allocate(ALIGNMENT + 1) == (2, 4 * ALIGNMENT)
    assert ring.allocate(ALIGNMENT) == (3, 7 * ALIGNMENT)


def test_a_full_ring_says_so_until_the_oldest_span_is_read():
    ring = Ring(7 * ALIGNMENT)
    assert [ring.allocate(ALIGNMENT) for _ in range(4)][3] is None
    ring.release(1, "read")
    # The room of the first span ends where the second's begins; one that filled it would leave the ring as if empty.
    assert ring.allocate(ALIGNMENT) is None
    ring.release(2, "read")
    assert ring.allocate(ALIGNMENT) == (4, 2 * ALIGNMENT)


def test_a_span_as_large_as_the_segment_has_room_when_nothing_is_in_use():
    ring = Ring(4 * ALIGNMENT)
    assert ring.allocate(2 * ALIGNMENT) == (1, 2 * ALIGNMENT)
    ring.release(1, "read")
    assert ring.allocate(2 * ALIGNMENT + 1) is None
    assert ring.allocate(2 * ALIGNMENT) == (2, 2 * ALIGNMENT)


@pytest.mark.parametrize("seed", range(20))
def test_spans_in_use_do_not_overlap(seed):
    draw = random.Random(seed)
    size = ALIGNMENT * draw.randint(8, 40)
    ring, used, generation, refusals = Ring(size), {}, 0, 0
    for _ in range(2000):
        num_bytes = draw.randint(1, size // 3)
        span = ring.allocate(num_bytes)
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
    ring.allocate(1)
    ring.allocate(1)
    ring.release(1, "features_read")
    ring.release(1, "features_read")
    with pytest.raises(InvalidArgumentError, match=r"features_read = \d: allowed range \[1, 2\]"):
        ring.release(wrong, "features_read")
