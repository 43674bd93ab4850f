"""Constants of each kernel by batch size; they do not change results."""

from dataclasses import dataclass, replace

import triton

WARPS = 4
"""Warps of a program."""


@dataclass(frozen=True)
class Tuning:
    programs: int
    """Programs per launch up to which rows are split; 2112 are sixteen per multiprocessor of an H200."""
    tile: int = 8
    """Groups that a program processes at a time, at least one per warp."""
    wave: int = 1
    """Rows of a request in a wave; block verification reads all rows."""
    registers: int = 80
    """Maximum number of registers per thread: 24 warps fit on a multiprocessor with 80, 16 with 128."""
    group: int = 512
    """Tokens per group in a race of all tokens; fixed if groups race first."""

    def limit(self, is_wide: bool) -> dict[str, int]:
        """Return the options of a launch; without a limit for kernels in float64 or with a table, which would spill."""
        return {} if is_wide else {"maxnreg": self.registers}


_ANY = 1 << 31
# (most rows for Gumbel sampling, most requests for the others; constants)
GUMBEL = (
    (16, Tuning(tile=4, programs=1056, registers=96)),
    (63, Tuning(tile=4, programs=264, registers=96)),
    (_ANY, Tuning(tile=4, group=1024, programs=1056, registers=96)),
)
REJECTION = (
    (4, Tuning(programs=264)),
    (31, Tuning(programs=768)),
    (64, Tuning(programs=2112)),
    (_ANY, Tuning(programs=8448)),
)
REJECTION_DENSE = tuple((size, replace(tuning, registers=128)) for size, tuning in REJECTION)
BLOCK_MASSES = (
    (4, Tuning(tile=4, programs=192, registers=64)),
    (31, Tuning(programs=528)),
    (64, Tuning(programs=1056)),
    (_ANY, Tuning(programs=4224)),
)
BLOCK_TESTS = ((64, Tuning(tile=4, programs=264, registers=128)), (_ANY, Tuning(programs=2048, registers=128)))

SMALL_GROUP, LARGE_VOCABULARY = 128, 16384


def choose(table: tuple[tuple[int, Tuning], ...], size: int) -> Tuning:
    return next(tuning for largest, tuning in table if size <= largest)


@dataclass(frozen=True)
class Shape:
    """The division of rows of `columns` logits into groups, tiles and splits."""

    columns: int
    group: int
    line: int
    num_groups: int
    num_splits: int

    @classmethod
    def of(cls, columns: int, bytes_each: int, rows: int, tuning: Tuning, group: int | None = None) -> "Shape":
        line = 512 // bytes_each if bytes_each < 4 else 128  # tokens that a warp loads with 16 bytes per thread
        if group is None:
            group = tuning.group if columns >= LARGE_VOCABULARY else max(SMALL_GROUP, line)
        tiles = triton.cdiv(columns, group * tuning.tile)
        # Powers of two, so that few kernels are compiled. At most a third of the programs have no tile.
        wanted = triton.next_power_of_2(triton.cdiv(tuning.programs, max(rows, 1)))
        splits = min(wanted, triton.next_power_of_2(tiles * 3 // 4 + 1), 128)
        return cls(columns, group, line, triton.cdiv(columns, group), splits)
