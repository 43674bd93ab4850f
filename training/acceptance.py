"""Exact counts of acceptance in one process; `draftwire bench acceptance` measures acceptance through both services.

Committed tokens follow the target's distribution for any drafts. So the target's answer is sampled first, and drafts
are computed after each of its tokens at once, conditioned on the answer's tokens. Given a committed token y, its draft
was y and was accepted with probability

- greedy drafts, one-hot test: 1 if y is the head's most likely token, else 0;
- drafts sampled from q with the standard test (2211.17192): min(p(y), q(y)) / p(y), the share of p(y) that comes from
  accepted drafts.

The answer is then divided into verify steps: a step with a accepted drafts emits a + 1 tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.dspark import DSparkHead
from training.eagle3 import Eagle3Head
from training.generate import Texts
from training.target import Target

PIECE = 4096  # drafts per comparison
ROWS = 16  # answers per forward pass of the target


class Drafts(NamedTuple):
    """The k drafts after each of N answer tokens, each field [N, k] float32.

    Attributes:
        greedy: 1 if the head's most likely token is the answer's, else 0.
        sampled: Probability, given the answer's token, that a draft sampled from the head was accepted.
        overlap: 1 - total variation, the probability that a sampled draft is accepted.
        sure: The head's confidence, its own estimate of that probability; [0, k] for heads without one.
    """

    greedy: Tensor
    sampled: Tensor
    overlap: Tensor
    sure: Tensor


@dataclass
class Acceptance:
    """Counts over verify steps that drafted k tokens each."""

    k: int
    requests: list[tuple[int, int]] = field(default_factory=list)  # (steps, tokens emitted) of each answer
    accepted: list[int] = field(default_factory=list)  # steps in which position i was accepted

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.k

    @property
    def steps(self) -> int:
        """Verify steps."""
        return sum(steps for steps, _ in self.requests)

    @property
    def length(self) -> float:
        """Tokens emitted per step."""
        return sum(emitted for _, emitted in self.requests) / max(self.steps, 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the length, a ratio of sums over independent answers."""
        squares = sum((emitted - self.length * steps) ** 2 for steps, emitted in self.requests)
        return math.sqrt(squares) / max(self.steps, 1)

    def report(self) -> dict[str, Any]:
        """Return the length and the acceptance rate of each position: of all steps, and of steps that reached it."""
        unconditional = [count / max(self.steps, 1) for count in self.accepted]
        before = [1.0, *unconditional[:-1]]
        conditional = [rate / last if last else 0.0 for rate, last in zip(unconditional, before, strict=True)]
        return {
            "acceptance_length": round(self.length, 4),
            "standard_error": round(self.standard_error, 4),
            "unconditional": [round(rate, 4) for rate in unconditional],
            "conditional": [round(rate, 4) for rate in conditional],
            "answers": len(self.requests),
            "verify_steps": self.steps,
        }


def walk(accepts: list[list[bool]], counts: Acceptance) -> list[int]:
    """Count the verify steps of one answer, and return the indices of the tokens after which they draft.

    accepts[n][s]: whether draft s after the answer's token n is accepted. Only tokens with k drafts and a bonus token
    within the answer have rows, so that every step is complete.
    """
    n, emitted = 0, 0
    visited = []
    while n < len(accepts):
        row = accepts[n][: counts.k]
        taken = row.index(False) if False in row else counts.k
        visited.append(n)
        emitted += taken + 1
        for position in range(taken):
            counts.accepted[position] += 1
        n += taken + 1
    counts.requests.append((len(visited), emitted))
    return visited


def repeated_share(tokens: list[int], n: int = 8) -> float:
    """Return the share of tokens inside n-grams that occur more than once in the list."""
    where: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(tokens) - n + 1):
        where.setdefault(tuple(tokens[start : start + n]), []).append(start)
    repeated = {i for starts in where.values() if len(starts) > 1 for start in starts for i in range(start, start + n)}
    return len(repeated) / max(len(tokens), 1)


@torch.no_grad()
def answer_drafts(target: Target, head: torch.nn.Module, entered: list[int], texts: Texts, k: int) -> Iterator[Drafts]:
    """Yield the drafts of each row of texts: one row of drafts per answer token that k + 1 more follow.

    The head's features are the inputs of the target's layers `entered`.
    """
    for first in range(0, len(texts.tokens), ROWS):
        tokens, own = texts.tokens[first : first + ROWS], texts.own[first : first + ROWS]
        features, final = target.states(tokens, entered)
        for row in range(len(tokens)):
            places = own[row].nonzero().squeeze(-1)  # an answer's tokens are contiguous
            anchors = places[: max(0, len(places) - k - 1)]
            text = _Text(tokens[row], features[row], final[row])
            if isinstance(head, Eagle3Head):
                yield _eagle3_drafts(target, head, text, anchors, k)
            elif isinstance(head, DSparkHead):
                yield _dspark_drafts(target, head, text, anchors, k)


class _Text(NamedTuple):
    tokens: Tensor  # [T]
    features: Tensor  # [T, n * hidden]
    final: Tensor  # [T, hidden]


def _eagle3_drafts(target: Target, head: Eagle3Head, text: _Text, anchors: Tensor, k: int) -> Drafts:
    rows = len(text.tokens) - 1
    padded = F.pad(text.tokens, (0, k))[None]
    with _mixed(target):
        chain = head.chain(
            text.features[None, :rows], target.embedding, lambda step, _: padded[:, 1 + step : 1 + step + rows], k
        )
    # The row before an anchor computes the drafts after that anchor.
    states = torch.stack(chain, dim=2)[0, anchors - 1]
    return _compare(target, states, None, text, anchors, torch.empty(0, k))


def _dspark_drafts(target: Target, head: DSparkHead, text: _Text, anchors: Tensor, k: int) -> Drafts:
    padded = F.pad(text.tokens, (0, head.block_size))[None]
    with _mixed(target):
        block = head.block(text.features[None], padded, anchors[None], target.embedding)
    bias = (block.latent[0, :, :k], head.markov_head.markov_w2.weight)
    sure = block.confidence[0, :, :k].float().sigmoid()
    return _compare(target, block.hidden[0, :, :k], bias, text, anchors, sure)


def _mixed(target: Target) -> torch.autocast:
    return torch.autocast(target.device.type, torch.bfloat16, enabled=target.output.dtype == torch.bfloat16)


def _compare(
    target: Target,
    states: Tensor,
    bias: tuple[Tensor, Tensor] | None,
    text: _Text,
    anchors: Tensor,
    sure: Tensor,
) -> Drafts:
    """Compare the head's distribution of each slot to the target's and to the answer's token."""
    k = states.shape[1]
    places = (anchors[:, None] + torch.arange(k, device=anchors.device)).flatten()
    written = text.tokens[places + 1]
    greedy, sampled, overlap = (torch.empty(len(places)) for _ in range(3))
    output = target.output
    for first in range(0, len(places), PIECE):
        piece = slice(first, first + PIECE)
        logits = states.flatten(0, 1)[piece].to(output.dtype) @ output.T
        if bias is not None:
            logits = logits + bias[0].flatten(0, 1)[piece].to(output.dtype) @ bias[1].to(output.dtype).T
        q = logits.float().softmax(-1)
        p = (text.final[places[piece]] @ output.T).float().softmax(-1)
        own = written[piece, None]
        greedy[piece] = (logits.argmax(-1, keepdim=True) == own).float().squeeze(-1).cpu()
        sampled[piece] = (q.gather(1, own) / p.gather(1, own)).clamp(max=1).squeeze(-1).cpu()
        overlap[piece] = (1 - (q - p).abs().sum(-1) / 2).cpu()
    count = len(anchors)
    return Drafts(greedy.view(count, k), sampled.view(count, k), overlap.view(count, k), sure.cpu())
