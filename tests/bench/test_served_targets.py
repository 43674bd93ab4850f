"""What benchmarks/served_targets.py says of types of models, and that it sees other logits."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from benchmarks.served_targets import NOT_MADE, OTHERS, REFUSED, SERVED, try_type
from verifier_service import attention_hook


@pytest.mark.parametrize(
    ("model_type", "outcome", "detail"),
    [
        ("mistral", SERVED, "e-0"),
        ("gpt_oss", REFUSED, "it needs s_aux"),
        ("blenderbot", NOT_MADE, "ValueError"),
    ],
)
def test_types_are_told_apart(model_type: str, outcome: str, detail: str) -> None:
    finding = try_type(model_type)
    assert (finding.model_type, finding.outcome) == (model_type, outcome)
    assert detail in finding.detail


def test_other_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention_hook.paged_attention

    def attend_further(*args: Any, window: int | None, **given: Any) -> Tensor:
        return attend(*args, window=None if window is None else window + 1, **given)

    monkeypatch.setattr(attention_hook, "paged_attention", attend_further)
    assert try_type("mistral").outcome == OTHERS
