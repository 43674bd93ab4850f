"""Chooses which of the drafts that came are verified, and learns from what becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.session import Binding
from verifier_service.pacing import Calibration, Limit, VerificationBudget, chosen

# Sequences' steps that are learnt from together: to learn from one takes as long as from many.
LEARN_FROM = 32


class Offer(NamedTuple):
    """Drafts of a request that came for a step."""

    request: Request
    num_drafts: int
    confidences: Sequence[float] | None  # of at least so many drafts; None where drafts come without


class _Result(NamedTuple):
    """What became of the drafts of a request."""

    calibration: Calibration
    address: str  # of the drafter
    offer: Offer
    num_verified: int
    num_accepted: int


class DraftBudget:
    """Applies the verifier's budget to requests. Used by the engine's thread alone, but for the counters.

    Attributes:
        budget: Chooses the limit of a step.
        offered, verified, accepted: Drafts by the address of their drafter: those that came, were verified, were
            accepted.
        expected: Accepted drafts that the calibrated confidences of the verified ones foretell, by address.
    """

    def __init__(self, bindings: Mapping[Request, Binding], budget: VerificationBudget) -> None:
        self.budget = budget
        self.offered, self.verified, self.accepted = Counter[str](), Counter[str](), Counter[str]()
        self.expected: dict[str, float] = {}
        self._bindings = bindings
        self._results: list[_Result] = []

    def limit(self, num_drafts: Sequence[int]) -> Limit | None:
        """Return the limit of a step whose sequences may have so many drafts; None where all are to be verified."""
        return self.budget.limit(len(num_drafts), sum(count > 0 for count in num_drafts), sum(num_drafts))

    def choose(self, limit: Limit | None, offers: Sequence[Offer]) -> list[int]:
        """Return how many drafts of each offer are verified; see `pacing.budget` on what that may depend on."""
        if limit is None or not offers:
            return [offer.num_drafts for offer in offers]
        survival = np.zeros((len(offers), max(offer.num_drafts for offer in offers)))
        places: dict[Calibration | None, list[int]] = {}
        for place, offer in enumerate(offers):
            binding = self._bindings.get(offer.request)
            places.setdefault(None if binding is None else binding.session.pace.calibration, []).append(place)
        for calibration, own in places.items():
            if calibration is not None:  # else the drafter has gone, and its drafts are of no use soon
                survival[own] = _survival(calibration, [offers[place] for place in own], survival.shape[1])
        return chosen(survival, limit).tolist()

    def count(self, request: Request, drafts: ReadyDrafts, num_verified: int, num_accepted: int) -> None:
        """Count what became of the drafts that came for a request; `learn` uses the counts."""
        binding = self._bindings.get(request)
        if binding is not None and num_accepted >= 0:
            session = binding.session
            self.offered[session.stream.address] += len(drafts.tokens)
            self.verified[session.stream.address] += num_verified
            self.accepted[session.stream.address] += num_accepted
            offer = Offer(request, len(drafts.tokens), drafts.confidences)
            calibration, address = session.pace.calibration, session.stream.address
            self._results.append(_Result(calibration, address, offer, num_verified, num_accepted))

    def learn(self) -> None:
        """Learn from what was counted, once that is enough to be worth the time."""
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
    """[S, most], NaN where there is none."""
    confidences = np.full((len(offers), most), np.nan)
    for row, offer in zip(confidences, offers, strict=True):
        if offer.confidences is not None:
            row[: offer.num_drafts] = offer.confidences[: offer.num_drafts]
    return confidences


def _survival(calibration: Calibration, offers: Sequence[Offer], most: int) -> np.ndarray:
    """[S, most], 0 where there is no draft."""
    num_drafts = np.array([offer.num_drafts for offer in offers])
    survival = calibration.survival(_confidences(offers, most))
    return np.where(np.arange(most) < num_drafts[:, None], survival, 0.0)
