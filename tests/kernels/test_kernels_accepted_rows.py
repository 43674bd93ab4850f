"""gather_accepted_rows with each backend; Triton's is compiled on CUDA and interpreted elsewhere."""

from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from torch import Tensor

from draftwire_kernels import gather_accepted_rows

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["reference", *(["triton"] if find_spec("triton") else [])]
# (rows, accepted rows) of each sequence.
DRAWS = [
    ([1], [1]),
    ([1], [0]),
    ([5], [3]),
    ([4, 1, 3, 6], [2, 1, 0, 6]),
    ([2, 3, 1], [0, 0, 0]),
    ([2, 3, 1], [2, 3, 1]),
]


class Step:
    """Verified rows at random slots of a store, and a table of draws in another order than the sequences."""

    def __init__(self, lengths: list[int], drawn: list[int], width: int, dtype: torch.dtype = torch.float32) -> None:
        random = np.random.default_rng(sum(lengths) + width)
        num_rows, entries = sum(lengths), len(lengths) + 3
        self.lengths, self.drawn = lengths, drawn
        self.rows = torch.from_numpy(random.standard_normal((num_rows + 5, width), np.float32)).to(dtype)
        self.slots = torch.from_numpy(random.permutation(num_rows + 5)[:num_rows])
        self.cu_rows = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self.places = torch.from_numpy(random.permutation(entries)[: len(lengths)])
        self.table = torch.from_numpy(random.integers(0, 9, (entries, 4)))
        self.table[self.places, 0] = torch.tensor(drawn)

    def expected(self) -> Tensor:
        """Return the accepted rows and then the rejected rows, collected one by one."""
        true, others, slots = [], [], iter(self.slots.tolist())
        for length, count in zip(self.lengths, self.drawn, strict=True):
            for offset in range(length):
                (true if offset < count else others).append(next(slots))
        return torch.stack([self.rows[slot] for slot in true + others])

    def gathered(self, backend: str) -> Tensor:
        out = torch.full((len(self.slots), self.rows.shape[1]), torch.nan, dtype=self.rows.dtype, device=DEVICE)
        given = (self.rows, self.slots, self.cu_rows, self.places, self.table)
        gather_accepted_rows(*(tensor.to(DEVICE) for tensor in given), out, backend=backend)
        return out.cpu()


# Pairwise coverage of 144 combinations.
@pytest.mark.parametrize(("draw", "width", "dtype", "backend"), covering(DRAWS, [1, 33, 64, 2049], DTYPES, BACKENDS))
def test_accepted_rows_come_first(
    draw: tuple[list[int], list[int]], width: int, dtype: torch.dtype, backend: str
) -> None:
    step = Step(*draw, width, dtype)
    assert torch.equal(step.gathered(backend), step.expected())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_sequences", [65, 128, 300])
def test_of_many_sequences(backend: str, num_sequences: int) -> None:
    lengths = [1 + i % 3 for i in range(num_sequences)]
    drawn = [min(i * 7 % 4, length) for i, length in enumerate(lengths)]
    step = Step(lengths, drawn, 3)
    assert torch.equal(step.gathered(backend), step.expected())


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_beyond_a_sequences_rows_are_all_or_none_of_them(backend: str) -> None:
    step = Step([2, 3, 2], [9, -1, 1], 5)
    assert torch.equal(step.gathered(backend), step.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_behind_2_to_the_31_elements(backend: str) -> None:
    width = 4096
    rows = torch.empty(2**31 // width + 2, width, dtype=torch.bfloat16, device=DEVICE)
    rows[-2:] = torch.tensor([[1.0], [2.0]])
    slots = torch.arange(len(rows) - 2, len(rows), device=DEVICE)
    cu_rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    out = rows.new_empty(2, width)
    gather_accepted_rows(rows, slots, cu_rows, cu_rows[:2].long(), cu_rows[:2, None].long(), out, backend=backend)
    assert out[:, 0].tolist() == out[:, -1].tolist() == [2.0, 1.0]


INT = torch.int64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(5)}, r"rows: got shape \[5\], expected \[S, W\]"),
        ({"rows": torch.zeros(5, 0)}, r"rows: got shape \[5, 0\], expected at least one column"),
        ({"rows": torch.zeros(5, 2).double()}, "rows: got dtype torch.float64, expected torch.float32"),
        ({"rows": torch.zeros(2, 5).T}, r"rows: got strides \(1, 5\), expected a contiguous tensor"),
        ({"rows": None}, r"rows: got NoneType, expected a tensor \[S, W\]"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots: got dtype torch.int32, expected torch.int64"),
        ({"slots": torch.zeros(6, dtype=INT)[::2]}, r"slots: got strides \(2,\)"),
        ({"cu_rows": torch.tensor([0, 2, 3])}, "cu_rows: got dtype torch.int64, expected torch.int32"),
        ({"cu_rows": torch.tensor([0, 3]).int()}, r"cu_rows: got shape \[2\], expected \[3\]"),
        ({"cu_rows": torch.tensor([0, 3, 3]).int()}, r"cu_rows: .* expected increasing values from 0 to 3 \(slots\)"),
        ({"cu_rows": torch.tensor([0, 1, 2]).int()}, r"cu_rows: got \[0, 1, 2\]"),
        (
            {"cu_rows": torch.tensor([0]).int(), "places": torch.zeros(0, dtype=INT)},
            r"cu_rows: got 1 entries, expected B \+ 1 for 1 <= B <= 3, the slots",
        ),
        ({"places": torch.tensor([0, 1]).int()}, "places: got dtype torch.int32, expected torch.int64"),
        ({"places": torch.zeros(2, dtype=INT, device="meta")}, "places: got device meta, expected cpu"),
        ({"drawn": torch.ones(2, dtype=INT)}, r"drawn: got shape \[2\], expected \[B, columns\]"),
        ({"drawn": torch.ones(2, 0, dtype=INT)}, r"drawn: got shape \[2, 0\], expected at least one column"),
        ({"drawn": torch.ones(2, 3).int()}, "drawn: got dtype torch.int32"),
        ({"drawn": torch.ones(2, 6, dtype=INT)[:, ::2]}, r"drawn: got strides \(6, 2\)"),
        ({"out": torch.zeros(2, 2)}, r"out: got shape \[2, 2\], expected \[3, 2\]"),
        ({"out": torch.zeros(3, 2).half()}, "out: got dtype torch.float16, expected torch.float32"),
        ({"out": torch.zeros(2, 3).T}, r"out: got strides \(1, 3\)"),
        ({"backend": "cuda"}, "backend: got 'cuda', expected one of 'auto', 'reference', 'triton'"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    good = {
        "rows": torch.zeros(5, 2),
        "slots": torch.arange(3),
        "cu_rows": torch.tensor([0, 2, 3], dtype=torch.int32),
        "places": torch.arange(2),
        "drawn": torch.ones(2, 3, dtype=INT),
        "out": torch.zeros(3, 2),
    }
    gather_accepted_rows(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        gather_accepted_rows(**(good | changes))  # type: ignore[arg-type]
