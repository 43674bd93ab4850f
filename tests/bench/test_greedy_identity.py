"""Where an output parts from transformers', and how far: the arithmetic of benchmarks/greedy_identity.py."""

from __future__ import annotations

import click
import pytest
import torch

from benchmarks.greedy_identity import Reference, count_differences, find_parting

# The best logit of each row is between 8 and 16: a last digit of bfloat16 is 1/16 there.
LOGITS = torch.tensor([[10.0, 1, 2], [8, 8.25, 8.125], [0, 1, 9.5]])
REFERENCE = Reference([0, 1, 2], LOGITS)


def test_equal_outputs_do_not_part():
    assert find_parting(0, (0, 1, 2), REFERENCE) is None
    assert count_differences((0, 1, 2), REFERENCE.tokens) == 0


def test_the_gap_is_that_of_the_first_token_that_differs_in_last_digits_of_the_best_logit():
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
