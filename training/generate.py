"""The target's own continuations, in large batches with a KV cache."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.llama import Layer, Llama


def pick(logits: Tensor, temperature: float) -> Tensor:
    """Argmax at temperature 0, else a Gumbel-max sample; logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_min(1e-20)
    return ((logits.float() / temperature).softmax(-1) / noise).argmax(-1)


# cuDNN attention is left out: it plans anew for every length, which costs more than the step itself.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.no_grad()
@sdpa_kernel(BACKENDS)
def continuations(model: Llama, prompts: Tensor, new_tokens: int, temperature: float) -> Tensor:
    """Prompts [B, P] of one length and their continuations, [B, P + new_tokens]; files may end within them."""
    shape = model.shape
    batch, prompt = prompts.shape
    weight = model.model.embed_tokens.weight
    size = (batch, shape.num_key_value_heads, prompt + new_tokens, shape.head_dim)
    caches = [(weight.new_empty(size), weight.new_empty(size)) for _ in model.model.layers]
    tokens = torch.empty(batch, prompt + new_tokens, dtype=torch.long, device=prompts.device)
    tokens[:, :prompt] = prompts
    start = 0
    for end in range(prompt, prompt + new_tokens):
        x = model.model.embed_tokens(tokens[:, start:end])
        for layer, cache in zip(cast(Iterable[Layer], model.model.layers), caches, strict=True):
            x = layer.extend(x, model.cos[start:end], model.sin[start:end], cache, start)
        tokens[:, end] = pick(model.logits_of(x[:, -1]), temperature)
        start = end
    return tokens
