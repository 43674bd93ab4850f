"""Small targets with random weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from verifier_service.target import attention_hook
from verifier_service.target.target import Target

VOCAB, CONTEXT = 20, 64


def tiny_model(num_layers: int, hidden_size: int, attention: str = attention_hook.NAME) -> Any:
    """Return a Llama of transformers with 20 tokens and 64 positions, equal at each call."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.7,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def tiny_llama(num_layers: int, hidden_size: int, end_tokens: Collection[int] = ()) -> Target:
    """Return the model as a verifier serves it."""
    return Target(tiny_model(num_layers, hidden_size), "tiny", frozenset(end_tokens))


def random_model(config: Any) -> Any:
    """Return a model of transformers with random weights, and random biases instead of zeros."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide a wrong order, or a bias that is added twice
            torch.nn.init.normal_(parameter)
    return model
