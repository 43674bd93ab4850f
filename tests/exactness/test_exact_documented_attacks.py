"""The attacks of a hostile drafter that SECURITY.md documents succeed, so SECURITY.md must name them."""

from __future__ import annotations

import pytest
import torch

from draftwire_kernels import DraftLogits, StreamKeys, gumbel_sample, rejection_sample
from draftwire_kernels.reference.noise import gumbel_noise, row_state

VOCAB, REQUESTS = 8, 4000
WANTED = 3
TARGET = torch.linspace(1.0, -1.0, VOCAB)
P_WANTED = float(TARGET.softmax(-1)[WANTED])
TEMPERATURE = torch.ones(REQUESTS)
POSITION = torch.full((REQUESTS,), 5)


@pytest.fixture
def keys() -> StreamKeys:
    draw = torch.Generator().manual_seed(1)
    return StreamKeys(*(torch.randint(-(2**62), 2**62, (REQUESTS,), generator=draw) for _ in range(3)))


def first_tokens(
    drafted: torch.Tensor, keys: StreamKeys, draft_logits: DraftLogits | None = None, method: str = "standard"
) -> torch.Tensor:
    """Return the first tokens of requests that draft the wanted token, or nothing: [B] int64."""
    num_rows = 1 + drafted.int()
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int32), num_rows.cumsum(0).int()])
    drafts = torch.full((int(drafted.sum()),), WANTED)
    logits = TARGET.expand(int(cu_rows[-1]), VOCAB).contiguous()
    found = rejection_sample(
        logits, drafts, cu_rows, TEMPERATURE, keys, POSITION, draft_logits=draft_logits, method=method
    )
    return found.tokens[:, 0]


def share(tokens: torch.Tensor) -> float:
    return float((tokens == WANTED).float().mean())


def test_draft_logits_chosen_by_the_noise_bias_the_output(keys: StreamKeys) -> None:
    noise = gumbel_noise(row_state(keys.proposal, POSITION, 0), torch.arange(VOCAB, dtype=torch.int32), torch.float32)
    honest, chosen = torch.zeros(REQUESTS, VOCAB), -noise
    chosen[:, WANTED] += 0.1
    assert bool((gumbel_sample(chosen, TEMPERATURE, keys.proposal, POSITION) == WANTED).all())  # any re-draw agrees
    assert 0.05 < share(gumbel_sample(honest, TEMPERATURE, keys.proposal, POSITION)) < 0.2
    everyone = torch.ones(REQUESTS, dtype=torch.bool)
    assert share(first_tokens(everyone, keys, DraftLogits(chosen, None))) > 3 * P_WANTED


def test_noise_used_twice_tells_which_drafts_will_be_accepted(keys: StreamKeys) -> None:
    """A seed, which may be used twice, therefore selects "coupled", where drafts do not affect the output."""
    first = first_tokens(torch.ones(REQUESTS, dtype=torch.bool), keys)
    assert share(first) == pytest.approx(P_WANTED, abs=0.03)
    assert share(first_tokens(first == WANTED, keys)) > 1.5 * P_WANTED
    coupled = first_tokens(torch.ones(REQUESTS, dtype=torch.bool), keys, method="coupled")
    assert share(coupled) == pytest.approx(P_WANTED, abs=0.03)
    assert torch.equal(first_tokens(coupled == WANTED, keys, method="coupled"), coupled)
