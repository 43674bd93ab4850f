"""The exact law of short sampled outputs of the demo target: few tokens, each of the likeliest alone."""

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
"""Length of an output: the first token comes from the prompt's step, the others from verify steps."""
TOP_K = 4
ROUNDING = 2e-4
"""Scores nearer to each other than this are within rounding."""


@dataclass(frozen=True)
class DemoLaw:
    """What follows one prompt, sampled at temperature 1 among the TOP_K most likely tokens.

    Raises
    ------
    ValueError
        When after some prefix it is within rounding which tokens those are.
    """

    model: Any  # a causal language model of transformers
    prompt: Sequence[int]
    laws: list[dict[tuple[int, ...], float]] = field(init=False)
    """The probability of every beginning of an output, by its number of tokens less one."""

    def __post_init__(self) -> None:
        laws: list[dict[tuple[int, ...], float]] = []
        for _ in range(TOKENS):
            laws.append(self._next(laws[-1] if laws else {(): 1.0}))
        object.__setattr__(self, "laws", laws)

    @torch.no_grad()
    def _next(self, law: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        """Of beginnings with a token more than those of `law`."""
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
        """Of a request that is to follow the law."""
        return {"temperature": 1.0, "top_k": TOP_K, "max_tokens": TOKENS, "ignore_eos": True}

    def refutation(self, outputs: Sequence[tuple[int, ...]]) -> float:
        """Largest chi-square over its threshold, of their beginnings of each length; above 1 refutes the law."""
        ratios = []
        for length, law in enumerate(self.laws, 1):
            numbers = {begin: number for number, begin in enumerate(law)}
            counts = np.zeros(len(law) + 1)  # the last one: what the law rules out
            for tokens in outputs:
                counts[numbers.get(tokens[:length], -1)] += 1
            ratios.append(chi_square_ratio(counts, np.array([*law.values(), 0.0])))
        return max(ratios)


def laws_after(texts: Sequence[str], target: Path) -> list[DemoLaw]:
    """The law after each text, by transformers' model of `target`."""
    model, tokenizer = load_reference(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    return [DemoLaw(model, tokenizer.encode(text).ids) for text in texts]
