"""`mask_logits` against a loop over the bits."""

from __future__ import annotations

import pytest
import torch

from draftwire_kernels import mask_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_hand(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    expected = logits.clone()
    for row, words in zip(rows.tolist(), bits.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    return expected


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 64, 4100])
def test_tokens_without_a_bit_are_minus_infinity(backend, dtype, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab).to(DEVICE, dtype)
    rows = torch.tensor([3, 0, 4], device=DEVICE)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32) + 1), dtype=torch.int64).to(DEVICE, torch.int32)
    before = logits.clone()
    masked = mask_logits(logits, rows, bits, backend=backend)
    assert torch.equal(masked, by_hand(logits, rows, bits))
    assert torch.equal(logits, before)


def test_no_rows_change_nothing():
    logits = torch.randn(2, 40, device=DEVICE)
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    bits = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    for backend in ("reference", "triton"):
        assert torch.equal(mask_logits(logits, rows, bits, backend=backend), logits)


@pytest.mark.parametrize(
    ("rows", "bits", "error"),
    [
        (torch.zeros(1), torch.zeros(1, 2, dtype=torch.int32), "rows: "),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32), "bits: "),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2), "bits: "),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32), "bits: got 1 words a row, expected"),
    ],
)
def test_wrong_tensors_are_named(rows, bits, error):
    with pytest.raises(ValueError, match=error):
        mask_logits(torch.zeros(2, 40), rows, bits)
