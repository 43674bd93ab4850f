"""Exact counting of acceptance in one process.

The committed tokens of speculative decoding do not depend on the drafts at temperature 0, and with one-hot drafts the
standard test has the law "sample y from the target, accept iff y equals the draft" at any temperature. So the target's
continuation is drawn first, the head's chain is computed from every position of it at once, and verify steps are then
walked along it: a step after a accepted drafts emits a + 1 tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.eagle3 import Eagle3Head
from training.llama import Llama


@dataclass
class Acceptance:
    """Counts over verify steps that drafted k tokens each."""

    k: int
    continuations: int = 0
    steps: int = 0
    emitted: int = 0
    accepted: list[int] = field(default_factory=list)  # steps in which position i was accepted

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.k

    def report(self) -> dict:
        unconditional = [count / max(self.steps, 1) for count in self.accepted]
        reached = [self.steps, *self.accepted]
        return {
            "acceptance_length": round(1 + sum(unconditional), 4),
            "unconditional": [round(rate, 4) for rate in unconditional],
            "conditional": [round(a / max(b, 1), 4) for a, b in zip(self.accepted, reached, strict=False)],
            "continuations": self.continuations,
            "verify_steps": self.steps,
            "tokens": self.emitted,
        }


def walk(accepts: list[list[bool]], first: int, last: int, counts: Acceptance) -> None:
    """Counts the verify steps of one sequence.

    accepts[i][s] says whether draft s made after true row i equals the token it stands for. `first` is the index of
    the first committed token that no target row has seen; a step starts at n only while tokens n + 1 .. n + k + 1 all
    lie at or before `last`, so that no step is cut short.
    """
    counts.continuations += 1
    n = first
    while n + counts.k + 1 <= last:
        row = accepts[n - 1][: counts.k]
        taken = row.index(False) if False in row else counts.k
        counts.steps += 1
        counts.emitted += taken + 1
        for position in range(taken):
            counts.accepted[position] += 1
        n += taken + 1


@torch.no_grad()
def draft_matches(model: Llama, head: Eagle3Head, layers: list[int], tokens: Tensor, k: int) -> Tensor:
    """[B, T - 1, k] bool: does greedy draft s after true row i equal x_{i+2+s} (False past the end)."""
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


def repeated_share(tokens: list[int], n: int = 8) -> float:
    """Share of tokens that lie in an n-gram occurring more than once in the list."""
    where: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(tokens) - n + 1):
        where.setdefault(tuple(tokens[start : start + n]), []).append(start)
    repeated = {i for starts in where.values() if len(starts) > 1 for start in starts for i in range(start, start + n)}
    return len(repeated) / max(len(tokens), 1)


def count_acceptance(
    model: Llama, head: Eagle3Head, layers: list[int], tokens: Tensor, prompt: int, k: int, end: int, batch: int = 64
) -> tuple[Acceptance, Acceptance]:
    """Counts on continuations [B, T] after prompts of one length: all of them, and those that repeat little.

    A continuation ends with its first `end` token. One is left out of the second count when over 30 % of its tokens
    lie in repeated 8-grams.
    """
    everything, varied = Acceptance(k), Acceptance(k)
    for start in range(0, len(tokens), batch):
        group = tokens[start : start + batch]
        matches = draft_matches(model, head, layers, group, k).tolist()
        for sequence, accepts in zip(group.tolist(), matches, strict=True):
            new = sequence[prompt:]
            last = prompt + new.index(end) if end in new else len(sequence) - 1
            walk(accepts, prompt, last, everything)
            if repeated_share(sequence[prompt : last + 1]) <= 0.3:
                walk(accepts, prompt, last, varied)
    return everything, varied
