"""Which blocks a sequence gets."""

from draftwire.model.block_pool import BlockPool


def test_returned_blocks_lie_side_by_side_in_order() -> None:
    pool = BlockPool(1 + 8)
    first, second = pool.allocate(3), pool.allocate(5)
    assert (first, second) == ([1, 2, 3], [4, 5, 6, 7, 8])
    assert pool.allocate(1) is None
    assert second is not None
    pool.release(second[::-1])
    assert pool.allocate(5) == second
