"""Verification with a known error fails the chi-square test of test_kernels_law by a wide margin."""

import pytest
import torch
from markov import Case, chi_square_ratio, simulate
from torch import Tensor

from draftwire_kernels import DraftLogits, StreamKeys
from draftwire_kernels.reference import distribution, noise, rejection

BLOWN = 3.0
"""Least ratio of a mutant's chi-square to the quantile at 1 - 1e-6."""


def _ratio(case: Case) -> float:
    return chi_square_ratio(simulate(case)[0], case.options)


def share_proposal(keys: StreamKeys) -> StreamKeys:
    return keys._replace(resample=keys.proposal)


@pytest.mark.parametrize("form", ["one-hot", "dense", "reduced", "top-n"])
def test_resampling_with_the_proposal_noise_fails(form: str) -> None:
    assert _ratio(Case(form, edit_keys=share_proposal)) > BLOWN


def test_resampling_with_proposal_noise_at_offset_0_fails_block() -> None:
    assert _ratio(Case("dense", "block", edit_keys=share_proposal)) > BLOWN


@pytest.mark.parametrize("form", ["greedy", "one-hot"])
def test_sampling_p_for_the_residual_fails_without_draft_logits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "without_draft", lambda scores, _tokens: scores)
    assert _ratio(Case(form)) > BLOWN


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampling_p_for_the_residual_fails_with_draft_logits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, *_: p.clone())
    assert _ratio(Case("dense", method)) > BLOWN


def test_residual_without_its_weight_fails_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q, *_: (p - q).clamp_(min=0))
    assert _ratio(Case("dense", "block")) > BLOWN


def previous_row(logits: DraftLogits) -> DraftLogits:
    ids = logits.token_ids
    return DraftLogits(logits.logits.roll(1, 0), ids.roll(1, 0) if ids is not None and ids.ndim == 2 else ids)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("form", ["dense", "reduced"])
def test_draft_logits_of_another_row_fail(form: str, method: str) -> None:
    assert _ratio(Case(form, method, edit_draft_logits=previous_row)) > BLOWN


def test_noise_without_the_draft_offset_fails_block(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = noise.row_state

    def unkeyed(key: Tensor, position: Tensor, _offset: Tensor | int) -> Tensor:
        return keyed(key, position, 0)

    monkeypatch.setattr(noise, "row_state", unkeyed)
    monkeypatch.setattr(distribution, "row_state", unkeyed)
    assert _ratio(Case("dense", "block")) > BLOWN


def test_noise_keyed_by_slot_in_place_of_the_stream_key_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = noise.row_state

    def by_slot(key: Tensor, position: Tensor, offset: Tensor | int) -> Tensor:
        return keyed(torch.arange(key.shape[0]) % 97, position, offset)

    monkeypatch.setattr(noise, "row_state", by_slot)
    monkeypatch.setattr(distribution, "row_state", by_slot)
    assert _ratio(Case("dense")) > BLOWN
