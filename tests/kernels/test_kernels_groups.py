"""The distribution of draws in two races, among groups and within a group, with mass in several groups."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from draftwire_kernels import DraftLogits, derive_stream_keys, gumbel_sample, rejection_sample
from draftwire_kernels.noise import GROUP
from draftwire_kernels.reference import distribution, noise

pytest.importorskip("triton")
import triton
import triton.language as tl

from draftwire_kernels.gpu import draw
from draftwire_kernels.gpu.noise import gumbel_ceiling

CUDA = torch.cuda.is_available()
VOCAB = 2 * GROUP + 300
TOKENS = torch.tensor([0, 1, 2, 300, GROUP - 1, GROUP, GROUP + 90, 2 * GROUP - 1, 2 * GROUP, VOCAB - 1])
"""Tokens with mass. The ids 0 to 2 are also group numbers, so that noise shared by groups and tokens is detected."""
REDUCED = torch.tensor([2 * GROUP, 2, GROUP, 0, VOCAB - 1, 300])
FORMS = ["one-hot", "greedy", "dense", "reduced", "top-n"]
CASES = [("standard", form) for form in FORMS] + [("block", form) for form in ("dense", "reduced", "top-n")]
BLOWN = 3.0


def _row(seed: int, spread: float) -> Tensor:
    row = torch.full((VOCAB,), -torch.inf)
    row[TOKENS] = torch.randn(len(TOKENS), generator=torch.Generator().manual_seed(seed)) * spread
    return row


P, NEXT = _row(1, 1.0), _row(2, 1.0)
Q = P + _row(3, 1.5).nan_to_num(neginf=0.0)


def _ratio(tokens: Tensor, logits: Tensor) -> float:
    """Return the chi-square of tokens drawn from softmax(logits) over its quantile at 1 - 1e-6."""
    counts = np.bincount(tokens.cpu().numpy(), minlength=VOCAB)[TOKENS.numpy()]
    assert counts.sum() == len(tokens), "a token without mass"
    expected = logits[TOKENS].double().softmax(0).numpy() * len(tokens)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(statistic / stats.chi2.isf(1e-6, len(TOKENS) - 1))


def law_ratio(method: str, form: str, backend: str, count: int) -> float:
    """Return the larger chi-square ratio of `count` steps: of first tokens, or of tokens after accepted drafts."""
    device = "cuda" if backend == "triton" else "cpu"
    keys = derive_stream_keys(range(count)).to(device)
    one, position = torch.ones(count, device=device), torch.arange(count, device=device) % 1000
    p, next_row, q, tokens = P.to(device), NEXT.to(device), Q.to(device), None
    if form == "reduced":
        tokens = REDUCED.to(device)
        q = q[tokens]
    elif form == "top-n":
        q, tokens = q.topk(4)
    rows = q.expand(count, -1)
    temperature = one * 0 if form == "greedy" else one
    column = gumbel_sample(rows, temperature, keys.proposal, position, token_ids=tokens, backend=backend)
    drafts = column if tokens is None else tokens[column]
    draft = None
    if form in ("dense", "reduced", "top-n"):
        draft = DraftLogits(rows, None if tokens is None else tokens.expand(count, -1) if form == "top-n" else tokens)
    result = rejection_sample(
        torch.stack([p, next_row]).repeat(count, 1), drafts, torch.arange(count + 1, dtype=torch.int32) * 2, one, keys,
        position, draft_logits=draft, method=method, backend=backend,
    )  # fmt: skip
    bonus = result.tokens[result.num_emitted == 2, 1]
    return max(_ratio(result.tokens[:, 0], P), _ratio(bonus, NEXT))


@pytest.mark.parametrize(("method", "form"), CASES)
def test_the_reference_follows_the_target(method: str, form: str) -> None:
    assert law_ratio(method, form, "reference", 5000) < 1


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "form"), CASES)
def test_a_million_draws_follow_the_target(method: str, form: str) -> None:
    assert law_ratio(method, form, "triton", 1_000_000) < 1


@pytest.mark.parametrize("form", ["one-hot", "dense"])
def test_groups_with_the_noise_of_tokens_fail(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "group_state", lambda state: state)
    assert law_ratio("standard", form, "reference", 5000) > BLOWN


@pytest.mark.parametrize(
    "logits_of",
    [lambda: torch.zeros(VOCAB), lambda: torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 3],
    ids=["flat", "spread"],
)
def test_a_draw_of_groups_is_a_draw_of_all_tokens(logits_of: Callable[[], Tensor]) -> None:
    """Groups and halves of groups are drawn in proportion to their mass."""
    logits, count = logits_of(), 4000
    keys, one = derive_stream_keys(range(count)), torch.ones(count)
    scores = logits.expand(count, -1)
    drawn = distribution.draw(scores, one, keys.resample, torch.arange(count))
    half = GROUP // 2
    counts = np.bincount((drawn // half).numpy(), minlength=-(-VOCAB // half))
    masses = torch.nn.functional.pad(logits.double().softmax(0), (0, -VOCAB % half)).view(-1, half).sum(1)
    assert stats.chisquare(counts, masses.numpy() * count).pvalue > 1e-6


@triton.jit
def ceilings_kernel(words, ceilings, COUNT: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(ceilings + place, gumbel_ceiling(tl.load(words + place).to(tl.uint32, bitcast=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [0, 2**24 - 2**16, 2**31 - 2**16, 2**32 - 2**17])
def test_no_noise_exceeds_its_ceiling(first: int, dtype: torch.dtype) -> None:
    """Noise would exceed its ceiling near 1, where it is steep, if uniforms were rounded up."""
    count = 2**17
    words = torch.arange(first, first + count).to(torch.int32)
    ceilings = torch.empty(count, device="cuda" if CUDA else "cpu")
    ceilings_kernel[(count // 4096,)](words.to(ceilings.device), ceilings, 4096)
    # In float64 the noise is largest when the second word is 0.
    u = noise.uniform32(words) if dtype == torch.float32 else noise.uniform64(words, torch.zeros_like(words))
    exact = -torch.log(-torch.log1p(-u.double()))
    assert (exact <= ceilings.cpu() + draw.MARGIN.value / 10).all()
    assert (ceilings.cpu() - exact).abs()[1000 if first == 0 else 0 :].max() < 0.5  # not too high either
