"""Structured output in the engine: with and without drafts and async scheduling, after preemption, and on errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drafting_scene import make_request
from engine_scene import Served
from grammar_scene import END, matcher_of, text_of
from tiny_targets import CONTEXT, VOCAB

from draftwire.contract.errors import ServerError
from draftwire.model.block_pool import blocks_for
from verifier_service.core.request import Request
from verifier_service.target.target import Target

pytestmark = pytest.mark.usefixtures("scheduling")

REGEX = r"(\{\"[abc]{1,4}\":[012]{1,3}(,[ab]+){0,6}\}){2,9}"
PROMPTS = [[(3 * i + j * j) % VOCAB for j in range(1 + 3 * i)] for i in range(6)]


def structured(prompt: list[int], output: dict[str, Any], *, max_tokens: int = 30, **options: Any) -> Request:
    """Return a request whose output ends with the token END."""
    request = make_request(prompt, max_tokens=max_tokens, stop_token_ids=[END], **options)
    request.grammar = matcher_of(output, min_tokens=options.get("min_tokens", 0))
    return request


def outputs(target: Target, *, drafts: bool, limits: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the outputs of requests, every other one structured, the requests and the engine."""
    own = Served(target, **(limits or {}))
    if drafts:
        # Some drafts are in the grammar, some are not.
        own.connect_with(lambda step: [[6, 8, 0], [10, 7, 6], [0, 1, 2], [17, 11, 12]][step.step_id % 4])
    requests = []
    for i, prompt in enumerate(PROMPTS):
        made = structured(prompt, {"regex": REGEX}, keys=100 * i, **options)
        if i % 2:
            made.grammar = None
        requests.append(own.submit_made(made))
    found = own.run(*requests)
    return found, requests, own


def follows_the_regex(tokens: list[int]) -> bool:
    """Return whether an output matches REGEX or, if it was cut at its length, begins a match."""
    if tokens[-1] == END:
        return re.fullmatch(REGEX, text_of(tokens)) is not None
    return matcher_of({"regex": REGEX}).num_verified(tokens, has_logits=False) == len(tokens)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_output_follows_the_grammar_and_no_draft_changes_it(target, options):
    found, requests, _ = outputs(target, drafts=True, **options)
    alone, _, _ = outputs(target, drafts=False, **options)
    assert all(follows_the_regex(tokens) for tokens in found[::2])
    assert found == alone
    assert not all(follows_the_regex(tokens) for tokens in found[1::2])
    drafted = [sum(one.drafted) for one in requests]
    assert all(drafted)
    assert sum(drafted[::2]) < sum(drafted[1::2]), "drafts outside of the grammar are not verified"


@pytest.mark.parametrize("drafts", [True, False])
def test_preemption_does_not_change_the_output(target, drafts):
    expected, _, engine = outputs(target, drafts=drafts)
    assert engine.engine.scheduler.num_preemptions == 0
    limits = {"num_blocks": blocks_for(CONTEXT) + 1, "prefix_caching": False}
    found, _, engine = outputs(target, drafts=drafts, limits=limits)
    assert engine.engine.scheduler.num_preemptions > 0
    assert found == expected


def test_a_finished_grammar_ends_the_output(target):
    own = Served(target)
    (tokens,) = own.run(own.submit_made(structured([1, 2], {"choice": ["abc", "ba"]})))
    assert tokens[-1] == END
    assert text_of(tokens) in ("abc", "ba")


def test_min_tokens_and_ignored_ends_do_not_break_the_text(target):
    own = Served(target)
    (tokens,) = own.run(own.submit_made(structured([1, 2], {"regex": "a*"}, min_tokens=6, max_tokens=9)))
    assert END not in tokens[:6]
    assert set(text_of(tokens)) == {"a"}


def test_log_probabilities_are_those_before_the_mask(target):
    own = Served(target)
    request = own.submit_made(structured([1, 2], {"choice": ["c", "0"]}, logprobs=20))
    free = own.submit_made(make_request([1, 2], keys=7, max_tokens=1, logprobs=20))
    with own:
        (first, *_), (other,) = own.messages(request), own.messages(free)
    assert first.logprobs[0].top_logprobs == pytest.approx(other.logprobs[0].top_logprobs, abs=1e-5)


def test_a_grammar_that_fails_ends_its_own_request(target):
    own = Served(target)
    request = structured([1, 2], {"regex": "[ab]{40}"}, max_tokens=25)
    other = own.submit_made(structured([1, 2], {"regex": "[ab]{40}"}, keys=7, max_tokens=25))
    assert request.grammar is not None
    request.grammar.error = ServerError("too complex")
    own.submit_made(request)
    with own:
        assert own.error(request) == "too complex"
        assert len(own.tokens(other)) == 25
