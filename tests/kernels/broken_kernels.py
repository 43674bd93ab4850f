# ruff: noqa: ARG001, N803
"""Functions of the Triton kernels, each with a known error."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.draw import draw_residual, draw_without
from draftwire_kernels.gpu.noise import accept_uniform, row_state


@triton.jit
def draw_from_p(
    logits,
    num_columns,
    draft_logits,
    column_of,
    temperature,
    top,
    p_share,
    draft_top,
    q_share,
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LEAD: tl.constexpr,
):
    score, token = draw_residual(
        logits, num_columns, draft_logits, column_of, temperature, top, p_share, 0.0, q_share * 0, state, bound,
        USE_FP64, GROUP, LEAD,
    )  # fmt: skip
    return score, token


@triton.jit
def draw_with_the_draft(
    logits, num_columns, temperature, top, excluded, state, bound, USE_FP64: tl.constexpr, GROUP: tl.constexpr
):
    score, token = draw_without(logits, num_columns, temperature, top, -1, state, bound, USE_FP64, GROUP)
    return score, token


@triton.jit
def uniform_without_offset(key, position, offset, USE_FP64: tl.constexpr):
    return accept_uniform(key, position, offset * 0, USE_FP64)


@triton.jit
def group_state_of_tokens(state):
    return state


@triton.jit
def state_without_offset(key, position, offset):
    return row_state(key, position, position * 0)
