"""The exact distribution (law) of a request's output, by enumeration of all outputs, and chi-square tests of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from exact_dspark import first_logits
from exact_pair import VOCAB, Pair, run_target
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

LENGTH = 6
"""Tokens of an output: the first is from the prompt's step, the rest are from verify steps."""
REFUTED = 1e-6
"""Probability below which a statistic refutes the law."""
SMALLEST_CELL = 5.0
"""Expected count below which cells are merged."""
WINDOWS = tuple((first, first + size) for size in (1, 2, 3) for first in range(LENGTH - size + 1))
"""Output positions whose joint distribution is tested: single positions, and pairs and triples of neighbours."""


@dataclass(frozen=True)
class Sampling:
    """Parameters of a request, named as in SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    def options(self) -> dict[str, Any]:
        """Return the parameters that differ from the default, as arguments of the client."""
        defaults = vars(Sampling())
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


@dataclass(frozen=True, eq=False)
class Law:
    """The outputs of one prompt. Outputs of d tokens are numbered in base VOCAB, the first token most significant."""

    pair: Pair
    prompt: tuple[int, ...]
    _laws: dict[Sampling, Array] = field(default_factory=dict)
    _targets: dict[tuple[Sampling, int], Array] = field(default_factory=dict)
    _drafts: dict[str, list[Array]] = field(default_factory=dict)

    @cached_property
    def _outputs(self) -> torch.Tensor:
        """Return every output of LENGTH - 1 tokens."""
        digits = VOCAB ** np.arange(LENGTH - 2, -1, -1)
        return torch.from_numpy(np.arange(VOCAB ** (LENGTH - 1))[:, None] // digits % VOCAB)

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and features of prompt + output, [VOCAB ** (LENGTH - 1), len(prompt) + LENGTH - 1, ...]."""
        prompts = torch.tensor(self.prompt).expand(len(self._outputs), -1)
        parts = [run_target(self.pair.target, part) for part in torch.cat([prompts, self._outputs], 1).split(4096)]
        return torch.cat([logits for logits, _ in parts]), torch.cat([features for _, features in parts])

    def _of_prefixes(self, rows: torch.Tensor, depth: int) -> Array:
        """Return the rows after each output of `depth` tokens, of `rows` [VOCAB ** (LENGTH - 1), LENGTH, ...]."""
        return rows[:: VOCAB ** (LENGTH - 1 - depth), depth].double().numpy()

    def target_rows(self, sampling: Sampling, depth: int) -> Array:
        """Return the target's distribution after each output of `depth` tokens, [VOCAB ** depth, VOCAB]."""
        if (sampling, depth) not in self._targets:
            self._targets[sampling, depth] = self._target_rows(sampling, depth)
        return self._targets[sampling, depth]

    def target_logits(self, depth: int) -> Array:
        """Return the target's logits after each output of `depth` tokens, [VOCAB ** depth, VOCAB]."""
        return self._of_prefixes(self._rows[0][:, len(self.prompt) - 1 :], depth)

    def _target_rows(self, sampling: Sampling, depth: int) -> Array:
        logits = self.target_logits(depth)
        digits = VOCAB ** np.arange(depth - 1, -1, -1)
        outputs = np.arange(VOCAB**depth)[:, None] // digits % VOCAB
        counts = (outputs[:, :, None] == np.arange(VOCAB)).sum(1)
        logits[forbidden(outputs, sampling)] = -np.inf
        return distribution(logits, sampling, np.isin(np.arange(VOCAB), self.prompt), counts)

    def draft_rows(self, head: str, temperature: float, depth: int) -> Array:
        """Return the first draft's distribution after each output of `depth` >= 1 tokens, [VOCAB ** depth, VOCAB]."""
        if head not in self._drafts:
            logits = self._dspark_logits() if head == "dspark" else self._draft_logits(head)
            self._drafts[head] = [self._of_prefixes(logits, depth) for depth in range(1, LENGTH)]
        logits = self._drafts[head][depth - 1]
        return softmax(logits / temperature)

    def _dspark_logits(self) -> torch.Tensor:
        """Return the same as `_draft_logits`, of the DSpark head."""
        head, target = self.pair.dspark, self.pair.target
        embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        tokens = torch.cat([torch.tensor(self.prompt).expand(len(self._outputs), -1), self._outputs], 1)
        parts = zip(self._rows[1].split(4096), tokens.split(4096), strict=True)
        first = len(self.prompt) - 1
        return torch.cat([first_logits(head, features, own, first, embedding, output) for features, own in parts])

    def _draft_logits(self, head: str) -> torch.Tensor:
        """Return the first draft's logits after each prefix of an output, [VOCAB ** (LENGTH - 1), LENGTH, VOCAB]."""
        model = self.pair.heads[head]
        tokens = torch.cat([torch.tensor(self.prompt).expand(len(self._outputs), -1), self._outputs], 1)[:, 1:]
        features = self._rows[1][:, :-1]
        embedding = self.pair.target.get_input_embeddings().weight
        parts = [
            model.lm_head(model.chain(some, embedding, lambda _, __, own=own: own, 1)[0])
            for some, own in zip(features.split(4096), tokens.split(4096), strict=True)
        ]
        own = torch.cat(parts)[:, len(self.prompt) - 2 :]
        logits = own.new_full((*own.shape[:2], VOCAB), -torch.inf)
        logits[..., model.draft_ids] = own
        return logits

    def law(self, sampling: Sampling) -> Array:
        """Return the probability of every output, [VOCAB] * LENGTH."""
        if sampling not in self._laws:
            law = np.ones(1)
            for depth in range(LENGTH):
                law = (law[:, None] * self.target_rows(sampling, depth)).flatten()
            self._laws[sampling] = law.reshape((VOCAB,) * LENGTH)
        return self._laws[sampling]

    def refutation(self, outputs: Sequence[Sequence[int]], sampling: Sampling) -> float:
        """Return the largest chi-square statistic over its quantile at 1 - REFUTED; above 1 refutes the law.

        There is one statistic for each window, and one for the transitions from token to token at all positions. Each
        transition is compared with the distribution after its prefix.
        """
        law = self.law(sampling)
        drawn = np.array(outputs)
        assert drawn.shape == (len(outputs), LENGTH)
        ratios = []
        for first, end in WINDOWS:
            counts = np.zeros((VOCAB,) * (end - first))
            np.add.at(counts, tuple(drawn[:, first:end].T), 1)
            others = tuple(axis for axis in range(LENGTH) if not first <= axis < end)
            ratios.append(chi_square_ratio(counts.flatten(), law.sum(others).flatten()))
        return max(*ratios, self._transitions(drawn, sampling))

    def _transitions(self, drawn: NDArray[np.int64], sampling: Sampling) -> float:
        """Return the chi-square statistic of (last token, next token) at all positions, over its quantile.

        Counts minus the expectations after each prefix are a martingale. Draws from a mixture of distributions vary
        less than draws from their mean, so the quantile is conservative.
        """
        counts, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
        for depth in range(1, LENGTH):
            numbers = drawn[:, :depth] @ VOCAB ** np.arange(depth - 1, -1, -1)
            np.add.at(counts, (drawn[:, depth - 1], drawn[:, depth]), 1)
            np.add.at(expected, drawn[:, depth - 1], self.target_rows(sampling, depth)[numbers])
        common = expected >= SMALLEST_CELL
        statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
        return float(statistic / stats.chi2.isf(REFUTED, int(common.sum())))


def chi_square_ratio(counts: Array, law: Array) -> float:
    """Return the chi-square statistic over its quantile, with rare cells merged; infinite for impossible counts."""
    if counts[law == 0].sum() > 0:
        return float("inf")
    order = np.argsort(-law)
    expected, counts = law[order] * counts.sum(), counts[order]
    common = int((expected >= SMALLEST_CELL).sum())
    # All rare cells are one cell. If that cell is rare too, it is merged with the last common cell.
    if expected[common:].sum() < SMALLEST_CELL:
        common -= 1
    expected = np.append(expected[:common], expected[common:].sum())
    counts = np.append(counts[:common], counts[common:].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(statistic / stats.chi2.isf(REFUTED, len(expected) - 1))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def forbidden(outputs: NDArray[np.int64], sampling: Sampling) -> NDArray[np.bool_]:
    """Return the tokens that are not allowed or complete a bad word after each output [N, depth]: [N, VOCAB]."""
    masked = np.zeros((len(outputs), VOCAB), bool)
    if sampling.allowed_token_ids:
        masked[:, sorted(set(range(VOCAB)) - set(sampling.allowed_token_ids))] = True
    for *before, last in sampling.bad_word_ids:
        first = outputs.shape[1] - len(before)
        if first >= 0:
            masked[:, last] |= (outputs[:, first:] == before).all(1)
    return masked


def distribution(logits: Array, sampling: Sampling, in_prompt: NDArray[np.bool_], counts: NDArray[np.int64]) -> Array:
    """Return the sampled distribution: `logits` [N, VOCAB] after penalties, temperature, min-p, top-k and top-p.

    `in_prompt` [VOCAB] marks the tokens of the prompt. `counts` [N, VOCAB] counts the tokens of the output.
    """
    x = logits.copy()
    factor = np.where(x > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    x *= np.where(in_prompt | (counts > 0), factor, 1)
    x -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    x /= sampling.temperature
    p = softmax(x)
    x[p < sampling.min_p * p.max(-1, keepdims=True)] = -np.inf
    if sampling.top_k:
        x[x < np.sort(x)[:, [-sampling.top_k]]] = -np.inf
    p = softmax(x)
    falling = -np.sort(-p)
    before = np.cumsum(falling, -1) - falling
    last = (before < sampling.top_p).sum(-1, keepdims=True) - 1
    x[p < np.take_along_axis(falling, last, -1)] = -np.inf
    return softmax(x)
