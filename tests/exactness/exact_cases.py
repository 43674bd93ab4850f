"""Ways to draft and verify, and the acceptance expected of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from exact_law import LENGTH, Array, Law, Sampling
from exact_pair import VOCAB
from exact_services import Sample

MAX_DEVIATIONS = 5.0
"""Largest allowed difference between a count and its expectation, in standard errors."""


@dataclass(frozen=True)
class Case:
    """One way to draft, verify and sample, with a head and a prompt."""

    drafts: str  # greedy, gumbel, dense, top-2, top-3
    head: str = "full"
    method: str = "standard"
    k: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    prompt: int = 0
    use_fp64: bool = False
    seeded: bool = True  # without draft logits a seed selects the law of "coupled"

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.sampling.options().items()]
        flags = ["fp64" * self.use_fp64, "unseeded" * (not self.seeded)]
        words = [self.method, self.drafts, self.head, f"k={self.k}", *flags, *options]
        return " ".join(filter(None, words))

    def config(self) -> dict[str, Any]:
        """Return the verifier's speculative config."""
        config: dict[str, Any] = {"num_speculative_tokens": self.k, "rejection_sample_method": self.method}
        config["draft_sample_method"] = "greedy" if self.drafts == "greedy" else "gumbel"
        if self.drafts == "dense":
            config["draft_logits"] = "dense"
        if self.drafts.startswith("top-"):
            config["draft_logits"] = {"top_n": self.top_n}
        if self.use_fp64:
            config["use_fp64_gumbel"] = True
        return config

    def seeds(self, count: int) -> Sequence[int | None]:
        """Return the seeds of `count` requests."""
        return range(count) if self.seeded else [None] * count

    @property
    def top_n(self) -> int:
        return int(self.drafts.removeprefix("top-"))

    def acceptance(self, law: Law, depth: int) -> Array:
        """Return the acceptance probability of the first draft after outputs of `depth` tokens: [VOCAB ** depth]."""
        p = law.target_rows(self.sampling, depth)
        q = law.draft_rows(self.head, self.sampling.temperature, depth)
        if self.drafts == "greedy":
            return np.take_along_axis(p, q.argmax(-1)[:, None], -1)[:, 0]
        if self.method == "coupled":
            return _coupled_acceptance(p, q)
        if self.drafts == "gumbel":
            return (p * q).sum(-1)
        if self.drafts != "dense":
            q = np.where(q >= np.sort(q)[:, [-self.top_n]], q, 0)
            q /= q.sum(-1, keepdims=True)
        return np.minimum(p, q).sum(-1)  # 1 - TV(p, q)


def _coupled_acceptance(p: Array, q: Array) -> Array:
    """Return the probability that Gumbel-max draws from p and q with the same noise agree.

    The draws are races of exponentials e_j / p_j and e_j / q_j. Token i wins both if
    e_j > e_i max(p_j / p_i, q_j / q_i) for every other j, with probability 1 / sum_j max(p_j / p_i, q_j / q_i).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
        wins = 1 / ratios.sum(-1)
    return np.where((p > 0) & (q > 0), wins, 0).sum(-1)


@dataclass(frozen=True)
class FirstDrafts:
    """Counts of the first drafts of verify steps."""

    drafted: int
    accepted: int
    expected: float  # number of accepted drafts by the closed form, given the output before each step
    variance: float

    @property
    def deviations(self) -> float:
        """Return the difference between accepted and expected drafts, in standard errors."""
        return abs(self.accepted - self.expected) / self.variance**0.5


def count_first_drafts(samples: Sequence[Sample], case: Case, law: Law) -> FirstDrafts:
    """Count over the verify steps of `samples`; a step that can emit only one token has no drafts."""
    chances = [np.empty(0)] + [case.acceptance(law, depth) for depth in range(1, LENGTH)]
    drafted, accepted, expected, variance = 0, 0, 0.0, 0.0
    for sample in samples:
        end = sample.step_sizes[0]
        for size in sample.step_sizes[1:]:
            if end + 1 < LENGTH:
                number = int(np.array(sample.tokens[:end]) @ VOCAB ** np.arange(end - 1, -1, -1))
                chance = float(chances[end][number])
                drafted += 1
                accepted += sample.accepted[end]
                expected += chance
                variance += chance * (1 - chance)
            end += size
    return FirstDrafts(drafted, accepted, expected, variance)
