"""Allowed tokens and forbidden sequences of `process_logits`, against plain Python and transformers."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from draftwire_kernels import AllowedTokens, ForbiddenSequences, LogitsSampling, process_logits

VOCAB, LONGEST = 7, 4
ANY_TOKEN, NO_TOKEN = -2, -1
Words = list[list[int]]


def tables(words: list[Words], outputs: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of requests, given their forbidden sequences and outputs so far."""
    count, length = max(map(len, words)), LONGEST - 1
    last = torch.zeros(len(words), count, dtype=torch.int64)
    before = torch.full((len(words), count, length), ANY_TOKEN)
    tail = torch.full((len(words), length), NO_TOKEN)
    for request, (own, output) in enumerate(zip(words, outputs, strict=True)):
        for place in range(count):
            word = own[place % len(own)]
            last[request, place] = word[-1]
            if len(word) > 1:
                before[request, place, 1 - len(word) :] = torch.tensor(word[:-1])
        if output:
            kept = output[-length:]
            tail[request, length - len(kept) :] = torch.tensor(kept)
    return last, before, tail


def forbidden_after(output: list[int], words: Words) -> set[int]:
    """Return the tokens that would complete a forbidden sequence, by definition."""
    return {
        word[-1] for word in words if len(word) == 1 or output[len(output) + 1 - len(word) :] == word[:-1]
        if len(output) >= len(word) - 1
    }


def masked(row: Tensor) -> set[int]:
    return set((row == -torch.inf).nonzero()[:, 0].tolist())


def draw_batch(seed: int) -> tuple[list[Words], list[list[int]], list[list[int]]]:
    """Return sequences, outputs and drafts of five requests, over three tokens so that sequences match often."""
    draw = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> list[int]:
        return draw.integers(0, 3, draw.integers(least, most + 1)).tolist()

    words = [[tokens(1, LONGEST) for _ in range(draw.integers(1, 6))] for _ in range(5)]
    return words, [tokens(0, 6) for _ in words], [tokens(0, 4) for _ in words]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_rows_count_the_drafts_before_them_as_output(seed: int, dtype: torch.dtype) -> None:
    words, outputs, drafts = draw_batch(seed)
    sizes = [len(own) + 1 for own in drafts]
    logits = torch.randn(sum(sizes), VOCAB, generator=torch.Generator().manual_seed(seed)).to(dtype)
    slots = torch.tensor([2, -1, 0, 4, 1])
    users = [2, 4, 0, -1, 3]  # the request of each slot; slot 3 is unused
    own_words = [words[user] for user in users]
    last, before, tail = tables(own_words, [outputs[user] for user in users])
    sampling = LogitsSampling(
        cu_rows=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32),
        temperature=torch.zeros(len(sizes)),
        draft_tokens=torch.tensor([token for own in drafts for token in own], dtype=torch.int64),
        forbidden=ForbiddenSequences(slots, last, before, tail),
    )
    kept = logits.clone()
    out = process_logits(logits, sampling)
    assert torch.equal(logits, kept)
    row = 0
    for request, own in enumerate(drafts):
        for j in range(len(own) + 1):
            expected = set() if slots[request] < 0 else forbidden_after(outputs[request] + own[:j], words[request])
            assert masked(out[row]) == expected, (request, j)
            left = sorted(set(range(VOCAB)) - expected)
            assert torch.equal(out[row, left], logits[row, left])
            row += 1


@pytest.mark.parametrize("seed", range(20))
def test_forbidden_tokens_are_those_of_transformers(seed: int) -> None:
    """Tokens match `NoBadWordsLogitsProcessor` over the output. Some versions need outputs longer than each word."""
    words, outputs, _ = draw_batch(seed)
    outputs = [[5] * VOCAB + output for output in outputs]
    logits = torch.randn(len(words), VOCAB, generator=torch.Generator().manual_seed(seed))
    last, before, tail = tables(words, outputs)
    sampling = LogitsSampling(
        cu_rows=torch.arange(len(words) + 1, dtype=torch.int32),
        temperature=torch.zeros(len(words)),
        forbidden=ForbiddenSequences(torch.arange(len(words)), last, before, tail),
    )
    out = process_logits(logits, sampling)
    for request, (own, output) in enumerate(zip(words, outputs, strict=True)):
        theirs = NoBadWordsLogitsProcessor(own)(torch.tensor([output]), logits[request : request + 1])
        assert masked(out[request]) == masked(theirs[0])


def test_only_allowed_tokens_are_left() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(2, VOCAB, dtype=torch.bool)
    mask[1, [1, 6]] = True
    sampling = LogitsSampling(
        cu_rows=torch.tensor([0, 1, 4], dtype=torch.int32),
        temperature=torch.ones(2),
        allowed=AllowedTokens(torch.tensor([-1, 1]), mask),
    )
    out = process_logits(logits, sampling)
    assert torch.equal(out[0], logits[0])
    for row in (1, 2, 3):
        assert masked(out[row]) == {0, 2, 3, 4, 5}
        assert torch.equal(out[row, [1, 6]], logits[row, [1, 6]])


def test_drafts_are_required_with_forbidden_sequences() -> None:
    last, before, tail = tables([[[1, 2]]], [[]])
    sampling = LogitsSampling(
        cu_rows=torch.tensor([0, 2], dtype=torch.int32),
        temperature=torch.ones(1),
        forbidden=ForbiddenSequences(torch.zeros(1, dtype=torch.int64), last, before, tail),
    )
    with pytest.raises(ValueError, match="draft_tokens: got None with forbidden"):
        process_logits(torch.zeros(2, VOCAB), sampling)
