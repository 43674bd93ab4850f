"""Division of a batch into attention launches, from values known to the host."""

from dataclasses import replace

import pytest

from draftwire_kernels.gpu.paged_attention_plan import SHARED_BYTES, SHORT_ROWS, Problem, plan

MULTIPROCESSORS = 132
# Llama-3.1-8B: one sequence, one row without drafts, up to 8192 rows of context.
ONE = Problem(1, 1, 1, 8192, kv_heads=8, group=4, size=128, itemsize=2, window=None)


def sequences(count: int, rows: int, **others: int | None) -> Problem:
    return replace(ONE, num_rows=count * rows, num_sequences=count, max_rows=rows, **others)


def test_every_count_of_rows_belongs_to_one_launch() -> None:
    for count in (1, 2, 64):
        for rows in (1, 5, SHORT_ROWS, SHORT_ROWS + 1, 2048):
            launches = plan(sequences(count, rows), MULTIPROCESSORS)
            for own in range(1, rows + 1):
                assert sum(launch.least_rows <= own <= launch.most_rows for launch in launches) == 1


def test_only_a_mixed_batch_needs_two_launches() -> None:
    assert [launch.is_short for launch in plan(sequences(8, 5), MULTIPROCESSORS)] == [True]
    assert [launch.is_short for launch in plan(sequences(1, 2048), MULTIPROCESSORS)] == [False]
    assert [launch.is_short for launch in plan(sequences(8, 2048), MULTIPROCESSORS)] == [True, False]


def test_contexts_are_divided_if_sequences_leave_the_device_idle() -> None:
    fills = [plan(sequences(count, 5), MULTIPROCESSORS)[0].fill for count in (1, 4, 8, 16, 64)]
    assert fills == [16, 4, 2, 1, 1]


def test_rows_of_few_long_sequences_divide_their_contexts() -> None:
    """64 rows have at most one sequence of more than 32 rows: at most two tiles of 32 rows for each of 8 heads."""
    problem = replace(ONE, num_rows=64, num_sequences=64, max_rows=64)
    long = plan(problem, MULTIPROCESSORS)[-1]
    assert not long.is_short
    assert (long.fill, long.grid) == (132 // (2 * 8), (2 + 63, 1, 8))
    assert plan(replace(problem, num_rows=512, max_rows=512), MULTIPROCESSORS)[-1].fill == 1


def test_short_contexts_of_many_sequences_need_one_launch() -> None:
    assert plan(sequences(32, 5, max_length=2048), MULTIPROCESSORS)[0].most_shares == 1
    assert plan(sequences(32, 5, max_length=8192), MULTIPROCESSORS)[0].most_shares > 1
    assert plan(sequences(32, 5, max_length=8192, window=512), MULTIPROCESSORS)[0].most_shares == 1


def test_shares_take_a_bounded_memory() -> None:
    for count in (1, 64, 512):
        problem = sequences(count, 17, max_length=1 << 20, size=256)
        (launch,) = plan(problem, MULTIPROCESSORS)
        rows = launch.num_shared_rows * problem.kv_heads * problem.group
        assert launch.most_shares == 1 or rows * launch.most_shares * problem.size * 4 <= SHARED_BYTES


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 64, 71, 128])
@pytest.mark.parametrize(("size", "itemsize"), [(64, 2), (128, 2), (256, 2), (128, 4), (256, 4)])
def test_a_tile_holds_whole_groups_of_heads(group, size, itemsize) -> None:
    for rows in (1, 17, 500):
        for launch in plan(sequences(2, rows, group=group, size=size, itemsize=itemsize), MULTIPROCESSORS):
            assert launch.tuning.block_m >= max(group, 16)
            assert launch.tuning.block_m & (launch.tuning.block_m - 1) == 0
