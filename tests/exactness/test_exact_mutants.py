"""A verifier with a known error fails the chi-square test of test_exact_law by a large margin.

Each mutant replaces `rejection_sample` in the sampler of a verifier in this process. `batch` is the logits, drafts,
cu_rows, temperature, keys and position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_cases import Case
from exact_law import LENGTH, Law, Sampling
from exact_pair import VOCAB
from exact_services import sample, serve_verifier

from draftwire_kernels import DraftLogits, RejectionResult, gumbel_sample, rejection_sample
from draftwire_kernels.reference import masks
from draftwire_kernels.reference.masks import forbid_sequences
from draftwire_kernels.reference.noise import gumbel_noise, row_state
from verifier_service.sampling import sampler
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_wrong")

REQUESTS = 1200
MORE_REQUESTS = 8000
"""For the mutants with one draft per step, which reuse noise: their bias is small."""
BLOWN = 2.0
"""Least ratio of chi-square statistic and quantile for a mutant."""

Verification = Callable[..., RejectionResult]


def resample_with_proposal_noise(*batch: Any, **rest: Any) -> RejectionResult:
    *rows, keys, position = batch
    return rejection_sample(*rows, keys._replace(resample=keys.proposal), position, **rest)


def sample_p_in_place_of_the_residual(*batch: Any, **rest: Any) -> RejectionResult:
    logits, _, cu_rows, temperature, keys, position = batch
    result = rejection_sample(*batch, **rest)
    accepted = result.num_emitted.long() - 1
    last = gumbel_sample(logits[cu_rows[:-1] + accepted], temperature, keys.resample, position + accepted)
    return result._replace(tokens=result.tokens.scatter(1, accepted[:, None], last[:, None]))


def verify_with_logits_of_another_draft(*batch: Any, draft_logits: DraftLogits | None, **rest: Any) -> RejectionResult:
    if draft_logits is not None:
        ids = draft_logits.token_ids
        own_ids = ids is not None and ids.ndim == 2
        draft_logits = DraftLogits(draft_logits.logits.roll(1, 0), ids.roll(1, 0) if own_ids else ids)
    return rejection_sample(*batch, draft_logits=draft_logits, **rest)


def draw_the_same_noise_at_every_position(*batch: Any, **rest: Any) -> RejectionResult:
    *rows, position = batch
    return rejection_sample(*rows, torch.zeros_like(position), **rest)


def accept_with_the_noise_that_proposed(*batch: Any, **_: Any) -> RejectionResult:
    """Verify at most one draft by the one-hot test, with a uniform computed from the draft's proposal noise."""
    logits, drafts, cu_rows, temperature, keys, position = batch
    first = cu_rows[:-1].long()
    drafted = (cu_rows.diff() == 2).nonzero()[:, 0]
    draft = torch.full_like(first, -1).index_put((drafted,), drafts)
    column = draft.clamp(min=0)[:, None]
    noise = gumbel_noise(row_state(keys.proposal, position, 0), torch.arange(VOCAB, dtype=torch.int32), torch.float32)
    uniform = (-(-noise.gather(1, column)).exp()).exp()[:, 0]
    p_draft = (logits[first] / temperature[:, None]).softmax(-1).gather(1, column)[:, 0]
    accepted = (draft >= 0) & (uniform < p_draft)
    refused = (draft >= 0) & ~accepted
    rows = logits[first + accepted.long()]
    rows = torch.where(refused[:, None], rows.scatter(1, column, -torch.inf), rows)
    last = gumbel_sample(rows, temperature, keys.resample, position + accepted)
    tokens = torch.stack([torch.where(accepted, draft, last), torch.where(accepted, last, -1)], 1)
    return RejectionResult(tokens, 1 + accepted.int())


MUTANTS = [
    (resample_with_proposal_noise, Case("gumbel", prompt=1, k=1, seeded=False)),
    (sample_p_in_place_of_the_residual, Case("greedy", seeded=False)),
    (sample_p_in_place_of_the_residual, Case("gumbel", prompt=1, seeded=False)),
    (sample_p_in_place_of_the_residual, Case("dense")),
    (verify_with_logits_of_another_draft, Case("dense")),
    (verify_with_logits_of_another_draft, Case("top-3")),
    (draw_the_same_noise_at_every_position, Case("gumbel", prompt=1, seeded=False)),
    (draw_the_same_noise_at_every_position, Case("greedy", prompt=1)),
    (accept_with_the_noise_that_proposed, Case("gumbel", prompt=1, k=1, seeded=False)),
]


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_mutant_fails(
    mutant: Verification,
    case: Case,
    laws: list[Law],
    target: Target,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "rejection_sample", mutant)
    law = laws[case.prompt]
    requests = MORE_REQUESTS if case.k == 1 else REQUESTS
    with serve_verifier(target, case.config(), [drafters[case.head]]) as address:
        samples = sample(address, law.prompt, case.seeds(requests), max_tokens=LENGTH)
    ratio = law.refutation([one.tokens for one in samples], case.sampling)
    print(f"{ratio:.1f}")
    assert ratio > BLOWN


def test_bad_words_without_the_drafts_before_a_row_fail(
    laws: list[Law], target: Target, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that ignore the drafts before a row let the row sample forbidden tokens."""

    def blind(logits: torch.Tensor, forbidden: Any, _: Any, layout: Any) -> torch.Tensor:
        return forbid_sequences(logits, forbidden, None, layout)

    monkeypatch.setattr(masks, "forbid_sequences", blind)
    sampling = Sampling(bad_word_ids=((1, 1), (2, 4), (0, 7), (7, 1, 0), (3, 3), (6, 6), (4, 5)))
    law, case = laws[0], Case("greedy", sampling=sampling, seeded=False)
    with serve_verifier(target, case.config(), [drafters[case.head]]) as address:
        samples = sample(address, law.prompt, case.seeds(REQUESTS), max_tokens=LENGTH, **sampling.options())
    assert law.refutation([one.tokens for one in samples], sampling) > BLOWN
