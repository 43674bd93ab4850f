"""gumbel_sample: one draw per row."""

import numpy as np
import pytest
import torch
from scipy import stats

from draftwire_kernels import derive_stream_keys, gumbel_sample

KEYS = derive_stream_keys(range(4096)).proposal
INF = float("inf")
NAN = float("nan")


def _draw(logits: list[float] | torch.Tensor, temperature: float = 1.0, n: int = 4096, **options: object) -> np.ndarray:
    rows = torch.as_tensor(logits).expand(n, -1)
    tokens = gumbel_sample(rows, torch.full((n,), temperature), KEYS[:n], torch.full((n,), 3), **options)  # type: ignore[arg-type]
    return tokens.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_draws_follow_the_softmax_at_the_temperature(dtype: torch.dtype, temperature: float, use_fp64: bool) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5], dtype=dtype)
    counts = np.bincount(_draw(logits, temperature, use_fp64=use_fp64), minlength=5)
    p = (logits.double() / temperature).softmax(0).numpy()
    assert stats.chisquare(counts, p * counts.sum()).pvalue > 1e-4


def test_large_vocabulary_draws_follow_the_softmax() -> None:
    vocab, n = 262144, 64
    logits = torch.zeros(vocab)
    logits[: vocab // 2] = np.log(3.0)
    low = (_draw(logits, n=n) < vocab // 2).mean()
    assert abs(low - 0.75) < 4 * np.sqrt(0.75 * 0.25 / n)


def test_temperature_zero_takes_the_largest_and_lowest_column() -> None:
    assert (_draw([1.0, 3.0, 3.0, 2.0], 0.0) == 1).all()


def test_a_single_finite_logit_is_taken() -> None:
    assert (_draw([-INF, -INF, -80.0, -INF]) == 2).all()


def test_an_infinite_logit_wins_and_several_share_the_mass() -> None:
    assert (_draw([1e30, INF, 0.0]) == 1).all()
    shared = np.bincount(_draw([INF, 0.0, INF]), minlength=3)
    assert shared[1] == 0
    assert stats.chisquare(shared[[0, 2]]).pvalue > 1e-4
    assert (_draw([0.0, INF, INF], 0.0) == 1).all()


@pytest.mark.parametrize("temperature", [1e-4, 1.0])
def test_very_large_logits_keep_their_differences(temperature: float) -> None:
    logits = torch.tensor([1e30, 1e30, -1e30])
    counts = np.bincount(_draw(logits, temperature), minlength=3)
    assert counts[2] == 0
    assert stats.chisquare(counts[:2]).pvalue > 1e-4
    shifted = torch.tensor([2.0, 0.0, 1.0]) + 2.0**14
    assert (_draw(shifted) == _draw(shifted - 2.0**14)).all()


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0], [-INF, -INF, -INF], [INF, NAN, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_gives_minus_one(
    row: list[float], temperature: float
) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], row, [0.0, 1.0, 2.0]])
    tokens = gumbel_sample(logits, torch.full((3,), temperature), KEYS[:3], torch.arange(3))
    alone = gumbel_sample(logits[[0, 2]], torch.full((2,), temperature), KEYS[[0, 2]], torch.tensor([0, 2]))
    assert tokens[1] == -1
    assert tokens[[0, 2]].tolist() == alone.tolist()


def test_a_row_does_not_depend_on_the_batch_or_its_slot() -> None:
    n, vocab = 64, 333
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(0))
    temperature = (torch.arange(n) % 3) * 0.7
    position, offset = torch.arange(n) * 5, (torch.arange(n) % 4).int()
    tokens = gumbel_sample(logits, temperature, KEYS[:n], position, draft_offset=offset)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    shuffled = gumbel_sample(
        logits[order], temperature[order], KEYS[:n][order], position[order], draft_offset=offset[order]
    )
    assert torch.equal(shuffled, tokens[order])
    for i in range(0, n, 7):
        i_ = slice(i, i + 1)
        alone = gumbel_sample(logits[i_], temperature[i_], KEYS[i_], position[i_], draft_offset=int(offset[i]))
        assert alone.item() == tokens[i]


def test_noise_is_keyed_by_target_id_in_a_reduced_vocabulary() -> None:
    """A full row with -inf outside the reduced vocabulary draws the same token."""
    ids = torch.tensor([7, 2, 9, 4])
    reduced = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    full = torch.full((512, 12), -INF)
    full[:, ids] = reduced
    args = (torch.ones(512), KEYS[:512], torch.arange(512))
    assert torch.equal(ids[gumbel_sample(reduced, *args, token_ids=ids)], gumbel_sample(full, *args))


def test_each_coordinate_of_the_key_changes_the_draw() -> None:
    logits = torch.zeros(512, 50)
    args = (logits, torch.ones(512))
    base = gumbel_sample(*args, KEYS[:512], torch.arange(512))
    for other in (
        gumbel_sample(*args, KEYS[512:1024], torch.arange(512)),
        gumbel_sample(*args, KEYS[:512], torch.arange(512) + 1),
        gumbel_sample(*args, KEYS[:512], torch.arange(512), draft_offset=1),
    ):
        assert (other == base).float().mean() < 0.06


def test_no_rows_give_no_tokens() -> None:
    empty = gumbel_sample(torch.zeros(0, 5), torch.zeros(0), KEYS[:0], torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)
