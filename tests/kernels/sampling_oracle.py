"""The formulas of draftwire_kernels in float64 numpy, one request at a time, written for readability."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

M64, M32 = 2**64 - 1, 2**32 - 1
GOLDEN = 0x9E3779B97F4A7C15
GROUP = 512


def mix64(x: int) -> int:
    x &= M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def row_state(key: int, position: int, offset: int) -> int:
    state = mix64(key + GOLDEN)
    state = mix64(state + (position + 1) * GOLDEN)
    return mix64(state + (offset + 1) * 0xD1B54A32D192ED03)


def token_word(state: int, token: int) -> int:
    x = token ^ (state & M32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & M32
    x ^= (x >> 11) ^ (state >> 32)
    x = (x * 0xAC4C1B51) & M32
    x = ((x ^ (x >> 15)) * 0x31848BAB) & M32
    return x ^ (x >> 14)


def key_with_least_word(token: int, position: int, offset: int) -> int:
    """Return a signed key with which `token` has word 0 at this position and offset, by inverting the hashes."""
    high = 0x9E3779B9 ^ token
    low = _unmixed(_unshifted(high, 11, 32), (17,), (0xED5AD4BB,), 32) ^ token
    state = high << 32 | low
    for step in ((offset + 1) * 0xD1B54A32D192ED03, (position + 1) * 0x9E3779B97F4A7C15, 0x9E3779B97F4A7C15):
        state = _unmixed(_unshifted(state, 31, 64), (30, 27), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), 64) - step
    return (state + 2**63) % 2**64 - 2**63


def _unmixed(x: int, shifts: Sequence[int], multipliers: Sequence[int], bits: int) -> int:
    for shift, multiplier in zip(reversed(shifts), reversed(multipliers), strict=True):
        x = _unshifted(x * pow(multiplier, -1, 2**bits) % 2**bits, shift, bits)
    return x


def _unshifted(x: int, shift: int, bits: int) -> int:
    """Return the y below 2**bits with y ^ (y >> shift) = x."""
    x %= 2**bits
    y = x
    for _ in range(bits // shift):
        y = x ^ (y >> shift)
    return y


def uniform(word: int, low_word: int) -> float:
    return min((word + (low_word + 0.5) * 2.0**-32) * 2.0**-32, 1 - 2.0**-53)


def accept_uniform(key: int, position: int, offset: int) -> float:
    state = row_state(key, position, offset)
    return uniform(state >> 32, state & M32)


def gumbel(key: int, position: int, offset: int, tokens: Sequence[int]) -> Array:
    return noise(row_state(key, position, offset), tokens)


def group_state(state: int) -> int:
    return mix64(state + 0xA0761D6478BD642F)


def noise(state: int, tokens: Sequence[int]) -> Array:
    low = mix64(state + GOLDEN)
    v = np.array([uniform(token_word(state, t), token_word(low, t)) for t in tokens])
    return -np.log(-np.log1p(-v))


def softmax(logits: Array, temperature: float) -> Array:
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    e = np.exp((logits - logits.max()) / temperature)
    return e / e.sum()


def race(mass: Array, key: int, position: int) -> int:
    """Return a Gumbel-max draw from an unnormalised distribution with RESAMPLE noise."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(mass) + gumbel(key, position, 0, range(len(mass)))))


def draw(mass: Array, key: int, position: int) -> int:
    """Return a draw in two races: among groups of tokens, then among the tokens of the winning group."""
    state = row_state(key, position, 0)
    groups = [mass[i : i + GROUP] for i in range(0, len(mass), GROUP)]
    with np.errstate(divide="ignore"):
        scores = np.log([group.sum() for group in groups]) + noise(group_state(state), range(len(groups)))
        first = int(np.argmax(scores)) * GROUP
        own = mass[first : first + GROUP]
        return first + int(np.argmax(np.log(own) + noise(state, range(first, first + len(own)))))


@dataclass(frozen=True)
class Request:
    p: Array  # [k + 1, V]
    q: Array | None  # [k, V], None for one-hot
    drafts: list[int]
    accept_key: int
    resample_key: int
    position: int

    def uniform(self, i: int) -> float:
        return accept_uniform(self.accept_key, self.position + i, i)

    def race(self, i: int) -> int:
        return race(self.p[i], self.resample_key, self.position + i)

    def token(self, i: int, mass: Array) -> int:
        return draw(mass, self.resample_key, self.position + i)

    def q_row(self, i: int) -> Array:
        return np.eye(self.p.shape[1])[self.drafts[i]] if self.q is None else self.q[i]


def verify_standard(r: Request) -> list[int]:
    for i, x in enumerate(r.drafts):
        q = r.q_row(i)
        if not r.uniform(i) < r.p[i, x] / q[x]:
            return [*r.drafts[:i], r.token(i, np.maximum(r.p[i] - q, 0))]
    return [*r.drafts, r.token(len(r.drafts), r.p[-1])]


def verify_synthetic(r: Request, rates: Sequence[Sequence[float]]) -> list[int]:
    for i, _ in enumerate(r.drafts):
        rate = rates[i][row_state(r.accept_key, r.position + i, i) % len(rates[i])]
        if not r.uniform(i) < rate:
            residual = np.maximum(r.p[i] - r.q_row(i), 0)
            return [*r.drafts[:i], r.token(i, residual if residual.max() > 0 else r.p[i])]
    return [*r.drafts, r.token(len(r.drafts), r.p[-1])]


def verify_block(r: Request) -> list[int]:
    k = len(r.drafts)
    weight = [1.0]
    for i, x in enumerate(r.drafts):
        weight.append(min(1.0, weight[-1] * r.p[i, x] / r.q_row(i)[x]))
    accepted = 0
    for i in range(1, k + 1):
        h = weight[k]
        if i < k:
            mass = np.maximum(weight[i] * r.p[i] - r.q_row(i), 0).sum()
            h = mass / (mass + 1 - weight[i])
        if r.uniform(i - 1) < h:
            accepted = i
    if accepted == k:
        return [*r.drafts, r.token(k, r.p[k])]
    residual = np.maximum(weight[accepted] * r.p[accepted] - r.q_row(accepted), 0)
    return [*r.drafts[:accepted], r.token(accepted, residual)]


def verify_coupled(r: Request) -> list[int]:
    for i, x in enumerate(r.drafts):
        token = r.race(i)
        if token != x:
            return [*r.drafts[:i], token]
    return [*r.drafts, r.race(len(r.drafts))]


@dataclass(frozen=True)
class Options:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


def processed(logits: Array, options: Options, prompt: Sequence[int], output: Sequence[int]) -> Array:
    """Return the penalised and filtered logits of the token after prompt + output."""
    x = np.array(logits, dtype=np.float64)
    for t in set(prompt) | set(output):
        x[t] = x[t] / options.repetition if x[t] > 0 else x[t] * options.repetition
    for t in set(output):
        x[t] -= options.presence + options.frequency * list(output).count(t)
    if options.temperature == 0:
        return x
    p = softmax(x, options.temperature)
    x[p < options.min_p * p.max()] = -np.inf
    if options.top_k:
        x[x < np.sort(x)[::-1][min(options.top_k, len(x)) - 1]] = -np.inf
    if options.top_p < 1:
        p = softmax(x, options.temperature)
        descending = np.sort(p)[::-1]
        before = np.cumsum(descending) - descending
        x[p < descending[before < options.top_p].min()] = -np.inf
    return x


def distribution(logits: Array, options: Options, prompt: Sequence[int], output: Sequence[int]) -> Array:
    return softmax(processed(logits, options, prompt, output), options.temperature)
