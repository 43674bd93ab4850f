"""What requests' options cost a step: their lists of tokens are read once, and lie on the device from then on."""

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
# As long as the contract allows.
LISTS = {
    "logit_bias": {token: (token % 7 - 3) / 4 for token in range(0, VOCAB, 2)},
    "stop_token_ids": list(range(1, 257, 2)),
}


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
    """Tokens drawn for each request, all of whose rows have these logits [V]."""
    works = works_of(requests, drafts)
    rows = sum(work.num_logit_rows for work in works)
    return [one.tokens for one in made.finish(made.launch(works, logits.expand(rows, -1).clone()))]


def code_run(call: Callable[[], object]) -> int:
    """Instructions of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    # From Python 3.12 on, opcodes are traced only if some frame wants it when tracing begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_a_step_costs_the_same_however_long_a_list(name: str) -> None:
    """Bias and end tokens were made of Python's objects, one for each token of each row, at each step."""
    short: dict[str, Any] = {"min_tokens": 50, "logit_bias": {4: 1.0}, "stop_token_ids": [9]}
    long = {**short, name: LISTS[name]}
    instructions = []
    for options in (short, long):
        requests = [make_request([5, 6], keys=10 * i, **options) for i in range(8)]
        made, works, logits = sampler(), works_of(requests), torch.zeros(8 * (K + 1), VOCAB)
        made.finish(made.launch(works, logits))  # reads the parameters
        instructions.append(code_run(lambda made=made, works=works, logits=logits: made.launch(works, logits)))
    assert instructions[0] > 1000  # they were counted
    assert instructions[1] <= 1.1 * instructions[0]


def test_a_bias_list_moves_the_draw_of_its_own_request() -> None:
    made = sampler()
    logits = torch.zeros(VOCAB)
    logits[3] = 1.0
    requests = [
        make_request([5], keys=0, logit_bias={7: 2.0}),
        make_request([5], keys=10),
        make_request([5], keys=20, logit_bias={**dict.fromkeys(range(100, 1000), 2.0), 8: 9.0}),
        make_request([5], keys=30, logit_bias={3: -5.0, 0: 4.0}),
    ]
    assert drawn(made, requests, logits) == [[7], [3] * (K + 1), [8], [0]]
    made.forget(requests[2])
    others = [make_request([5], keys=40, logit_bias={9: 3.0}), requests[0], make_request([5], keys=50)]
    assert drawn(made, others, logits) == [[9], [7], [3] * (K + 1)]  # nothing is left of the request before
    assert drawn(made, requests, logits) == [[7], [3] * (K + 1), [8], [0]]


def test_end_tokens_are_not_drawn_before_min_tokens() -> None:
    made = sampler()
    logits = torch.zeros(VOCAB)
    logits[0], logits[9], logits[3] = 3.0, 2.0, 1.0
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
    logits = torch.zeros(VOCAB)
    logits[1], logits[2] = 9.0, 8.0  # 1 is a stop token, 2 is biased by less than 1
    assert drawn(made, requests, logits, []) == [[2]] * MANY
