"""The noise of `draftwire_kernels.noise` in Triton, bit for bit."""

import triton
import triton.language as tl

from draftwire_kernels import noise as definition

_GOLDEN = tl.constexpr(definition.GOLDEN64)
_OFFSET = tl.constexpr(definition.OFFSET64)
_GROUP = tl.constexpr(definition.GROUP64)
_MIX_0, _MIX_1 = (tl.constexpr(m) for m in definition.MIX64_MULTIPLIERS)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(s) for s in definition.MIX64_SHIFTS)
_TOKEN_0, _TOKEN_1, _TOKEN_2 = (tl.constexpr(m) for m in definition.TOKEN_MULTIPLIERS)
_TURN_0, _TURN_1, _TURN_2, _TURN_3 = (tl.constexpr(s) for s in definition.TOKEN_SHIFTS)
_CELL = tl.constexpr(2.0**-32)
_HALF_CELL = tl.constexpr(2.0**-33)
_LOG_CELLS = tl.constexpr(22.180709777918249)  # log 2**32
_LEAST_FLOOR = tl.constexpr(2.0**-34)  # cells; below 2**-33, the least uniform in float64
_MOST_LEAD = tl.constexpr(2.0**17)  # one over the root of _LEAST_FLOOR
_MAX_UNIFORM32 = tl.constexpr(definition.MAX_UNIFORM32)
_MAX_UNIFORM64 = tl.constexpr(definition.MAX_UNIFORM64)


@triton.jit
def mix64(x):
    """Apply SplitMix64's finaliser to uint64 words."""
    x = (x ^ (x >> _SHIFT_0)) * _MIX_0
    x = (x ^ (x >> _SHIFT_1)) * _MIX_1
    return x ^ (x >> _SHIFT_2)


@triton.jit
def row_state(key, position, offset):
    """Return the uint64 state of a noise row from integers."""
    state = mix64(key.to(tl.uint64) + _GOLDEN)
    state = mix64(state + (position.to(tl.uint64) + 1) * _GOLDEN)
    return mix64(state + (offset.to(tl.uint64) + 1) * _OFFSET)


@triton.jit
def group_state(state):
    """Return the state of the noise of a row's groups."""
    return mix64(state + _GROUP)


@triton.jit
def token_words(state, ids):
    """Return the uint32 hash of uint32 token ids under a row's state."""
    x = ids ^ state.to(tl.uint32)
    return _mixed(x ^ (x >> _TURN_0), state)


@triton.jit
def neighbour_words(state, base, offsets, lines):
    """Return `token_words` of the uint32 ids base ^ offsets ^ lines, with offsets and lines below 2**17: the hash's
    first shift removes these bits, so it is computed once per base."""
    x = base ^ state.to(tl.uint32)
    return _mixed((x ^ (x >> _TURN_0)) ^ offsets ^ lines, state)


@triton.jit
def _mixed(x, state):
    x *= _TOKEN_0
    x ^= (x >> _TURN_1) ^ (state >> 32).to(tl.uint32)
    x *= _TOKEN_1
    x ^= x >> _TURN_2
    x *= _TOKEN_2
    return x ^ (x >> _TURN_3)


@triton.jit
def uniform_floor(words):
    """Return a lower bound of the uniform of the words, up to rounding (1 in 2**23), in cells of 2**-32."""
    return words.to(tl.float32)


@triton.jit
def log_floor(cells):
    """Return the logarithm of a floor in cells; finite for the word 0, whose floor is 0."""
    return tl.log(tl.maximum(cells, _LEAST_FLOOR)) - _LOG_CELLS


@triton.jit
def log_lead(lead):
    """Return half the logarithm of exp(score) / u from its root with u in cells; finite for the word 0, whose root is
    infinite, or NaN for a score of -inf."""
    return tl.log(tl.minimum(lead, _MOST_LEAD)) + 0.5 * _LOG_CELLS


@triton.jit
def uniform32(words):
    x = words.to(tl.int32, bitcast=True).to(tl.float32) * _CELL + _HALF_CELL
    return tl.minimum(tl.where(x < 0, x + 1.0, x), _MAX_UNIFORM32)


@triton.jit
def uniform64(words, low_words):
    x = low_words.to(tl.int32, bitcast=True).to(tl.float64) * _CELL + _HALF_CELL
    x = (tl.where(x < 0, x + 1.0, x) + words.to(tl.int32, bitcast=True).to(tl.float64)) * _CELL
    return tl.minimum(tl.where(x < 0, x + 1.0, x), _MAX_UNIFORM64)


@triton.jit
def accept_uniform(key, position, offset, USE_FP64: tl.constexpr):
    state = row_state(key, position, offset)
    high = (state >> 32).to(tl.uint32)
    return uniform64(high, state.to(tl.uint32)) if USE_FP64 else uniform32(high)


@triton.jit
def exponential(u):
    """Return -log1p(-u), with Kahan's correction of the rounding of 1 - u."""
    rest = 1.0 - u
    lost = 1.0 - rest
    return tl.where(lost > 0, -tl.log(rest) * (u / tl.where(lost > 0, lost, 1.0)), u)


@triton.jit
def gumbel_noise(state, ids, USE_FP64: tl.constexpr):
    """Return the Gumbel noise -log(-log1p(-u)) of uint32 token ids."""
    words = token_words(state, ids)
    if USE_FP64:  # noqa: SIM108
        u = uniform64(words, token_words(mix64(state + _GOLDEN), ids))
    else:
        u = uniform32(words)
    return -tl.log(exponential(u))


@triton.jit
def gumbel_ceiling(words):
    """Return an upper bound of the words' noise, up to rounding, in float32 or float64."""
    words -= words >> 24  # so that no float exceeds its word; near 1 the noise is steep
    floor = tl.maximum(uniform_floor(words), _LEAST_FLOOR) * _CELL
    return -tl.log(exponential(tl.minimum(floor, _MAX_UNIFORM32)))
