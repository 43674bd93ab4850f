"""greedy_identity.py: where and by how much an output differs from transformers', and which gaps fail."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest
import torch

from draftwire_bench.greedy_identity import (
    Comparison,
    Parting,
    Reference,
    count_differences,
    find_failures,
    find_parting,
)

# The best logit of each row is between 8 and 16, where the spacing of bfloat16 (a last digit) is 1/16.
LOGITS = torch.tensor([[10.0, 1, 2], [8, 8.25, 8.125], [0, 1, 9.5]])
REFERENCE = Reference([0, 1, 2], LOGITS)
PARTING = Parting(request=0, place=1, token=0, reference_token=1, gap=4.0, second_gap=2.0)
IDENTICAL = Comparison(
    requests=1,
    identical=1,
    tokens=3,
    tokens_that_differ=0,
    drafted=2,
    accepted=1,
    preemptions=1,
    prefix_hit_tokens=16,
    partings=[],
)


def test_equal_outputs_do_not_part():
    assert find_parting(0, (0, 1, 2), REFERENCE) is None
    assert count_differences((0, 1, 2), REFERENCE.tokens) == 0


def test_the_gap_is_of_the_first_differing_token_in_last_digits():
    parting = find_parting(7, (0, 0, 1), REFERENCE)
    assert parting is not None
    assert (parting.request, parting.place, parting.token, parting.reference_token) == (7, 1, 0, 1)
    assert (parting.gap, parting.second_gap) == (4.0, 2.0)
    assert count_differences((0, 0, 1), REFERENCE.tokens) == 2


def test_a_wrong_token_has_a_large_gap():
    parting = find_parting(0, (1, 1, 2), REFERENCE)
    assert parting is not None
    assert parting.gap == 144.0


def test_an_output_of_another_length_is_an_error():
    with pytest.raises(click.ClickException, match="request 3: 2 tokens, 3 of transformers"):
        find_parting(3, (0, 1), REFERENCE)


def test_the_usual_cache_needs_no_preemption_and_no_prefix_hit():
    assert find_failures(replace(IDENTICAL, preemptions=0, prefix_hit_tokens=0), IDENTICAL, allowed=0.0) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemptions": 0}, "no request was preempted with the small KV cache"),
        ({"prefix_hit_tokens": 0}, "no prefix was found in the small KV cache"),
    ],
)
def test_a_small_cache_without_preemption_or_prefix_hit_fails(changes, message):
    (failure,) = find_failures(IDENTICAL, replace(IDENTICAL, **changes), allowed=4.0)
    assert message in failure


@pytest.mark.parametrize(("allowed", "count"), [(0.0, 1), (3.9, 1), (4.0, 0)])
def test_a_gap_larger_than_allowed_fails_with_either_cache(allowed, count):
    parted = replace(IDENTICAL, partings=[PARTING])
    assert len(find_failures(parted, IDENTICAL, allowed)) == count
    assert len(find_failures(IDENTICAL, parted, allowed)) == count
