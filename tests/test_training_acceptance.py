"""Verify steps are counted as the two services count them."""

import pytest

from training.acceptance import Acceptance, repeated_share, walk
from training.tokens import learning_rate

NO, YES = False, True


def test_a_step_emits_its_accepted_drafts_and_one_token():
    # Prompt x_0..x_2, first committed token x_3; a step at n looks at row n - 1.
    accepts = [[NO, NO]] * 10
    accepts[2] = [YES, YES]  # from x_3: x_4, x_5 accepted, x_6 emitted
    accepts[5] = [NO, YES]  # from x_6: nothing accepted, x_7 emitted
    accepts[6] = [YES, NO]  # from x_7: x_8 accepted, x_9 emitted
    counts = Acceptance(k=2)
    walk(accepts, first=3, last=10, counts=counts)
    assert (counts.steps, counts.emitted, counts.accepted) == (3, 6, [2, 1])
    report = counts.report()
    assert report["acceptance_length"] == 2.0
    assert report["conditional"] == [pytest.approx(2 / 3, abs=1e-4), 0.5]


def test_no_step_is_counted_that_the_end_would_cut_short():
    counts = Acceptance(k=2)
    walk([[YES, YES]] * 10, first=3, last=5, counts=counts)
    assert counts.steps == 0


def test_repeated_share_counts_tokens_inside_repeated_n_grams():
    assert repeated_share([1, 2, 3, 9, 1, 2, 3], n=3) == pytest.approx(6 / 7)
    assert repeated_share([1, 2, 3, 4], n=3) == 0


def test_learning_rate_rises_stays_and_falls_to_zero():
    assert learning_rate(0.005) == pytest.approx(0.5)
    assert learning_rate(0.3) == 1
    assert learning_rate(1.0) == 0
