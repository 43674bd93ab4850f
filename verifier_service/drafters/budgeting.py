"""Applies the verification budget to the received drafts, and updates it from their acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.session import Binding
from verifier_service.pacing import Calibration, Limit, VerificationBudget, chosen

# Sequence steps per update: an update takes the same time for one as for many.
LEARN_FROM = 32


class Offer(NamedTuple):
    """Drafts of a request that were received for a step."""

    request: Request
    num_drafts: int
    confidences: Sequence[float] | None  # at least num_drafts; None without confidences


class _Result(NamedTuple):
    """Outcome of a request's drafts."""

    calibration: Calibration
    address: str  # address of the drafter
    offer: Offer
    num_verified: int
    num_accepted: int


class DraftBudget:
    """Applies the verification budget to requests. Only the engine's thread uses it, except for the counters.

    Attributes:
        budget: Chooses the limit of a step.
        offered: Received drafts by the address of their drafter.
        verified: Verified drafts by address.
        accepted: Accepted drafts by address.
        expected: Expected accepted drafts, by the calibrated confidences of the verified ones, by address.
    """

    def __init__(self, bindings: Mapping[Request, Binding], budget: VerificationBudget) -> None:
        self.budget = budget
        self.offered, self.verified, self.accepted = Counter[str](), Counter[str](), Counter[str]()
        self.expected: dict[str, float] = {}
        self._bindings = bindings
        self._results: list[_Result] = []

    def limit(self, num_drafts: Sequence[int]) -> Limit | None:
        """Return the limit of a step whose sequences may have `num_drafts` drafts each; None to verify all."""
        return self.budget.limit(len(num_drafts), sum(count > 0 for count in num_drafts), sum(num_drafts))

    def choose(self, limit: Limit | None, offers: Sequence[Offer]) -> list[int]:
        """Return the number of drafts to verify of each offer; `pacing.budget` explains why this is exact."""
        if limit is None or not offers:
            return [offer.num_drafts for offer in offers]
        survival = np.zeros((len(offers), max(offer.num_drafts for offer in offers)))
        places: dict[Calibration | None, list[int]] = {}
        for place, offer in enumerate(offers):
            binding = self._bindings.get(offer.request)
            places.setdefault(None if binding is None else binding.session.pace.calibration, []).append(place)
        for calibration, own in places.items():
            if calibration is not None:  # else the drafter has disconnected
                survival[own] = _survival(calibration, [offers[place] for place in own], survival.shape[1])
        return chosen(survival, limit).tolist()

    def count(self, request: Request, drafts: ReadyDrafts, num_verified: int, num_accepted: int) -> None:
        """Record the outcome of a request's drafts for `learn`, unless the request has left their drafter."""
        binding = self._bindings.get(request)
        if binding is not None and binding.first_length <= drafts.committed_length and num_accepted >= 0:
            session = binding.session
            self.offered[session.stream.address] += len(drafts.tokens)
            self.verified[session.stream.address] += num_verified
            self.accepted[session.stream.address] += num_accepted
            offer = Offer(request, len(drafts.tokens), drafts.confidences)
            calibration, address = session.pace.calibration, session.stream.address
            self._results.append(_Result(calibration, address, offer, num_verified, num_accepted))

    def learn(self) -> None:
        """Update the budget and the calibrations from the recorded outcomes, if there are enough."""
        if len(self._results) < LEARN_FROM:
            return
        by_drafter: dict[tuple[Calibration, str], list[_Result]] = {}
        for result in self._results:
            by_drafter.setdefault((result.calibration, result.address), []).append(result)
        self._results.clear()
        for (calibration, address), results in by_drafter.items():
            self._learn_of(calibration, address, results)

    def _learn_of(self, calibration: Calibration, address: str, results: Sequence[_Result]) -> None:
        offers = [result.offer for result in results]
        most = max(offer.num_drafts for offer in offers)
        num_verified = np.array([result.num_verified for result in results])
        num_accepted = np.array([result.num_accepted for result in results])
        survival = _survival(calibration, offers, most)
        brought = np.where(np.arange(most) < num_verified[:, None], survival, 0.0)
        self.budget.count_offered(survival)
        calibration.count_brought(brought, survival > 0.0)
        calibration.count(_confidences(offers, most), num_verified, num_accepted)
        self.expected[address] = self.expected.get(address, 0.0) + float(brought.sum())


def offers_of(requests: Iterable[Request]) -> list[Offer]:
    """Return the offers of the requests that have drafts."""
    return [
        Offer(request, len(request.drafts.tokens), request.drafts.confidences)
        for request in requests
        if request.drafts is not None
    ]


def _confidences(offers: Sequence[Offer], most: int) -> np.ndarray:
    """Return the confidences [S, most], NaN if missing."""
    confidences = np.full((len(offers), most), np.nan)
    for row, offer in zip(confidences, offers, strict=True):
        if offer.confidences is not None:
            row[: offer.num_drafts] = offer.confidences[: offer.num_drafts]
    return confidences


def _survival(calibration: Calibration, offers: Sequence[Offer], most: int) -> np.ndarray:
    """Return the survival [S, most], 0 for missing drafts."""
    num_drafts = np.array([offer.num_drafts for offer in offers])
    survival = calibration.survival(_confidences(offers, most))
    return np.where(np.arange(most) < num_drafts[:, None], survival, 0.0)
