"""How the work of a launch is cut: constants of each kernel by the size of the batch. No choice changes a result."""

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Tuning:
    programs: int = 2112
    """Rows are split until a launch has at least so many programs: sixteen for each multiprocessor of an H200."""
    tile: int = 4
    """Groups that a program takes at a time, one or more for each warp."""
    warps: int = 4
    """Of a program."""
    wave: int = 1
    """Rows of a request that are read before its drafts are looked at. Block verification looks at all at once."""
    registers: int | None = 128
    """Most registers of a thread: 16 warps fit on a multiprocessor with 128, 20 with 96, 24 with 80."""
    lead: int = 4
    """Groups that a draw from dense q looks at in a turn."""
    ahead: bool = False
    early: bool = False
    group: int = 512
    """Tokens that are bounded together where one race decides among all; fixed where groups race first."""

    def limit(self, is_wide: bool) -> dict[str, int]:
        """Options of a launch. Kernels in float64, and those that gather q through a table, would spill."""
        return {} if self.registers is None or is_wide else {"maxnreg": self.registers}


_ANY = 1 << 31
# (largest number of rows for Gumbel sampling, of requests for the others; constants)
GUMBEL = (
    (16, Tuning(programs=1056, registers=96)),
    (63, Tuning(programs=264, registers=96)),
    (_ANY, Tuning(group=1024, programs=1056, registers=96)),
)
REJECTION = (
    (4, Tuning(programs=264)),
    (31, Tuning(programs=768, registers=96)),
    (64, Tuning(tile=8, registers=80)),
    (_ANY, Tuning(tile=8, programs=4224, registers=80)),
)
REJECTION_DENSE = (
    (4, Tuning(programs=264)),
    (31, Tuning(programs=1056, registers=96)),
    (64, Tuning(tile=8)),
    (_ANY, Tuning(tile=8, programs=4224)),
)
BLOCK_MASSES = ((64, Tuning(tile=8, programs=528, registers=80)), (_ANY, Tuning(tile=8)))
BLOCK_TESTS = ((64, Tuning(programs=264)), (_ANY, Tuning(programs=1056)))

SMALL_GROUP, LARGE_VOCABULARY = 128, 16384


def choose(table: tuple[tuple[int, Tuning], ...], size: int) -> Tuning:
    return next(tuning for largest, tuning in table if size <= largest)


@dataclass(frozen=True)
class Shape:
    """How rows of `columns` logits are cut into groups, tiles and splits."""

    columns: int
    group: int
    line: int
    num_groups: int
    num_splits: int

    @classmethod
    def of(cls, columns: int, bytes_each: int, rows: int, tuning: Tuning, group: int | None = None) -> "Shape":
        line = 512 // bytes_each if bytes_each < 4 else 128  # tokens that a warp loads with 16 bytes a thread
        if group is None:
            group = tuning.group if columns >= LARGE_VOCABULARY else max(SMALL_GROUP, line)
        tiles = triton.cdiv(columns, group * tuning.tile)
        # Powers of two: few kernels are compiled for all sizes of a batch. A third of the programs at most has no tile.
        wanted = triton.next_power_of_2(triton.cdiv(tuning.programs, max(rows, 1)))
        splits = min(wanted, triton.next_power_of_2(tiles * 3 // 4 + 1), 128)
        return cls(columns, group, line, triton.cdiv(columns, group), splits)
