"""The chi-square of test_exact_law is worth something: a verifier that is wrong in a known way fails it by far.

Each mutant changes, in this process, what the verifier's sampler gets from `rejection_sample`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftwire_kernels import DraftLogits, RejectionResult, StreamKeys, gumbel_sample, rejection_sample
from draftwire_kernels.reference.noise import gumbel_noise, row_state
from exact_cases import Case
from exact_law import LENGTH, Law
from exact_services import sample, serve_verifier
from torch import Tensor

from verifier_service import sampler
from verifier_service.target import Target

pytestmark = pytest.mark.xdist_group("exactness_wrong")

REQUESTS = 2500
BLOWN = 2.0
"""Times the chi-square quantile that refutes the law."""

Verification = Callable[..., RejectionResult]


def resample_with_proposal_noise(
    logits: Tensor, drafts: Tensor, cu_rows: Tensor, temperature: Tensor, keys: StreamKeys, position: Tensor, **rest: Any
) -> RejectionResult:
    keys = keys._replace(resample=keys.proposal)
    return rejection_sample(logits, drafts, cu_rows, temperature, keys, position, **rest)


def sample_p_in_place_of_the_residual(
    logits: Tensor, drafts: Tensor, cu_rows: Tensor, temperature: Tensor, keys: StreamKeys, position: Tensor, **rest: Any
) -> RejectionResult:
    result = rejection_sample(logits, drafts, cu_rows, temperature, keys, position, **rest)
    accepted = result.num_emitted.long() - 1
    last = gumbel_sample(logits[cu_rows[:-1] + accepted], temperature, keys.resample, position + accepted)
    return result._replace(tokens=result.tokens.scatter(1, accepted[:, None], last[:, None]))


def verify_with_logits_of_another_draft(*args: Any, draft_logits: DraftLogits | None, **rest: Any) -> RejectionResult:
    if draft_logits is not None:
        ids = draft_logits.token_ids
        own_ids = ids is not None and ids.ndim == 2
        draft_logits = DraftLogits(draft_logits.logits.roll(1, 0), ids.roll(1, 0) if own_ids else ids)
    return rejection_sample(*args, draft_logits=draft_logits, **rest)


def draw_the_same_noise_at_every_position(
    logits: Tensor, drafts: Tensor, cu_rows: Tensor, temperature: Tensor, keys: StreamKeys, position: Tensor, **rest: Any
) -> RejectionResult:
    return rejection_sample(logits, drafts, cu_rows, temperature, keys, torch.zeros_like(position), **rest)


def accept_with_the_noise_that_proposed(
    logits: Tensor, drafts: Tensor, cu_rows: Tensor, temperature: Tensor, keys: StreamKeys, position: Tensor, **_: Any
) -> RejectionResult:
    """The one-hot test, with the drafted token's own proposal noise turned into its uniform."""
    sizes = cu_rows.diff().tolist()
    tokens = torch.full((len(sizes), max(sizes)), -1)
    emitted = []
    start = 0
    for b, size in enumerate(sizes):
        own = drafts[start - b : start - b + size - 1].tolist()
        accepted = 0
        row = logits[start]
        for offset, draft in enumerate(own):
            state = row_state(keys.proposal[b : b + 1], position[b : b + 1] + offset, offset)
            noise = gumbel_noise(state, torch.tensor([draft], dtype=torch.int32), torch.float32)
            row = logits[start + offset]
            if float((-(-noise).exp()).exp()) >= float((row / temperature[b]).softmax(-1)[draft]):
                row = row.index_fill(0, torch.tensor([draft]), -torch.inf)
                break
            accepted += 1
            row = logits[start + offset + 1]
        last = gumbel_sample(
            row[None], temperature[b : b + 1], keys.resample[b : b + 1], position[b : b + 1] + accepted
        )
        tokens[b, : accepted + 1] = torch.tensor([*own[:accepted], int(last)])
        emitted.append(accepted + 1)
        start += size
    return RejectionResult(tokens, torch.tensor(emitted, dtype=torch.int32))


MUTANTS = [
    (resample_with_proposal_noise, Case("gumbel", prompt=1)),
    (resample_with_proposal_noise, Case("dense")),
    (sample_p_in_place_of_the_residual, Case("greedy")),
    (sample_p_in_place_of_the_residual, Case("gumbel", prompt=1)),
    (sample_p_in_place_of_the_residual, Case("dense")),
    (verify_with_logits_of_another_draft, Case("dense")),
    (verify_with_logits_of_another_draft, Case("top-3")),
    (draw_the_same_noise_at_every_position, Case("gumbel", prompt=1)),
    (accept_with_the_noise_that_proposed, Case("gumbel", prompt=1)),
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
    with serve_verifier(target, case.config(), [drafters[case.head]]) as address:
        samples = sample(address, law.prompt, range(REQUESTS), max_tokens=LENGTH)
    assert len(samples) == REQUESTS
    ratio = law.refutation([one.tokens for one in samples], case.sampling)
    print(f"{ratio:.1f}")
    assert ratio > BLOWN
