"""Generates texts with the target in large batches: answers to prompts, and conversations.

All rows of a batch are at the same position, so a step is one forward pass with one token per row and without a mask.
Prompts, and the tokens between turns, are scripts: forced tokens that replace the sampled ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from training.chat import Turns
from training.target import Target

_NAME = "draftwire_lockstep"
USER_TEMPERATURE = 0.8  # of generated user turns; at 1 those of a small target are incoherent
_USER, _ANSWER, _DONE = range(3)
# Without cuDNN attention: it builds a new plan for every length, which takes longer than the step itself.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Texts(NamedTuple):
    """Generated texts of one length.

    Attributes:
        tokens: Token ids, [B, L] int64.
        own: Mask of the sampled tokens of answers, including the end token, [B, L] bool.
    """

    tokens: Tensor
    own: Tensor


class _LockstepCache:
    """Keys and values of all layers, each [B, KV heads, L, D], filled one position at a time."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Store key and value [B, KV, 1, D] and return the query's [B, H, 1, D] attention output [B, 1, H, D]."""
        if layer not in self.layers:
            shape = (*key.shape[:2], self.length)
            self.layers[layer] = (key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]))
        keys, values = self.layers[layer]
        last = self.position + 1
        first = 0 if window is None else max(0, last - window)
        keys[:, :, last - 1], values[:, :, last - 1] = key[:, :, 0], value[:, :, 0]
        # The query heads of one key-value head become rows, so that no key is copied.
        rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
        out = F.scaled_dot_product_attention(rows, keys[:, :, first:last], values[:, :, first:last], scale=scale)
        return out.flatten(1, 2)[:, None]


_cache: _LockstepCache | None = None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if _cache is None or attention_mask is not None:
        raise RuntimeError("the lock-step attention must run without a mask, inside `_writing`")
    layer: Any = module.layer_idx
    return _cache.attend(layer, query, key, value, scaling, sliding_window), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def _writing(target: Target, length: int) -> Iterator[_LockstepCache]:
    """Let the target's forward passes use one lock-step cache inside the context."""
    global _cache
    _cache = _LockstepCache(length)
    usual = target.model.config._attn_implementation
    target.model.set_attn_implementation(_NAME)
    try:
        with sdpa_kernel(_BACKENDS):
            yield _cache
    finally:
        target.model.set_attn_implementation(usual)
        _cache = None


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Return samples [B] from logits [B, V] at each row's temperature [B, 1]; argmax at temperature 0.

    argmax(logits / T + Gumbel noise) equals argmax(logits + T * noise), which also covers T = 0.
    """
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator).clamp_min_(1e-20).log_()
    return noise.mul_(-temperatures).add_(logits).argmax(-1)


class _Script:
    """Forced tokens of each row: an index into one flat list, in which -1 ends each sequence."""

    def __init__(self, prompts: list[list[int]], turns: Turns | None, device: torch.device) -> None:
        flat: list[int] = [-1]
        starts = []
        for prompt in [*prompts, *([turns.before_answer[1:], turns.before_next[1:]] if turns else [])]:
            starts.append(len(flat))
            flat += [*prompt, -1]
        self.flat = torch.tensor(flat, device=device)
        self.place = torch.tensor(starts[: len(prompts)], device=device)
        self.to_answer, self.to_user = starts[len(prompts) :] if turns else (0, 0)

    def next(self) -> Tensor:
        """Return the forced tokens [B] of this step; -1 for rows without one."""
        forced = self.flat[self.place]
        self.place += (forced >= 0).long()
        return forced


@torch.no_grad()
def write(
    target: Target,
    prompts: list[list[int]],
    temperatures: list[float],
    length: int,
    seed: int,
    *,
    end: int,
    turns: Turns | None = None,
) -> Texts:
    """Return texts of `length` tokens that start with the prompts.

    Args:
        target: The target, which generates the texts.
        prompts: Token ids of each row's prompt.
        temperatures: Temperature of each row's answers. User turns have USER_TEMPERATURE.
        length: Tokens per row, including the prompt.
        seed: Seed of the samples.
        end: Token that ends an answer. Without `turns`, `own` excludes the tokens after it.
        turns: If set, prompts end within a user turn, which the target continues; answers and further user turns
            follow up to `length`.
    """
    device = target.device
    script = _Script(prompts, turns, device)
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.zeros(len(prompts), length, dtype=torch.long, device=device)
    own = torch.zeros(len(prompts), length, dtype=torch.bool, device=device)
    role = torch.full((len(prompts),), _ANSWER if turns is None else _USER, device=device)
    warmth = torch.tensor(temperatures, device=device)
    with _writing(target, length) as cache:
        tokens[:, 0] = script.next()
        for position in range(length - 1):
            cache.position = position
            places = torch.full((1, 1), position, device=device)
            logits = target.model(tokens[:, position, None], position_ids=places, use_cache=False).logits[:, -1]
            heat = torch.where(role == _USER, USER_TEMPERATURE, warmth)[:, None]
            forced, sampled = script.next(), draw(logits, heat, generator)
            free = forced < 0
            chosen = torch.where(free, sampled, forced)
            tokens[:, position + 1] = chosen
            answering = free & (role == _ANSWER)
            own[:, position + 1] = answering
            answered = answering & (chosen == end)
            if turns is None:
                role = torch.where(answered, _DONE, role)
                continue
            asked = free & (role == _USER) & (chosen == turns.before_answer[0])
            script.place = torch.where(asked, script.to_answer, torch.where(answered, script.to_user, script.place))
            role = torch.where(asked, _ANSWER, torch.where(answered, _USER, role))
    return Texts(tokens, own)
