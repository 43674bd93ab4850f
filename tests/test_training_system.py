"""Acceptance of the real system is the sum of what the verifier reports."""

import pytest

from draftwire.client import Completion, Statistics
from draftwire.contract.errors import ServerError
from training.system import count_completions


def completion(token_ids, steps, tokens, drafted, accepted, synthetic=False):
    statistics = Statistics(
        verify_steps=steps,
        verify_tokens=tokens,
        drafted=drafted,
        accepted=accepted,
        synthetic_acceptance=synthetic,
    )
    return Completion(
        text="",
        token_ids=tuple(token_ids),
        drafted=(),
        token_text_ends=(),
        logprobs=(),
        finish_reason="length",
        stop_text=None,
        stop_token_id=None,
        statistics=statistics,
        request_id="",
    )


VARIED = range(20)
REPEATING = [*range(8), *range(8), *range(8)]


def test_statistics_of_all_requests_are_added_up():
    completions = [
        completion(VARIED, steps=10, tokens=24, drafted=(10, 10), accepted=(8, 6)),
        completion(VARIED, steps=10, tokens=20, drafted=(10, 10), accepted=(8, 2)),
    ]
    everything, _ = count_completions(completions, k=2)
    assert everything.report() == {
        "acceptance_length": 2.2,
        "standard_error": 0.1414,  # sqrt((24 - 22)^2 + (20 - 22)^2) / 20
        "unconditional": [0.8, 0.4],
        "conditional": [0.8, 0.5],
        "continuations": 2,
        "verify_steps": 20,
        "tokens": 44,
    }


def test_a_position_is_rated_over_the_drafts_made_there():
    # The last two of ten steps were cut by max_tokens: one drafted one token, one none.
    everything, _ = count_completions([completion(VARIED, 10, 23, drafted=(9, 8), accepted=(9, 4))], k=2)
    report = everything.report()
    assert report["unconditional"] == [1.0, 0.5]
    assert report["acceptance_length"] == 2.3


def test_repeated_continuations_are_not_counted_a_second_time():
    completions = [
        completion(VARIED, 10, 15, drafted=(10, 10), accepted=(5, 0)),
        completion(REPEATING, 8, 24, drafted=(8, 8), accepted=(8, 8)),
    ]
    everything, varied = count_completions(completions, k=2)
    assert (len(everything.requests), everything.steps) == (2, 18)
    assert (len(varied.requests), varied.steps, varied.accepted) == (1, 10, [5, 0])


def test_requests_without_a_verify_step_are_continuations_only():
    everything, _ = count_completions([completion([0], 0, 0, drafted=(0, 0), accepted=(0, 0))], k=2)
    report = everything.report()
    assert (report["continuations"], report["acceptance_length"], report["conditional"]) == (1, 0.0, [0.0, 0.0])


def test_synthetic_acceptance_is_refused():
    with pytest.raises(ServerError, match="synthetically"):
        count_completions([completion(VARIED, 1, 3, drafted=(1, 1), accepted=(1, 1), synthetic=True)], k=2)
