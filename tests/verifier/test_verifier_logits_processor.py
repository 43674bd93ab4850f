"""Token lists in requests: their effect on sampled tokens, with and without drafts, and their cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from drafting_scene import make_request

from draftwire.contract.validation import speculative_config_from_mapping
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.sampling.sampler import TokenSampler

VOCAB, K, MANY = 2048, 2, 60
CPU = torch.device("cpu")
# Lists of the maximum length.
LISTS = {
    "logit_bias": {token: (token % 7 - 3) / 4 for token in range(0, VOCAB, 2)},
    "stop_token_ids": list(range(1, 257, 2)),
}
ENDS: dict[str, Any] = {"min_tokens": 50, "stop_token_ids": [9]}


def falling(*tokens: int) -> torch.Tensor:
    """Return logits [V]: `tokens` from the most likely down, then the rest."""
    logits = torch.zeros(VOCAB)
    for place, token in enumerate(tokens):
        logits[token] = len(tokens) - place
    return logits


def sampler(max_num_seqs: int = MANY + 1) -> TokenSampler:
    settings = speculative_config_from_mapping({"num_speculative_tokens": K})
    return TokenSampler(settings, VOCAB, frozenset([0]), max_num_seqs, CPU)


def works_of(requests: Sequence[Request], drafts: Sequence[int] = (3,) * K) -> list[ScheduledRows]:
    works = []
    for request in requests:
        request.num_computed = len(request.tokens) - 1
        ready = ReadyDrafts(request.num_computed, request.tokens[-1], list(drafts)) if drafts else None
        works.append(ScheduledRows(request, request.num_computed, [request.tokens[-1], *drafts], ready, samples=True))
    return works


def drawn(
    made: TokenSampler, requests: Sequence[Request], logits: torch.Tensor, drafts: Sequence[int] = (3,) * K
) -> list[list[int]]:
    """Return the tokens drawn for each request; every row has these logits [V]."""
    works = works_of(requests, drafts)
    rows = sum(work.num_logit_rows for work in works)
    return [one.tokens for one in made.finish(made.launch(works, logits.expand(rows, -1).clone()))]


def code_run(call: Callable[[], object]) -> int:
    """Return the number of Python instructions that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    # Since Python 3.12, opcodes are traced only if a frame requests it before tracing begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({**ENDS, "logit_bias": {4: 1.0}}, {**ENDS, "logit_bias": LISTS["logit_bias"]}),
        (ENDS, {**ENDS, "stop_token_ids": LISTS["stop_token_ids"]}),
        ({"allowed_token_ids": [3]}, {"allowed_token_ids": list(range(VOCAB))}),
        ({"bad_word_ids": [[3, 3]]}, {"bad_word_ids": [[3] * 16] * 128}),
    ],
    ids=["logit_bias", "stop_token_ids", "allowed", "bad words"],
)
def test_a_step_costs_the_same_however_long_a_list(short: dict[str, Any], long: dict[str, Any]) -> None:
    instructions = []
    for options in (short, long):
        requests = [make_request([5, 6], keys=10 * i, **options) for i in range(8)]
        made, works, logits = sampler(), works_of(requests), torch.zeros(8 * (K + 1), VOCAB)
        made.finish(made.launch(works, logits))  # reads the parameters
        instructions.append(code_run(lambda made=made, works=works, logits=logits: made.launch(works, logits)))
    assert instructions[0] > 1000  # instructions were counted
    assert instructions[1] <= 1.1 * instructions[0]


def test_a_bias_list_moves_the_draw_of_its_own_request() -> None:
    made = sampler()
    logits = falling(3)
    requests = [
        make_request([5], keys=0, logit_bias={7: 2.0}),
        make_request([5], keys=10),
        make_request([5], keys=20, logit_bias={**dict.fromkeys(range(100, 1000), 2.0), 8: 9.0}),
        make_request([5], keys=30, logit_bias={3: -5.0, 0: 4.0}),
    ]
    assert drawn(made, requests, logits) == [[7], [3] * (K + 1), [8], [0]]
    made.forget(requests[2])
    others = [make_request([5], keys=40, logit_bias={9: 3.0}), requests[0], make_request([5], keys=50)]
    assert drawn(made, others, logits) == [[9], [7], [3] * (K + 1)]  # nothing remains of the earlier request
    assert drawn(made, requests, logits) == [[7], [3] * (K + 1), [8], [0]]


def test_end_tokens_are_not_drawn_before_min_tokens() -> None:
    made = sampler()
    logits = falling(0, 9, 3)
    requests = [
        make_request([5], keys=0, min_tokens=2, stop_token_ids=[9]),
        make_request([5], keys=10, min_tokens=1),
        make_request([5], keys=20),
    ]
    assert drawn(made, requests, logits) == [[3, 3, 0], [9], [0]]
    requests[0].tokens.append(3)
    assert drawn(made, requests[:1], logits) == [[3, 0]]
    requests[0].tokens.append(3)
    assert drawn(made, requests[:1], logits) == [[0]]


def test_every_request_may_have_lists_of_the_longest_kind() -> None:
    made, requests = sampler(), [make_request([5], keys=10 * i, min_tokens=9, **LISTS) for i in range(MANY)]
    logits = 4 * falling(1, 2)  # 1 is a stop token, 2 is biased by less than 1
    assert drawn(made, requests, logits, []) == [[2]] * MANY


def test_only_allowed_tokens_are_drawn() -> None:
    made = sampler()
    requests = [make_request([5], keys=0, allowed_token_ids=[9, 3]), make_request([5], keys=10)]
    assert drawn(made, requests, falling(7, 3, 9)) == [[3, 3, 3], [7]]
    made.forget(requests[0])
    assert drawn(made, [make_request([5], keys=20, allowed_token_ids=[9])], falling(7, 3, 9)) == [[9]]


def test_bad_words_follow_the_drafts_of_a_row() -> None:
    """Row 0 has no output, so 3 may be drawn; after the draft 3 it would complete the bad word 3 3."""
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
    """The second step is launched before the first step's tokens reach the host."""
    made = sampler()
    request = make_request([5], keys=0, bad_word_ids=[[3, 3]])
    first = made.launch(works_of([request], []), falling(3, 4)[None])
    behind = ScheduledRows(request, len(request.tokens), [0], None, samples=True, follows=0)
    second = made.launch([behind], falling(3, 4)[None])
    assert [made.finish(output)[0].tokens for output in (first, second)] == [[3], [4]]


def plain_greedy(row: torch.Tensor, count: int, allowed: Sequence[int], words: Sequence[Sequence[int]]) -> list[int]:
    """Return the greedy output of a target with equal logits in every row, by the definition of the masks."""
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
