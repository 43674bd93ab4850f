# ruff: noqa: ARG001, N803
"""Parts of the Triton kernels that are wrong in a known way."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.race import race_of_target


@triton.jit
def race_of_p(
    logits,
    num_columns,
    draft_logits,
    column_of,
    temperature,
    top,
    mass,
    draft_top,
    draft_mass,
    weight,
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
):
    bound += tl.log(mass).to(tl.float32)
    score, token = race_of_target(
        logits, None, num_columns, temperature, top, state, -1, bound, USE_FP64, GROUP, LINE, LANES
    )
    return score, token


@triton.jit
def race_with_the_draft(
    logits,
    token_ids,
    num_columns,
    temperature,
    top,
    state,
    excluded,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
):
    score, token = race_of_target(
        logits, token_ids, num_columns, temperature, top, state, -1, bound, USE_FP64, GROUP, LINE, LANES
    )
    return score, token


@triton.jit
def uniform_without_offset(key, position, offset, USE_FP64: tl.constexpr):
    return accept_uniform(key, position, offset * 0, USE_FP64)


@triton.jit
def state_without_offset(key, position, offset):
    return row_state(key, position, position * 0)
