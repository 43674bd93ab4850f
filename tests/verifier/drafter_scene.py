"""A drafting scene with one drafter and one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from drafting_scene import (
    RecordedStream,
    Scene,
)

from draftwire.model.tensors import encode_tensor
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.request import Request

GUMBEL = {"draft_sample_method": "gumbel"}
DENSE = {**GUMBEL, "draft_logits": "dense"}


def start(
    config: dict[str, Any] | None = None, deadline_s: float | None = None, *, confidences: bool = False, **request: Any
) -> Any:
    """Return (scene, stream, request) after the rows of a decoding request were sent to a drafter."""
    scene = Scene(config, deadline_s)
    stream = scene.connect(confidences=confidences)
    one = scene.decode(**request)
    scene.flush()
    return scene, stream, one


def move(scene: Scene, *lengths: int) -> tuple[RecordedStream, list[Request]]:
    """Return a new drafter, and requests with these prompt lengths whose drafter was lost: all rows are backlog."""
    first = scene.connect()
    requests = [scene.decode(length) for length in lengths]
    scene.flush()
    scene.disconnect(first)
    return scene.connect(), requests


Change = Callable[[pb.Drafts], Any]


def tokens(*values: int) -> Change:
    def change(answer: pb.Drafts) -> None:
        answer.num_drafts[0] = len(values)
        answer.tokens.CopyFrom(encode_tensor(torch.tensor(values, dtype=torch.int32)))

    return change
