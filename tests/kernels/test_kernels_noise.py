"""The noise: its bits against their definition, and its statistics."""

import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from scipy import stats
from torch import Tensor

from draftwire_kernels.noise import host_row_state
from draftwire_kernels.reference import noise

INT32 = torch.int32


def _keys(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _unsigned(words: Tensor) -> np.ndarray:
    return words.numpy().view(np.uint32)


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 1, 131071, 2**40])
@pytest.mark.parametrize("offset", [0, 3, 15])
def test_bits_are_those_of_the_definition(key: int, position: int, offset: int) -> None:
    tokens = [0, 1, 2047, 128255, 262143]
    state = noise.row_state(torch.tensor([key]), torch.tensor([position]), torch.tensor([offset]))
    expected = oracle.row_state(key, position, offset)
    assert int(state) % 2**64 == expected
    assert host_row_state(*(np.array([one]) for one in (key, position, offset))).tolist() == [expected]
    assert torch.equal(state, noise.row_state(torch.tensor([key]), torch.tensor([position]), offset))
    words = _unsigned(noise.token_words(state, torch.tensor(tokens, dtype=INT32)))[0]
    assert words.tolist() == [oracle.token_word(expected, t) for t in tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_noise_is_the_formula_of_the_bits(dtype: torch.dtype) -> None:
    state = noise.row_state(torch.tensor([5]), torch.tensor([17]), 2)
    tokens = torch.arange(4096, dtype=INT32)
    expected = oracle.gumbel(5, 17, 2, range(4096))
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    np.testing.assert_allclose(noise.gumbel_noise(state, tokens, dtype)[0], expected, rtol=tolerance, atol=tolerance)
    uniform = noise.accept_uniform(torch.tensor([5]), torch.tensor([17]), torch.tensor([2]), dtype)
    np.testing.assert_allclose(uniform, oracle.accept_uniform(5, 17, 2), rtol=1e-7)


def test_extreme_words_give_finite_noise_and_keep_the_tail() -> None:
    words = torch.tensor([0, 1, 2, -1, -2, 2**31 - 1, -(2**31)], dtype=INT32)
    u = noise.uniform32(words)
    assert u.dtype == torch.float32
    assert u.min() > 0
    assert u.max() < 1
    g = -torch.log(-torch.log1p(-u))
    assert g.isfinite().all()
    assert g[0] > g[1] > g[2] > 21.2  # the largest values stay distinct
    assert u[:3].tolist() == [2.0**-33, 1.5 * 2.0**-32, 2.5 * 2.0**-32]
    u64 = noise.uniform64(words, words)
    assert u64.min() > 0
    assert u64.max() < 1
    assert torch.log(-torch.log1p(-u64)).isfinite().all()


def test_float64_noise_refines_the_float32_noise() -> None:
    state, tokens = noise.row_state(_keys(64), _zeros(64), 0), torch.arange(4096, dtype=INT32)
    single, double = (noise.gumbel_noise(state, tokens, dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    g = noise.gumbel_noise(noise.row_state(_keys(8), _zeros(8), 0), torch.arange(65536, dtype=INT32), torch.float32)
    assert stats.kstest(g.flatten().double().numpy(), stats.gumbel_r.cdf).pvalue > 1e-4
    assert stats.kstest(g.amax(1).double().numpy() - np.log(65536), stats.gumbel_r.cdf).pvalue > 1e-4


def _axis(name: str, count: int) -> Tensor:
    """Return int32 words [512, count]: `count` neighbours along one coordinate, for 512 keys."""
    n = torch.arange(count)
    one = torch.tensor([0])
    rows = []
    for key in _keys(512, seed=3)[:, None]:
        tokens = torch.tensor([91], dtype=INT32)
        if name == "token":
            rows.append(noise.token_words(noise.row_state(key, one, 0), n.to(INT32))[0])
        elif name == "position":
            rows.append(noise.token_words(noise.row_state(key, n, 0), tokens)[:, 0])
        elif name == "offset":
            rows.append(noise.token_words(noise.row_state(key, one, n), tokens)[:, 0])
        else:
            rows.append(noise.token_words(noise.row_state(key + n, one, 0), tokens)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("axis", ["token", "position", "offset", "key"])
def test_neighbours_are_uniform_and_independent(axis: str) -> None:
    words = _unsigned(_axis(axis, 1024)).astype(np.uint64)
    for shift in (0, 8, 16, 24):  # every byte is uniform
        counts = np.bincount(((words >> np.uint64(shift)) & np.uint64(255)).flatten().astype(int), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-5
    for lag in (1, 2, 3, 64):  # pairs fill the square evenly, in their low and high bits
        for shift in (0, 28):
            nibbles = ((words >> np.uint64(shift)) & np.uint64(15)).astype(int)
            pairs = nibbles[:, lag:] * 16 + nibbles[:, :-lag]
            assert stats.chisquare(np.bincount(pairs.flatten(), minlength=256)).pvalue > 1e-5
    u = words / 2.0**32 - 0.5
    for lag in (1, 2, 7):
        correlation = (u[:, lag:] * u[:, :-lag]).mean() * 12
        assert abs(correlation) < 4.5 / np.sqrt(u[:, lag:].size)


def test_position_and_offset_do_not_meet_on_the_diagonal() -> None:
    """No two pairs of position and offset share a state, although steps' diagonals (position + i, i) cross."""
    position, offset = torch.meshgrid(torch.arange(2048), torch.arange(16), indexing="ij")
    state = noise.row_state(torch.tensor([42]), position.flatten(), offset.flatten())
    assert state.unique().numel() == state.numel()


@pytest.mark.parametrize("coordinate", ["key", "position", "offset", "token"])
def test_each_input_bit_flips_each_output_bit_half_of_the_time(coordinate: str) -> None:
    n = 4096
    key, position, token = _keys(n, 5), _keys(n, 6) >> 23, (_keys(n, 7) >> 46) & 0x1FFFF
    offset = torch.arange(n) % 16

    def words(key: Tensor, position: Tensor, offset: Tensor, token: Tensor) -> np.ndarray:
        return _unsigned(noise.token_words(noise.row_state(key, position, offset), token.to(INT32)[:, None])[:, 0])

    inputs = {"key": key, "position": position, "offset": offset, "token": token}
    base = words(**inputs)
    for bit in {"key": range(0, 63, 3), "position": range(20), "offset": range(4), "token": range(18)}[coordinate]:
        flipped = words(**{**inputs, coordinate: inputs[coordinate] ^ (1 << bit)})
        rate = np.unpackbits((base ^ flipped).view(np.uint8).reshape(n, 4), axis=1).mean(0)
        assert np.abs(rate - 0.5).max() < 5 * 0.5 / np.sqrt(n)


def test_rows_with_nearby_states_do_not_share_noise() -> None:
    """Low words that differ in few bits only permute tokens, so the high word must make the noise differ."""
    n = 4096
    high = _keys(2, 9) & ~0xFFFFFFFF
    tokens = torch.arange(n, dtype=INT32)
    a = _unsigned(noise.token_words(high[:1] | 5, tokens))[0] / 2.0**32
    b = _unsigned(noise.token_words(high[1:] | 6, tokens))[0] / 2.0**32
    aligned = b[np.arange(n) ^ 3]  # the same (token XOR low word)
    assert abs(np.corrcoef(a, aligned)[0, 1]) < 4.5 / np.sqrt(n)
    one_bit = _unsigned(noise.token_words((high[:1] ^ (1 << 45)) | 5, tokens))[0] / 2.0**32
    assert abs(np.corrcoef(a, one_bit)[0, 1]) < 4.5 / np.sqrt(n)


def test_acceptance_uniforms_are_independent_of_a_rows_noise() -> None:
    n = 65536
    keys, position = _keys(n, 2), _zeros(n)
    u = noise.accept_uniform(keys, position, position, torch.float32)
    g = noise.gumbel_noise(noise.row_state(keys, position, 0), torch.arange(2, dtype=INT32), torch.float32)
    v = torch.exp(-torch.exp(-g)).double()
    cells = (u.double() * 16).long() * 16 + (v[:, 1] * 16).long().clamp(max=15)
    assert stats.chisquare(np.bincount(cells.numpy(), minlength=256)).pvalue > 1e-5
