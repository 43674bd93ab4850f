"""Projections merged after load: which are merged, with unchanged results and no weight kept twice."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tiny_targets import random_model
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from verifier_service.target import merged_linears as target_projections
from verifier_service.target.merged_linears import MergedProjection, find_projections, merge_projections

NUM_LAYERS = 2
COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "llama_bias": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    "gemma2": Gemma2Config(**COMMON),
    "gemma3_text": Gemma3TextConfig(**COMMON),
}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
IDS = torch.arange(1, 24)[None]


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_model_computes_what_the_model_did(name):
    model = random_model(CONFIGS[name])
    expected = logits_of(model)
    groups = find_projections(model, lambda: logits_of(model))
    assert [group.names for group in groups] == [QKV, GATE_UP] * NUM_LAYERS
    merge_projections(groups)
    assert sum(isinstance(module, MergedProjection) for module in model.modules()) == 2 * NUM_LAYERS
    for _ in range(2):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)


def test_no_weight_is_kept_twice(monkeypatch):
    model = random_model(CONFIGS["qwen2"])
    groups = find_projections(model, lambda: logits_of(model))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = [[weakref.ref(linear.weight) for linear in group.linears] for group in groups]
    alive = []

    class Watched(MergedProjection):
        def __init__(self, linears: Any) -> None:
            alive.append([any(ref() is not None for ref in refs) for refs in weights])
            super().__init__(linears)

    monkeypatch.setattr(target_projections, "MergedProjection", Watched)
    merge_projections(groups)
    # While a group is merged, the weights of earlier groups are freed.
    assert alive == [[False] * done + [True] * (len(groups) - done) for done in range(len(groups))]
    assert all(ref() is None for refs in weights for ref in refs)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


class Mixed(nn.Module):
    """Layers of which only a and b can be merged."""

    def __init__(self, **replaced: nn.Module) -> None:
        super().__init__()
        for name in "abcde":
            setattr(self, name, nn.Linear(4, 3))
        for name, module in replaced.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        other = x + 1
        return self.a(x) + self.b(x) + self.c(other) + self.e(x) + self.d(other) + self.d(x)


class LinearOfSomeone(nn.Linear):
    """A subclass, which may compute something else."""


def with_hook() -> nn.Linear:
    linear = nn.Linear(4, 3)
    linear.register_forward_pre_hook(lambda _module, args: args)
    return linear


@pytest.mark.parametrize(
    ("replaced", "found"),
    [
        ({}, [("a", "b")]),
        ({"b": nn.Linear(4, 3, bias=False)}, []),
        ({"b": LinearOfSomeone(4, 3)}, []),
        ({"b": with_hook()}, []),
    ],
    ids=["two of one input", "bias of one alone", "a class of its own", "a hook"],
)
def test_only_plain_sequential_layers_on_one_tensor_are_merged(replaced, found):
    module = Mixed(**replaced)
    x = torch.randn(2, 4)
    expected = module(x)
    groups = find_projections(module, lambda: module(x))
    assert [group.names for group in groups] == found
    merge_projections(groups)
    torch.testing.assert_close(module(x), expected)
