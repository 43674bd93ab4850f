"""Writes -inf for the tokens whose bit is 0, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 4096
"""Tokens per program."""


@triton.jit(do_not_specialize=["vocab", "words"])
def mask_kernel(
    out,  # [R, V]
    rows,  # [M] int64
    bits,  # [M, W] int32
    vocab,
    words,
    TOKENS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < vocab
    word = tl.load(bits + place * words + token // 32, mask=is_token, other=0)
    is_masked = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows + place)
    minus_infinity = tl.full([TOKENS], float("-inf"), tl.float32).to(out.dtype.element_ty)
    tl.store(out + row * vocab + token, minus_infinity, mask=is_token & is_masked)


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    out = logits.clone(memory_format=torch.contiguous_format)
    if rows.shape[0] > 0:
        grid = (rows.shape[0], triton.cdiv(logits.shape[1], TOKENS))
        with torch.cuda.device(logits.device if logits.is_cuda else -1):
            mask_kernel[grid](out, rows.contiguous(), bits.contiguous(), logits.shape[1], bits.shape[1], TOKENS=TOKENS)
    return out
