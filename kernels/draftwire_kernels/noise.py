"""Definition of the noise, shared by all backends.

A random number is a pure function of (stream key, position, draft offset, target token id), independent of batches,
slots and the order of calls. All arithmetic is on wrapping integers, so all backends produce the same bits.

1. Row state, 64 bits per (key, position, offset), computed once per row of logits::

       s = mix64(key + GOLDEN64)
       s = mix64(s + (position + 1) * GOLDEN64)
       s = mix64(s + (offset + 1) * OFFSET64)

   mix64 is the finaliser of SplitMix64 (Steele, Lea and Flood 2014; Stafford's variant 13 of MurmurHash3's). For one
   key, successive positions are successive outputs of SplitMix64, a generator that passes BigCrush.

2. Token word, 32 bits per target token id: the bijection triple32 (C. Wellons, "hash prospector": three
   multiplications, avalanche bias 0.021) of the id XORed with the low word of s; the high word of s is XORed in after
   the first round, so that rows with similar low words do not share noise. About twelve 32-bit operations per element,
   compared to about eighty for ten rounds of Philox.

3. Uniform, float32: the word as an int32 converted to float, times 2**-32, plus 2**-33, plus 1 if negative, at most
   1 - 2**-24: the middle of one of 2**32 equal cells, exact near 0. Float64 refines the cell with the word of the same
   hash under the state mix64(s + GOLDEN64).

4. Gumbel noise: g = -log(-log1p(-v)) for the uniform v. The winning tail, large g, is at small v, where v has its full
   resolution and log1p its relative precision; g is in [-2.82, 22.88] in float32 and [-3.61, 45.06] in float64, and
   never NaN or infinite.

5. The acceptance uniform of (key, position, offset) is the high word of s after step 3 (float64: both words). The last
   bits of the low word select one of the draft's synthetic rates, if it has several.

6. Sampling: the token with the largest log weight + g wins, the lowest id on ties. Proposals and "coupled", where two
   models race with the same noise and should agree often, use one race of all tokens. The other methods, where only the
   distribution matters, use two races: first of groups of GROUP neighbouring ids, with the log of the sum of their
   tokens' weights and the noise of their numbers (instead of token ids) under the state mix64(s + GROUP64), then of the
   tokens in the winning group. The distribution is the same: a group wins with the share of its weight, and a token in
   the group with its share of the group's weight. Noise is computed for one group instead of the vocabulary.
"""

import numpy as np

NOISE_VERSION = 2
"""Version of the definition above; drafter and verifier compare it, because `coupled` and audits need equal noise."""

GOLDEN64 = 0x9E3779B97F4A7C15
OFFSET64 = 0xD1B54A32D192ED03
GROUP64 = 0xA0761D6478BD642F
GROUP = 512
MIX64_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX64_SHIFTS = (30, 27, 31)

TOKEN_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
TOKEN_SHIFTS = (17, 11, 15, 14)

MAX_UNIFORM32 = 1.0 - 2.0**-24
MAX_UNIFORM64 = 1.0 - 2.0**-53


def host_row_state(key: np.ndarray, position: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the state of each noise row, uint64 [N], of int64 [N] keys, positions and offsets, in numpy.

    For few rows this is ten times as fast as torch's operations.
    """
    golden, step = np.uint64(GOLDEN64), np.uint64(OFFSET64)
    state = _mix64(key.view(np.uint64) + golden)
    state = _mix64(state + (position + 1).view(np.uint64) * golden)
    return _mix64(state + (offset + 1).view(np.uint64) * step)


def _mix64(x: np.ndarray) -> np.ndarray:
    first, second, last = (np.uint64(shift) for shift in MIX64_SHIFTS)
    x = (x ^ (x >> first)) * np.uint64(MIX64_MULTIPLIERS[0])
    x = (x ^ (x >> second)) * np.uint64(MIX64_MULTIPLIERS[1])
    return x ^ (x >> last)
