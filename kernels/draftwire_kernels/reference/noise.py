"""The noise of `draftwire_kernels.noise` in torch, bit for bit."""

import torch
from torch import Tensor

from draftwire_kernels.noise import (
    GOLDEN64,
    GROUP64,
    MAX_UNIFORM32,
    MAX_UNIFORM64,
    MIX64_MULTIPLIERS,
    MIX64_SHIFTS,
    OFFSET64,
    TOKEN_MULTIPLIERS,
    TOKEN_SHIFTS,
)


def _signed(value: int, bits: int) -> int:
    """Return `value` as a signed integer, because torch's integers are signed and their products wrap."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN64 = _signed(GOLDEN64, 64)
_OFFSET64 = _signed(OFFSET64, 64)
_GROUP64 = _signed(GROUP64, 64)
_MIX64_MULTIPLIERS = tuple(_signed(m, 64) for m in MIX64_MULTIPLIERS)
_TOKEN_MULTIPLIERS = tuple(_signed(m, 32) for m in TOKEN_MULTIPLIERS)


def mix64(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 words."""
    for shift, multiplier in zip(MIX64_SHIFTS, _MIX64_MULTIPLIERS, strict=False):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    last = MIX64_SHIFTS[-1]
    return x ^ ((x >> last) & ((1 << (64 - last)) - 1))


def row_state(key: Tensor, position: Tensor, offset: Tensor | int) -> Tensor:
    """Return the state of each noise row, int64 [N], from int64 [N] keys and positions and offsets (int or [N])."""
    state = mix64(key + _GOLDEN64)
    state = mix64(state + (position + 1) * _GOLDEN64)
    if isinstance(offset, Tensor):
        return mix64(state + (offset.long() + 1) * _OFFSET64)
    return mix64(state + _signed((offset + 1) * OFFSET64 % 2**64, 64))


def group_state(state: Tensor) -> Tensor:
    """Return the state [N] of the noise of each row's groups."""
    return mix64(state + _GROUP64)


def token_words(state: Tensor, token_ids: Tensor) -> Tensor:
    """Return the hash of each token id under each row's state, int32 [N, V], from int64 [N] and int32 [V] or [N, V]."""
    words = state.contiguous().view(torch.int32).view(-1, 2, 1)  # low word first: little-endian
    x = token_ids ^ words[:, 0]
    shifted = torch.empty_like(x)
    for i, shift in enumerate(TOKEN_SHIFTS):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (32 - shift)) - 1)
        if i == 1:
            x ^= words[:, 1]
        if i < len(_TOKEN_MULTIPLIERS):
            x *= _TOKEN_MULTIPLIERS[i]
    return x


def uniform32(words: Tensor) -> Tensor:
    """Return float32 uniforms in (0, 1) from int32 words."""
    x = words.float().mul_(2.0**-32).add_(2.0**-33)
    return x.add_(x < 0).clamp_(max=MAX_UNIFORM32)


def uniform64(words: Tensor, low_words: Tensor) -> Tensor:
    """Return float64 uniforms in (0, 1) from two int32 words each; the first selects the cell of `uniform32`."""
    within = low_words.double().mul_(2.0**-32).add_(2.0**-33)
    x = within.add_(within < 0).add_(words).mul_(2.0**-32)
    return x.add_(words < 0).clamp_(max=MAX_UNIFORM64)


def accept_uniform(key: Tensor, position: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Return acceptance uniforms [N] of `dtype` (float32 or float64)."""
    words = row_state(key, position, offset).contiguous().view(torch.int32).view(-1, 2)
    return uniform32(words[:, 1]) if dtype == torch.float32 else uniform64(words[:, 1], words[:, 0])


def select_rates(rates: Tensor, key: Tensor, position: Tensor, offset: Tensor) -> Tensor:
    """Return one of each draft's N rates, [D] of [k, N]; see `draftwire_kernels.draft_rates`, the same in numpy."""
    # The low word of the state; in float32 the uniform is the high word, in float64 these are its last bits.
    return rates[offset, row_state(key, position, offset) & (rates.shape[1] - 1)]


def gumbel_noise(state: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Gumbel noise [N, V] of `dtype` (float32 or float64) for rows' states and int32 token ids [V] or [N, V]."""
    words = token_words(state, token_ids)
    if dtype == torch.float32:
        uniform = uniform32(words)
    else:
        uniform = uniform64(words, token_words(mix64(state + _GOLDEN64), token_ids))
    return uniform.neg_().log1p_().neg_().log_().neg_()
