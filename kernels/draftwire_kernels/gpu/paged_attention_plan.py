"""The division of a ragged batch into launches, tiles and shares, from bounds known to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHORT_ROWS = 32
"""Maximum number of rows of a short sequence (decoding, verification, the end of a prompt)."""

SHARED_BYTES = 128 << 20
"""Maximum bytes for shares; limits their number."""


def power_of_2(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (max(count, 1) - 1).bit_length()


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True)
class Problem:
    """Bounds and shapes of one call."""

    num_rows: int
    num_sequences: int
    max_rows: int
    max_length: int
    kv_heads: int
    group: int  # query heads of a key-value head
    size: int  # the larger of the key's and the value's head size
    itemsize: int  # bytes
    window: int | None


@dataclass(frozen=True)
class Tuning:
    """Parameters that do not change a result except for rounding."""

    block_m: int
    """Pairs (row, head) of a tile."""
    block_n: int
    """Rows of the context per step."""
    warps: int
    stages: int
    programs_each: float = 1.0
    """Programs per multiprocessor up to which contexts are divided into shares."""
    most_shares: int = 32
    share_rows: int | None = None
    """Maximum number of rows of a share, so that a long sequence does not delay many short ones; None for no limit."""


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel and of the kernel that combines shares."""

    tuning: Tuning
    is_short: bool
    least_rows: int  # of a sequence in this launch
    most_rows: int
    grid: tuple[int, int, int]  # sequences (or tiles of all), tiles of a sequence, shares; per key-value head
    is_searched: bool  # a tile searches for its sequence
    fill: int  # number of shares of a context, unless a share would exceed most_steps
    most_shares: int
    most_steps: int  # of block_n rows
    num_shared_rows: int  # rows whose shares are kept

    @property
    def rows_each(self) -> int:
        """Return the rows per sequence in `Shares`; 0 for the batch's rows."""
        return self.most_rows if self.is_short else 0

    def heads_combined_by_a_program(self, problem: Problem) -> int:
        """Return the heads of a program: one, or more if about a thousand programs remain."""
        each, heads = 1, problem.kv_heads * problem.group
        while problem.num_rows * heads > 1280 * each and heads % (2 * each) == 0:
            each *= 2
        return each


def plan(
    problem: Problem, multiprocessors: int, short: Tuning | None = None, long: Tuning | None = None
) -> list[Launch]:
    """Return the launches for a batch: one for its short and one for its long sequences.

    They depend only on the problem's bounds, so a sequence's result does not depend on other sequences.
    """
    short_problem = replace(problem, max_rows=min(problem.max_rows, SHORT_ROWS))
    if problem.max_rows <= SHORT_ROWS or problem.num_sequences > 1:
        launches = [_short(short_problem, multiprocessors, short or short_tuning(short_problem, multiprocessors))]
    else:
        launches = []
    if problem.max_rows > SHORT_ROWS:
        least_rows = SHORT_ROWS + 1 if launches else 1
        launches.append(_long(problem, least_rows, multiprocessors, long or long_tuning(problem)))
    return launches


def _short(problem: Problem, multiprocessors: int, tuning: Tuning) -> Launch:
    tiles = ceil_div(problem.max_rows, tuning.block_m // problem.group)
    places, shared_rows = problem.num_sequences * tiles, problem.num_sequences * problem.max_rows
    division = _division(problem, places, shared_rows, multiprocessors, tuning)
    grid = (problem.num_sequences, tiles, division[1])
    return Launch(tuning, True, 1, problem.max_rows, grid, False, *division, shared_rows)


def _long(problem: Problem, least_rows: int, multiprocessors: int, tuning: Tuning) -> Launch:
    tiles = ceil_div(problem.num_rows, tuning.block_m // problem.group)
    places = tiles + problem.num_sequences - 1
    # Fewer tiles have rows, because few sequences can be long.
    most_tiles = min(places, tiles + max(problem.num_rows // least_rows, 1) - 1)
    division = _division(problem, most_tiles, problem.num_rows, multiprocessors, tuning)
    is_searched = problem.num_sequences > 1
    grid = (places, 1, division[1]) if is_searched else (1, tiles, division[1])
    return Launch(tuning, False, least_rows, problem.num_rows, grid, is_searched, *division, problem.num_rows)


def _division(
    problem: Problem, places: int, shared_rows: int, multiprocessors: int, tuning: Tuning
) -> tuple[int, int, int]:
    """Return fill, most_shares and most_steps of `Launch`."""
    context = problem.max_length
    if problem.window is not None:
        context = min(context, problem.window + tuning.block_n)
    steps = ceil_div(context, tuning.block_n)
    most_steps = steps if tuning.share_rows is None else max(tuning.share_rows // tuning.block_n, 1)
    fill = max(int(multiprocessors * tuning.programs_each / (places * problem.kv_heads)), 1)
    bytes_each = shared_rows * problem.kv_heads * problem.group * problem.size * 4
    # Programs of unused shares have a cost.
    most_shares = min(max(fill, ceil_div(steps, most_steps)), max(fill, 4), tuning.most_shares, steps)
    most_shares = max(min(most_shares, SHARED_BYTES // bytes_each), 1)
    return min(fill, most_shares), most_shares, most_steps


def short_tuning(problem: Problem, multiprocessors: int) -> Tuning:
    """Choose for a memory-bound launch: the smallest tile for a sequence's rows, and many loads in flight."""
    size, pairs = power_of_2(problem.size), problem.max_rows * problem.group
    programs = problem.num_sequences * problem.kv_heads
    if problem.itemsize == 4:
        return _without_matrix_units(problem, programs < multiprocessors)
    block_m = max(power_of_2(min(pairs, 128 if size <= 128 else 64)), power_of_2(problem.group), 16)
    few = programs < 1.5 * multiprocessors
    if few and block_m == 128 and problem.group <= 64:
        block_m = 64  # two concurrent tiles
    if block_m > 64 or size > 128:
        return Tuning(block_m, 64 if size <= 128 else 32, warps=8 if block_m > 64 else 4, stages=3, share_rows=2048)
    if block_m <= 32 and programs > 2 * multiprocessors:  # many small concurrent programs
        return Tuning(block_m, 32, warps=2, stages=3, share_rows=2048)
    if few and block_m == 32:
        block_m = 64  # for the wide matrix instructions, although half of their rows are idle
    return Tuning(block_m, 64, warps=4, stages=3, share_rows=2048)


def long_tuning(problem: Problem) -> Tuning:
    """Choose for a compute-bound launch."""
    if problem.itemsize == 4:
        return _without_matrix_units(problem, False)
    if power_of_2(problem.size) > 128:
        return Tuning(max(64, power_of_2(problem.group)), 32, warps=4, stages=3, programs_each=2)
    return Tuning(128, 64, warps=8, stages=3)


def _without_matrix_units(problem: Problem, is_idle: bool) -> Tuning:
    """Choose for float32, whose products use fused multiply-adds."""
    is_small = is_idle or power_of_2(problem.size) <= 64
    block_m = max(16 if is_small else 32, power_of_2(problem.group))
    return Tuning(block_m, 32, warps=4 if block_m == 16 else 8, stages=2, share_rows=2048)
