"""The drafts of a step as columns, and the choice among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting_scene import make_request

from draftwire_kernels import draft_rates, spread_rates
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.budgeting import LEARN_FROM, DraftBudget
from verifier_service.pacing import Calibration, Limit, Profile, VerificationBudget

NAN = float("nan")


def decoding(count: int) -> list[Request]:
    return [make_request([1 + i % 7] * (3 + i)) for i in range(count)]


def budget_for(requests: list[Request], calibrations: list[Calibration], rates: torch.Tensor | None = None) -> Any:
    """Return a budget for requests at drafters with these calibrations."""
    bindings: Any = {
        request: SimpleNamespace(
            first_length=0,
            session=SimpleNamespace(pace=SimpleNamespace(calibration=own), stream=SimpleNamespace(address="drafter")),
        )
        for request, own in zip(requests, calibrations, strict=True)
    }
    return DraftBudget(bindings, VerificationBudget(Profile(), is_adaptive=True), rates)


def rates_of(requests: list[Request], rates: torch.Tensor) -> list[np.ndarray]:
    """Return the rates of the first and second draft of each request."""
    keys = np.array([request.keys.accept for request in requests])
    lengths = np.array([len(request.tokens) for request in requests])
    return [
        draft_rates(rates.double().numpy(), keys, lengths + offset, np.full(len(requests), offset))
        for offset in range(2)
    ]


def test_drafts_of_requests_are_columns():
    requests = decoding(4)
    requests[0].drafts = ReadyDrafts(3, 1, [5, 6], confidences=[0.5, 0.25, 0.125])
    requests[2].drafts = ReadyDrafts(5, 3, [5, 6, 7])
    offers = budget_for(requests, [Calibration(3)] * 4).offers(requests, 4)
    assert offers.num_drafts.tolist() == [2, 0, 3, 0]
    np.testing.assert_array_equal(offers.confidences, [[0.5, 0.25, NAN, NAN], [NAN] * 4, [NAN] * 4, [NAN] * 4])
    more = offers.with_more(np.array([3, 3, 3, 3, 1]), np.array([0, 1, 2, 3, 0]), np.array([0.9, 0.8, 0.7, 0.6, 0.1]))
    assert more.num_drafts.tolist() == [2, 1, 3, 4]
    np.testing.assert_array_equal(more.confidences[1], [0.1, NAN, NAN, NAN])
    np.testing.assert_array_equal(more.confidences[3], [0.9, 0.8, 0.7, 0.6])
    assert offers.num_drafts.tolist() == [2, 0, 3, 0]
    assert budget_for([], []).offers([]).confidences.shape == (0, 0)


def test_requests_are_chosen_by_their_own_drafters_calibration():
    requests = decoding(3)
    sure, unsure = Calibration(2), Calibration(2)
    for _ in range(300):
        unsure.count(np.full((16, 2), 0.9), np.full(16, 2), np.zeros(16, np.int64))
    budget = budget_for(requests[:2], [sure, unsure])
    offers = budget.offers(requests, 2)._replace(num_drafts=np.array([2, 2, 2]), confidences=np.full((3, 2), 0.9))
    assert budget.choose(Limit(0.5, 10), offers).tolist() == [2, 0, 0]  # the last request has lost its drafter
    assert budget.choose(None, offers).tolist() == [2, 2, 2]
    assert budget.choose(Limit(0.0, 3), budget.offers(requests)).tolist() == [0, 0, 0]


def test_synthetic_rates_are_the_confidences():
    rates = torch.tensor(spread_rates([0.8, 0.6], 0.5))
    requests = decoding(8)
    budget = budget_for(requests, [Calibration(2, rates.mean(1).tolist())] * 8, rates)
    first, second = rates_of(requests, rates)
    expected = (first >= 0.7).astype(int) * (1 + (first * second >= 0.7))
    owner, offset = np.repeat(np.arange(8), 2), np.tile(np.arange(2), 8)
    offers = budget.offers(requests, 2).with_more(owner, offset, np.full(16, 0.5))
    assert budget.choose(Limit(0.7, 100), offers).tolist() == expected.tolist()
    assert 0 < expected.sum() < 16


@pytest.mark.parametrize("skill", [0.0, 0.5])
def test_synthetic_rates_are_the_expected_tokens(skill: float):
    rates = torch.tensor(spread_rates([0.8, 0.6], skill))
    requests = decoding(LEARN_FROM)
    budget = budget_for(requests, [Calibration(2, [0.8, 0.6])] * LEARN_FROM, rates)
    for request in requests:
        budget.count(request, ReadyDrafts(len(request.tokens), 1, [5, 6], confidences=[0.1, 0.1]), 2, 1)
    budget.learn()
    assert budget.accepted["drafter"] == LEARN_FROM
    first, second = rates_of(requests, rates)
    assert budget.expected["drafter"] == pytest.approx(float((first + first * second).sum()))
