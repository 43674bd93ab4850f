"""What the sampler draws before the first request."""

from __future__ import annotations

import pytest
import torch

from draftwire.config import speculative_config_from_mapping
from verifier_service import sampler
from verifier_service.sampler import TokenSampler

VOCAB = 20


@pytest.mark.parametrize(
    "config",
    [
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 2, "rejection_sample_method": "block"},
        {
            "num_speculative_tokens": 2,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.0,
        },
    ],
    ids=lambda config: config.get("rejection_sample_method", "standard"),
)
def test_warming_up_draws_from_batches_of_every_size_and_form(config, monkeypatch):
    forms = []

    def draw(logits, drafts, cu_rows, temperature, *args, **options):
        forms.append(cu_rows.diff().tolist())
        assert logits.shape == (sum(forms[-1]), VOCAB)
        assert logits.dtype == torch.bfloat16
        return real(logits, drafts, cu_rows, temperature, *args, **options)

    real = sampler.rejection_sample
    monkeypatch.setattr(sampler, "rejection_sample", draw)
    made = TokenSampler(speculative_config_from_mapping(config), VOCAB, frozenset(), 3, torch.device("cpu"))
    made.warm_up(torch.bfloat16)
    for expected in ([1], [3], [1, 1], [3, 3], [3, 1], [1, 1, 1], [3, 3, 3], [3, 1, 1]):
        assert expected in forms
