"""Texts that the target writes, in large batches: answers to prompts, and conversations with itself.

All rows of a batch are at the same position, so a step is one forward of one token a row with no mask. Prompts of any
length, and what stands between turns, are scripts: tokens that replace the sampled ones.
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
USER_TEMPERATURE = 0.8  # of the turns that the target writes for the user; at 1 a small target rambles
_USER, _ANSWER, _DONE = range(3)
# cuDNN attention is left out: it plans anew for every length, which costs more than the step itself.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Texts(NamedTuple):
    """Rows of one length.

    Attributes
    ----------
    tokens
        [B, L] int64.
    own
        [B, L] bool: tokens of answers, their end included, that the target sampled.
    """

    tokens: Tensor
    own: Tensor


class _LockstepCache:
    """Keys and values of all layers [B, KV heads, L, D], filled by one position at a time."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Output [B, 1, H, D] of a query [B, H, 1, D] after its key and value [B, KV, 1, D] are added."""
        if layer not in self.layers:
            shape = (*key.shape[:2], self.length)
            self.layers[layer] = (key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]))
        keys, values = self.layers[layer]
        last = self.position + 1
        first = 0 if window is None else max(0, last - window)
        keys[:, :, last - 1], values[:, :, last - 1] = key[:, :, 0], value[:, :, 0]
        # The query heads of one key-value head stand behind each other as rows, so that no key is copied.
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
        raise RuntimeError("the lock-step attention runs without a mask, inside `_writing`")
    layer: Any = module.layer_idx
    return _cache.attend(layer, query, key, value, scaling, sliding_window), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def _writing(target: Target, length: int) -> Iterator[_LockstepCache]:
    """Within it, the target's forward passes go through one lock-step cache."""
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
    """Samples [B] of logits [B, V] at each row's temperature [B, 1]; argmax at temperature 0.

    argmax(logits / T + Gumbel noise) is argmax(logits + T * noise), which holds for T = 0 too.
    """
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator).clamp_min_(1e-20).log_()
    return noise.mul_(-temperatures).add_(logits).argmax(-1)


class _Script:
    """Forced tokens of each row: places in one flat list, in which -1 ends each sequence."""

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
        """Forced tokens [B] of this step; -1 where there is none."""
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
    """Return rows of `length` tokens that begin with the prompts.

    Parameters
    ----------
    temperatures
        Of the answers of each row. User turns have USER_TEMPERATURE.
    end
        Token that ends an answer. What follows without `turns` is not the target's own.
    turns
        Prompts end within a user turn; the target goes on, answers, and writes further user turns up to `length`.
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
