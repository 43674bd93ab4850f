"""Applies the verification budget to the received drafts, and updates it from their acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwire_kernels import draft_rates
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.session import Binding
from verifier_service.pacing import Calibration, Limit, VerificationBudget, chosen

# Sequence steps per update: an update takes the same time for one as for many.
LEARN_FROM = 32


class Offers(NamedTuple):
    """Drafts that were received for a step, as columns: the choice among them must not delay the step.

    Attributes:
        requests: S requests, with or without drafts.
        calibrations: Those of the requests' drafters; None without a drafter.
        num_drafts: [S] int64; 0 without drafts.
        confidences: [S, k] float64, k at least the most drafts; NaN for drafts without a confidence.
        is_synthetic: Whether `confidences` are the rates of synthetic acceptance instead of the drafter's confidences.
    """

    requests: Sequence[Request]
    calibrations: Sequence[Calibration | None]
    num_drafts: np.ndarray
    confidences: np.ndarray
    is_synthetic: bool = False

    def with_more(self, owner: np.ndarray, offset: np.ndarray, confidences: np.ndarray | None) -> Offers:
        """Return these and D more drafts.

        Args:
            owner: [D] int64, indices of the drafts' requests.
            offset: [D] int64, offsets of the drafts in their steps, ascending without gaps for each request.
            confidences: [D], or None.
        """
        columns = self.confidences.copy()
        if confidences is not None and not self.is_synthetic:
            columns[owner, offset] = confidences
        num_drafts = self.num_drafts + np.bincount(owner, minlength=len(self.requests))
        return self._replace(num_drafts=num_drafts, confidences=columns)


class _Result(NamedTuple):
    """Outcome of a request's drafts."""

    calibration: Calibration
    address: str  # address of the drafter
    request: Request
    drafts: ReadyDrafts
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

    def __init__(
        self, bindings: Mapping[Request, Binding], budget: VerificationBudget, rates: torch.Tensor | None = None
    ) -> None:
        """`rates`: [k, N] float32, equally likely rates of each position with synthetic acceptance; the rate of each
        draft is its confidence."""
        self.budget = budget
        self._rates = None if rates is None else rates.double().numpy()
        self.offered, self.verified, self.accepted = Counter[str](), Counter[str](), Counter[str]()
        self.expected: dict[str, float] = {}
        self._bindings = bindings
        self._results: list[_Result] = []

    def limit(self, num_drafts: Sequence[int]) -> Limit | None:
        """Return the limit of a step whose sequences may have `num_drafts` drafts each; None to verify all."""
        return self.budget.limit(len(num_drafts), sum(count > 0 for count in num_drafts), sum(num_drafts))

    def offers(self, requests: Sequence[Request], num_drafts: int = 0) -> Offers:
        """Return the drafts that the requests have, with columns for at least `num_drafts`."""
        bindings = map(self._bindings.get, requests)
        calibrations = [None if binding is None else binding.session.pace.calibration for binding in bindings]
        counts, confidences = _columns([request.drafts for request in requests], num_drafts)
        if self._rates is None:
            return Offers(requests, calibrations, counts, confidences)
        lengths = [len(request.tokens) for request in requests]
        rates = _synthetic(self._rates, requests, lengths, confidences.shape[1])
        return Offers(requests, calibrations, counts, rates, is_synthetic=True)

    def choose(self, limit: Limit | None, offers: Offers) -> np.ndarray:
        """Return the number of drafts to verify of each request, int64 [S]; `pacing.budget` explains why this is
        exact."""
        num_drafts, calibrations = offers.num_drafts, offers.calibrations
        if limit is None or not num_drafts.any():
            return num_drafts
        survival, drafters = np.zeros(offers.confidences.shape), dict.fromkeys(calibrations)
        for calibration in drafters:
            if calibration is not None:  # else the drafter has disconnected
                own: slice | list[int] = slice(None)
                if len(drafters) > 1:
                    own = [place for place, other in enumerate(calibrations) if other is calibration]
                survival[own] = _survival(calibration, num_drafts[own], offers.confidences[own])
        return chosen(survival, limit)

    def count(self, request: Request, drafts: ReadyDrafts, num_verified: int, num_accepted: int) -> None:
        """Record the outcome of a request's drafts for `learn`, unless the request has left their drafter."""
        binding = self._bindings.get(request)
        if binding is not None and binding.first_length <= drafts.committed_length and num_accepted >= 0:
            session = binding.session
            self.offered[session.stream.address] += len(drafts.tokens)
            self.verified[session.stream.address] += num_verified
            self.accepted[session.stream.address] += num_accepted
            calibration, address = session.pace.calibration, session.stream.address
            self._results.append(_Result(calibration, address, request, drafts, num_verified, num_accepted))

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
        num_drafts, confidences = _columns([result.drafts for result in results], 0)
        if self._rates is not None:
            lengths = [result.drafts.committed_length for result in results]
            requests = [result.request for result in results]
            confidences = _synthetic(self._rates, requests, lengths, confidences.shape[1])
        num_verified = np.array([result.num_verified for result in results])
        num_accepted = np.array([result.num_accepted for result in results])
        survival = _survival(calibration, num_drafts, confidences)
        is_verified = np.arange(survival.shape[1]) < num_verified[:, None]
        brought = np.where(is_verified, survival, 0.0)
        self.budget.count_offered(survival)
        calibration.count_brought(brought, survival > 0.0)
        calibration.count(confidences, num_verified, num_accepted)
        self.expected[address] = self.expected.get(address, 0.0) + float(brought.sum())


def _columns(drafts: Sequence[ReadyDrafts | None], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of drafts and at least `width` columns of confidences, as in `Offers`."""
    num_drafts = np.array([0 if own is None else len(own.tokens) for own in drafts], np.int64)
    confidences = np.full((len(drafts), int(num_drafts.max(initial=width))), np.nan)
    sure = [(row, own.confidences) for row, own in enumerate(drafts) if own is not None and own.confidences is not None]
    if sure:
        counts = np.zeros(len(drafts), np.int64)
        counts[[row for row, _ in sure]] = num_drafts[[row for row, _ in sure]]
        given = [one for row, own in sure for one in own[: num_drafts[row]]]
        confidences[np.arange(confidences.shape[1]) < counts[:, None]] = given
    return num_drafts, confidences


def _synthetic(rates: np.ndarray, requests: Sequence[Request], lengths: Sequence[int], width: int) -> np.ndarray:
    """Return the rates [S, width] with which the sampler accepts the drafts after `lengths` committed tokens."""
    offset = np.tile(np.arange(width), len(requests))
    accept = np.repeat(np.array([request.keys.accept for request in requests], np.int64), width)
    position = np.repeat(np.array(lengths, np.int64), width) + offset
    return draft_rates(rates, accept, position, offset).reshape(-1, width)


def _survival(calibration: Calibration, num_drafts: np.ndarray, confidences: np.ndarray) -> np.ndarray:
    """Return the survival [S, k], 0 for missing drafts."""
    survival = calibration.survival(confidences)
    return np.where(np.arange(survival.shape[1]) < num_drafts[:, None], survival, 0.0)
