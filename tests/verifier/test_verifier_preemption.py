"""Preemption loses nothing: what a request says does not depend on how much cache there is."""

from __future__ import annotations

from typing import Any

import pytest
from engine_scene import Served, scheduling  # noqa: F401
from tiny_targets import CONTEXT, VOCAB

from draftwire.model.block_pool import blocks_for
from verifier_service.target.target import Target

pytestmark = pytest.mark.usefixtures("scheduling")

PROMPTS = [[(3 * i + j * j) % VOCAB for j in range(1 + 3 * i)] for i in range(8)]
COUPLED = {"draft_sample_method": "gumbel", "rejection_sample_method": "coupled"}
# No token may come from a draft where the output depends on which step got drafts; see the seeded tests of the system.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "greedy with penalties": ({}, {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4}),
    "coupled": (COUPLED, {"temperature": 0.9}),
    "sampled": ({}, {"temperature": 0.9, "k": 0}),
    "sampled with penalties": ({}, {"temperature": 0.9, "k": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7}),
}


def outputs(
    target: Target, config: dict[str, Any], options: dict[str, Any], num_blocks: int, prefix_caching: bool
) -> tuple[Any, int]:
    """What eight long requests say that arrive at once, and how often one of them was preempted."""
    own = Served(target, config, num_blocks=num_blocks + 1, max_prefill_rows=20, prefix_caching=prefix_caching)
    stream = own.connect()
    requests = [
        own.submit(prompt, keys=100 * i, max_tokens=CONTEXT - len(prompt), **options)
        for i, prompt in enumerate(PROMPTS)
    ]
    tokens = own.run(*requests)
    assert stream.failure is None
    if options.get("k") != 0:
        assert all(sum(one.drafted) > 0 for one in requests)
    assert [one.num_output for one in requests] == [CONTEXT - len(prompt) for prompt in PROMPTS]
    return tokens, own.engine.scheduler.num_preemptions


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_output_is_the_same_with_and_without_preemption(case, target):
    config, options = CASES[case]
    expected, none = outputs(target, config, options, 8 * blocks_for(CONTEXT), prefix_caching=False)
    assert none == 0
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for num_blocks, prefix_caching in ((blocks_for(CONTEXT), False), (2 * blocks_for(CONTEXT) + 1, True)):
        found, preemptions = outputs(target, config, options, num_blocks, prefix_caching)
        assert found == expected
        assert preemptions > 0


def test_a_preempted_sequence_is_closed_and_opened_from_row_0(target):
    own = Served(target, num_blocks=blocks_for(CONTEXT) + 1)
    stream = own.connect()
    requests = [own.submit(PROMPTS[1], max_tokens=CONTEXT - 4) for _ in range(2)]
    own.engine.start()
    assert own.tokens(requests[0]) == own.tokens(requests[1])
    own.engine.stop()
    opened = [row for step in stream.steps for row in step.opened.first_rows]
    closed = [i for step in stream.steps for i in step.closed_ids]
    assert own.engine.scheduler.num_preemptions > 0
    assert len(opened) == 2 + own.engine.scheduler.num_preemptions
    assert opened == [0] * len(opened)
    assert closed[: own.engine.scheduler.num_preemptions] == [2, *range(3, len(opened))]
    next_row: dict[int, int] = {}
    for step in stream.steps:
        for i, first, count in zip(step.sequence_ids, step.first_rows, step.num_rows, strict=True):
            assert first == next_row.get(i, 0)
            next_row[i] = first + count
