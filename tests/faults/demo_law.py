"""The exact distribution (law) of short sampled outputs of the demo target, with a small top_k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact_law import chi_square_ratio
from tokenizers import Tokenizer

from models import load_reference

TOKENS = 4
"""Length of an output: the first token comes from the prompt's step, the other tokens from verify steps."""
TOP_K = 4
ROUNDING = 2e-4
"""Scores that differ by less than this are within rounding."""


@dataclass(frozen=True)
class DemoLaw:
    """The distribution of outputs after one prompt, sampled at temperature 1 from the TOP_K most likely tokens.

    Raises
    ------
    ValueError
        If the TOP_K most likely tokens after some output are uncertain within rounding.
    """

    model: Any  # a causal language model of transformers
    prompt: Sequence[int]
    laws: list[dict[tuple[int, ...], float]] = field(init=False)
    """The probabilities of all beginnings of outputs; those of n tokens are at index n - 1."""

    def __post_init__(self) -> None:
        laws: list[dict[tuple[int, ...], float]] = []
        for _ in range(TOKENS):
            laws.append(self._next(laws[-1] if laws else {(): 1.0}))
        object.__setattr__(self, "laws", laws)

    @torch.no_grad()
    def _next(self, law: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        """Return the probabilities of the beginnings in `law`, each extended by one token."""
        rows = torch.tensor([[*self.prompt, *begin] for begin in law])
        top = self.model(rows).logits[:, -1].double().topk(TOP_K + 1)
        if float((top.values[:, -2] - top.values[:, -1]).min()) < ROUNDING:
            raise ValueError("two scores at the edge of the most likely tokens are within rounding of each other")
        chances = top.values[:, :-1].softmax(-1).tolist()
        return {
            (*begin, token): chance * own
            for (begin, chance), tokens, some in zip(law.items(), top.indices.tolist(), chances, strict=True)
            for token, own in zip(tokens, some, strict=False)
        }

    def options(self) -> dict[str, Any]:
        """Return the options of a request whose output has this distribution."""
        return {"temperature": 1.0, "top_k": TOP_K, "max_tokens": TOKENS, "ignore_eos": True}

    def refutation(self, outputs: Sequence[tuple[int, ...]]) -> float:
        """Return the maximum of chi-square / threshold over beginnings of each length; above 1 refutes the law."""
        ratios = []
        for length, law in enumerate(self.laws, 1):
            numbers = {begin: number for number, begin in enumerate(law)}
            counts = np.zeros(len(law) + 1)  # the last cell: outputs of probability 0
            for tokens in outputs:
                counts[numbers.get(tokens[:length], -1)] += 1
            ratios.append(chi_square_ratio(counts, np.array([*law.values(), 0.0])))
        return max(ratios)


def laws_after(texts: Sequence[str], target: Path) -> list[DemoLaw]:
    """Return the distribution after each text, computed with transformers' model of `target`."""
    model, tokenizer = load_reference(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    return [DemoLaw(model, tokenizer.encode(text).ids) for text in texts]
