"""Counts of acceptance, and their exact counting in one process; `training/system.py` takes them from the real system.

The committed tokens of speculative decoding do not depend on the drafts at temperature 0, and with one-hot drafts the
standard test has the law "sample y from the target, accept iff y equals the draft" at any temperature. So the target's
continuation is drawn first, the head's chain is computed from every position of it at once, and verify steps are then
walked along it: a step after a accepted drafts emits a + 1 tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftwire.client import Statistics
from training.eagle3 import Eagle3Head
from training.llama import Llama


@dataclass
class Acceptance:
    """Counts over verify steps that drafted up to k tokens each."""

    k: int
    requests: list[tuple[int, int]] = field(default_factory=list)  # (steps, tokens emitted) of each continuation
    drafted: list[int] = field(default_factory=list)  # steps that drafted a token at position i
    accepted: list[int] = field(default_factory=list)  # steps in which position i was accepted

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.k
        self.accepted = self.accepted or [0] * self.k

    @property
    def steps(self) -> int:
        return sum(steps for steps, _ in self.requests)

    @property
    def emitted(self) -> int:
        return sum(emitted for _, emitted in self.requests)

    @property
    def length(self) -> float:
        """Tokens emitted per step."""
        return self.emitted / max(self.steps, 1)

    @property
    def standard_error(self) -> float:
        """Of the length, as a ratio of sums over independent continuations."""
        length = self.length
        squares = sum((emitted - length * steps) ** 2 for steps, emitted in self.requests)
        return math.sqrt(squares) / max(self.steps, 1)

    def add(self, statistics: Statistics) -> None:
        """Adds what a verifier counted over one request."""
        self.requests.append((statistics.verify_steps, statistics.verify_tokens))
        for position, (drafted, accepted) in enumerate(zip(statistics.drafted, statistics.accepted, strict=True)):
            self.drafted[position] += drafted
            self.accepted[position] += accepted

    def report(self) -> dict[str, Any]:
        """The length, and the acceptance at each position, first position first.

        Unconditional: accepted over drafted there. Conditional: that over the same of the position before. When all
        steps draft k tokens this is the share of the steps that got so far; steps that draft fewer are taken to be
        like the rest, so that on few steps it can pass 1.
        """
        unconditional = [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]
        before = [1.0, *unconditional[:-1]]
        conditional = [rate / last if last else 0.0 for rate, last in zip(unconditional, before, strict=True)]
        return {
            "acceptance_length": round(self.length, 4),
            "standard_error": round(self.standard_error, 4),
            "unconditional": [round(rate, 4) for rate in unconditional],
            "conditional": [round(rate, 4) for rate in conditional],
            "continuations": len(self.requests),
            "verify_steps": self.steps,
            "tokens": self.emitted,
        }


def walk(accepts: list[list[bool]], first: int, last: int, counts: Acceptance) -> None:
    """Counts the verify steps of one sequence.

    accepts[i][s] says whether draft s made after accepted row i equals the token it stands for. `first` is the index of
    the first committed token that no target row has seen; a step starts at n only while tokens n + 1 .. n + k + 1 all
    lie at or before `last`, so that no step is cut short.
    """
    n, steps, emitted = first, 0, 0
    while n + counts.k + 1 <= last:
        row = accepts[n - 1][: counts.k]
        taken = row.index(False) if False in row else counts.k
        steps += 1
        emitted += taken + 1
        counts.drafted = [count + 1 for count in counts.drafted]
        for position in range(taken):
            counts.accepted[position] += 1
        n += taken + 1
    counts.requests.append((steps, emitted))


@torch.no_grad()
def draft_matches(model: Llama, head: Eagle3Head, layers: list[int], tokens: Tensor, k: int) -> Tensor:
    """[B, T - 1, k] bool: does greedy draft s after accepted row i equal x_{i+2+s} (False past the end)."""
    states = model.states(tokens[:, :-1])
    features = torch.cat([states[layer] for layer in layers], dim=-1)
    ids = head.draft_ids
    first = tokens[:, 1:]

    def drafted(step: int, logits: Tensor) -> Tensor:
        return first if step == 0 else ids[logits.argmax(-1)]

    chain = head.chain(features, model.model.embed_tokens.weight, drafted, k)
    matches = torch.zeros(*first.shape, k, dtype=torch.bool, device=tokens.device)
    for step, logits in enumerate(chain):
        wanted = tokens[:, 2 + step :]
        matches[:, : wanted.shape[1], step] = ids[logits[:, : wanted.shape[1]].argmax(-1)] == wanted
    return matches


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of tokens that lie in an n-gram occurring more than once in the list."""
    where: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(tokens) - n + 1):
        where.setdefault(tuple(tokens[start : start + n]), []).append(start)
    repeated = {i for starts in where.values() if len(starts) > 1 for start in starts for i in range(start, start + n)}
    return len(repeated) / max(len(tokens), 1)


def repeats_little(tokens: Sequence[int]) -> bool:
    """Whether at most 30 % of the tokens lie in repeated 8-grams."""
    return repeated_share(tokens) <= 0.3


def count_acceptance(
    model: Llama, head: Eagle3Head, layers: list[int], tokens: Tensor, prompt: int, k: int, end: int, batch: int = 64
) -> tuple[Acceptance, Acceptance]:
    """Counts on continuations [B, T] after prompts of one length: all of them, and those that repeat little.

    A continuation ends with its first `end` token.
    """
    everything, varied = Acceptance(k), Acceptance(k)
    for start in range(0, len(tokens), batch):
        group = tokens[start : start + batch]
        matches = draft_matches(model, head, layers, group, k).tolist()
        for sequence, accepts in zip(group.tolist(), matches, strict=True):
            new = sequence[prompt:]
            last = prompt + new.index(end) if end in new else len(sequence) - 1
            walk(accepts, prompt, last, everything)
            if repeats_little(sequence[prompt : last + 1]):
                walk(accepts, prompt, last, varied)
    return everything, varied
