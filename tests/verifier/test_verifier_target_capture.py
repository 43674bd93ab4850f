"""A forward pass that no CUDA graph can compute, played on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftwire.contract.errors import CheckpointError
from verifier_service.target.graph_inputs import GraphInputs
from verifier_service.target.graph_sizes import Bucket
from verifier_service.target.step_graph import capture_graph
from verifier_service.target.target import Target

BUCKET = Bucket(num_sequences=1, max_rows=2, num_rows=2, num_logit_rows=2)


class EndedCapture:
    """Of a graph that an error has ended."""

    def __init__(self) -> None:
        self.is_capturing = False

    def capture_begin(self, **_: object) -> None:
        self.is_capturing = True

    def capture_end(self) -> None:
        self.is_capturing = False
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> EndedCapture:
    made = EndedCapture()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return made


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            RuntimeError("CUDA error: operation not permitted\nFor debugging ..."),
            CheckpointError,
            "^asking: its forward pass cannot be a CUDA graph: CUDA error: operation not permitted$",
        ),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError, "^no memory$"),
    ],
)
def test_what_ended_the_capture_is_told(
    graph: EndedCapture, error: Exception, raised: type[Exception], message: str
) -> None:
    def forward(*_: object) -> None:
        if graph.is_capturing:
            raise error

    target = cast("Target", SimpleNamespace(name="asking", forward=forward))
    inputs = GraphInputs([BUCKET], 1, torch.device("cpu"))
    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    with pytest.raises(raised, match=message):
        capture_graph(target, cast("Any", None), inputs, BUCKET, None, stream)
    assert not graph.is_capturing
