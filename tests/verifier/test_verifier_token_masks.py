"""Allowed tokens and bad words of requests: what is drawn beside drafts, in any order of steps, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafting_scene import make_request
from test_verifier_logits_processor import K, code_run, drawn, sampler, works_of

from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.sampling.sampler import TokenSampler

VOCAB = 2048


def falling(*tokens: int) -> torch.Tensor:
    """[V] logits: `tokens` from the most likely down, then the rest."""
    logits = torch.zeros(VOCAB)
    for place, token in enumerate(tokens):
        logits[token] = len(tokens) - place
    return logits


def test_only_allowed_tokens_are_drawn() -> None:
    made = sampler()
    requests = [make_request([5], keys=0, allowed_token_ids=[9, 3]), make_request([5], keys=10)]
    assert drawn(made, requests, falling(7, 3, 9)) == [[3, 3, 3], [7]]
    made.forget(requests[0])
    assert drawn(made, [make_request([5], keys=20, allowed_token_ids=[9])], falling(7, 3, 9)) == [[9]]


def test_bad_words_follow_the_drafts_of_a_row() -> None:
    """Row 0 has no output, so 3 may be drawn; after the draft 3 it would be the word 3 3."""
    made = sampler()
    request = make_request([3], keys=0, bad_word_ids=[[3, 3], [8]])
    assert drawn(made, [request], falling(8, 3, 4)) == [[3, 4]]  # the prompt's 3 does not count
    request.tokens += [3, 4]
    assert drawn(made, [request], falling(8, 3, 4)) == [[3, 4]]
    request.tokens += [3, 4]
    assert drawn(made, [request], falling(8, 3, 4), []) == [[3]]
    request.tokens.append(3)
    assert drawn(made, [request], falling(8, 3, 4)) == [[4]]


def test_a_preempted_request_keeps_its_output_in_mind() -> None:
    made = sampler()
    request = make_request([5], keys=0, bad_word_ids=[[3, 4, 6]])
    request.tokens += [3, 4]
    assert drawn(made, [request], falling(6, 7), []) == [[7]]
    made.forget(request)
    assert drawn(made, [request], falling(6, 7), []) == [[7]]


def test_bad_words_see_a_draw_that_the_host_does_not_know() -> None:
    """A step follows another whose tokens have not reached the host."""
    made = sampler()
    request = make_request([5], keys=0, bad_word_ids=[[3, 3]])
    first = made.launch(works_of([request], []), falling(3, 4)[None])
    behind = ScheduledRows(request, len(request.tokens), [0], None, samples=True, follows=0)
    second = made.launch([behind], falling(3, 4)[None])
    assert [made.finish(output)[0].tokens for output in (first, second)] == [[3], [4]]


def plain_greedy(row: torch.Tensor, count: int, allowed: Sequence[int], words: Sequence[Sequence[int]]) -> list[int]:
    """Greedy output of a target whose every row has the same logits, by the definition of the masks."""
    output: list[int] = []
    for _ in range(count):
        for token in row.argsort(descending=True).tolist():
            extended = [*output, token]
            if (not allowed or token in allowed) and all(extended[-len(word) :] != list(word) for word in words):
                output = extended
                break
    return output


@pytest.mark.parametrize("drafts", [(), (3, 3), (4, 3), (9, 4)], ids=str)
def test_greedy_output_is_the_plain_one_with_any_drafts(drafts: tuple[int, ...]) -> None:
    words = [[3, 3], [4], [3, 9, 3], [9, 9]]
    allowed = [3, 4, 9, 12]
    request = make_request([3, 9], keys=0, allowed_token_ids=allowed, bad_word_ids=words, max_tokens=40)
    made, row = sampler(), falling(7, 3, 4, 9, 12)
    while request.num_output < 30:
        request.tokens += drawn(made, [request], row, drafts)[0]
    assert request.tokens[2:32] == plain_greedy(row, 30, allowed, words)


def mixed(count: int, **options: Any) -> tuple[TokenSampler, list[Request]]:
    return sampler(), [make_request([5, 6], keys=10 * i, **options) for i in range(count)]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"allowed_token_ids": [3]}, {"allowed_token_ids": list(range(VOCAB))}),
        ({"bad_word_ids": [[3, 3]]}, {"bad_word_ids": [[3] * 16] * 128}),
    ],
    ids=["allowed", "bad words"],
)
def test_a_step_costs_the_same_however_long_a_list(short: dict[str, Any], long: dict[str, Any]) -> None:
    instructions = []
    for options in (short, long):
        made, requests = mixed(8, **options)
        works, logits = works_of(requests), torch.zeros(8 * (K + 1), VOCAB)
        made.finish(made.launch(works, logits))  # reads the parameters
        instructions.append(code_run(lambda made=made, works=works, logits=logits: made.launch(works, logits)))
    assert instructions[0] > 1000  # they were counted
    assert instructions[1] <= 1.1 * instructions[0]
