"""Verify steps of a training evaluation are counted as the two services count them."""

import pytest

from training.acceptance import Acceptance, repeated_share, walk
from training.schedule import learning_rate

NO, YES = False, True


def test_a_step_emits_its_accepted_drafts_and_one_token() -> None:
    accepts = [[NO, NO]] * 5
    accepts[0] = [YES, YES]  # emits tokens 1, 2 and 3
    accepts[3] = [NO, YES]  # emits token 4
    accepts[4] = [YES, NO]  # emits tokens 5 and 6
    counts = Acceptance(k=2)
    assert walk(accepts, counts) == [0, 3, 4]
    assert (counts.steps, counts.accepted) == (3, [2, 1])
    report = counts.report()
    assert report["acceptance_length"] == 2.0
    assert report["conditional"] == [pytest.approx(2 / 3, abs=1e-4), 0.5]


def test_an_answer_without_room_for_a_step_has_none() -> None:
    counts = Acceptance(k=2)
    assert walk([], counts) == []
    assert (counts.steps, counts.length) == (0, 0.0)


def test_fewer_drafts_are_the_first_ones() -> None:
    counts = Acceptance(k=1)
    assert walk([[YES, YES]] * 4, counts) == [0, 2]


def test_repeated_share_counts_tokens_inside_repeated_n_grams() -> None:
    assert repeated_share([1, 2, 3, 9, 1, 2, 3], n=3) == pytest.approx(6 / 7)
    assert repeated_share([1, 2, 3, 4], n=3) == 0


def test_learning_rate_rises_stays_and_falls_to_zero() -> None:
    assert learning_rate(0.01) == pytest.approx(0.5)
    assert learning_rate(0.3) == 1
    assert learning_rate(1.0) == 0
