"""benchmarks/draftwire_bench/served_targets.py: outcomes by model type, and the detection of wrong logits."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwire_bench.served_targets import (
    CPU,
    FAILED,
    NOT_MADE,
    OTHERS,
    REFUSED,
    ROUNDING,
    ROUNDS,
    SERVED,
    STEPS,
    Finding,
    Rows,
    compute,
    largest_difference,
    save_small,
    serve,
    try_all,
    try_type,
    worst_rounding,
)
from verifier_service.target import attention_hook
from verifier_service.target.target import load_target

GPU = torch.device("cuda", 0)


@pytest.fixture
def wider_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding-window attention that is one row too wide."""
    attend = attention_hook.paged_attention

    def attend_further(*args: Any, window: int | None, **given: Any) -> Tensor:
        return attend(*args, window=None if window is None else window + 1, **given)

    monkeypatch.setattr(attention_hook, "paged_attention", attend_further)


@pytest.mark.parametrize(
    ("model_type", "dtype", "outcome", "detail"),
    [
        ("mistral", "float32", SERVED, "e-0"),
        ("gpt_oss", "float32", REFUSED, "it needs s_aux"),
        ("blenderbot", "", NOT_MADE, "ValueError"),
    ],
)
def test_types_are_distinguished(model_type: str, dtype: str, outcome: str, detail: str) -> None:
    finding = try_type(model_type)
    assert (finding.model_type, finding.dtype, finding.outcome) == (model_type, dtype, outcome)
    assert detail in finding.detail


@pytest.mark.gpu
def test_types_are_distinguished_on_a_gpu() -> None:
    # jetmoe's forward pass copies the number of rows per expert to the host.
    refused, *served = try_all(["jetmoe", "mistral", "mixtral"], GPU, 1)
    assert (refused.dtype, refused.outcome) == ("float32", REFUSED), refused.detail
    assert "its forward pass cannot be a CUDA graph" in refused.detail
    for finding, dtype, detail in zip(served, ("float32", "bfloat16"), ("e-0", "transformers' "), strict=True):
        assert (finding.dtype, finding.outcome) == (dtype, SERVED), finding.detail
        assert detail in finding.detail


@pytest.mark.usefixtures("wider_window")
def test_other_logits_are_seen() -> None:
    assert try_type("mistral").outcome == OTHERS


def rounding_of_mixtral(directory: Path) -> float:
    """Return the rounding of served rows divided by transformers' own, as on a GPU but computed on the CPU."""
    assert save_small("mixtral", directory, GPU) == torch.bfloat16
    served = serve(load_target(directory, "mixtral", torch.bfloat16, CPU))
    ours, own = worst_rounding(served, compute(directory, torch.bfloat16, CPU), compute(directory, torch.float32, CPU))
    return ours / own


def test_bfloat16_is_as_far_from_float32_as_transformers_own(tmp_path: Path) -> None:
    assert rounding_of_mixtral(tmp_path) < ROUNDING


@pytest.mark.usefixtures("wider_window")
def test_other_logits_are_seen_in_bfloat16(tmp_path: Path) -> None:
    assert rounding_of_mixtral(tmp_path) > ROUNDING


def in_all_rounds(*rows: list[float]) -> list[Rows]:
    """Return all steps of all rounds, with these rows as logits and as states."""
    return [Rows(torch.tensor(rows), torch.tensor(rows))] * (len(STEPS) * ROUNDS)


def test_largest_difference_is_of_the_largest_element() -> None:
    assert (
        largest_difference(
            [Rows(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0]]))],
            [Rows(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]))],
        )
        == 0.5
    )


def test_differences_that_are_no_numbers_are_not_small() -> None:
    exact = in_all_rounds([1.0, 1.0])
    assert math.isnan(largest_difference([*exact[1:], Rows(torch.tensor([[math.nan, 1.0]]), exact[0].states)], exact))
    ours, own = worst_rounding(in_all_rounds([math.nan, 1.0]), in_all_rounds([1.0, 1.5]), exact)
    assert not ours <= ROUNDING * own


def test_rounding_is_that_of_the_median_row() -> None:
    exact = in_all_rounds([0.0, 4.0], [0.0, 4.0], [0.0, 4.0])
    served = in_all_rounds([0.0, 4.0], [0.0, 5.0], [9.0, 9.0])
    own = in_all_rounds([0.0, 6.0], [0.0, 6.0], [0.0, 6.0])
    assert worst_rounding(served, own, exact) == (0.25, 0.5)


def test_rounding_is_that_of_the_worst_step() -> None:
    exact, own = in_all_rounds([0.0, 4.0]), in_all_rounds([0.0, 5.0])
    served = [
        Rows(torch.tensor([[0.0, 8.0]]), rows.states) if i % len(STEPS) == 2 else rows for i, rows in enumerate(own)
    ]
    assert worst_rounding(served, own, exact) == (1.0, 0.25)


def dies_of_mistral(model_type: str, _device: torch.device) -> Finding:
    if model_type == "mistral":
        os.kill(os.getpid(), signal.SIGKILL)
    return Finding(model_type, "", NOT_MADE, "")


def test_a_type_that_its_process_dies_of_has_failed_alone() -> None:
    found = try_all(["llama", "mistral", "qwen2"], CPU, 1, dies_of_mistral)
    assert [finding.outcome for finding in found] == [NOT_MADE, FAILED, NOT_MADE]
    assert "BrokenProcessPool" in found[1].detail
