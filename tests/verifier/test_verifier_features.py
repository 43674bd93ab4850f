"""Which rows' features are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting_scene import capture_every_row
from engine_scene import HIDDEN, K, Served, make_target

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.model.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ForwardOutput
from verifier_service.drafters.features import FeatureStore, copy_runs, slots_of

BEFORE, PROMPT = [2] * 33, [5] * 33


def features_of(steps: list[pb.DraftStep]) -> torch.Tensor:
    """[rows, width] of what was sent."""
    sent = [
        decode_tensor(step.features, "features", torch.float32, (sum(step.num_rows), 2 * HIDDEN))
        for step in steps
        if step.num_rows
    ]
    return torch.cat(sent)


@pytest.mark.full
def test_rows_without_features_are_never_sent_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests, one after the other, in a cache of three blocks: one that drafts, one without drafts that takes
    its blocks, and one with the same prompt that drafts."""
    stores: list[FeatureStore] = []
    capture = FeatureStore.capture

    def note(store: FeatureStore, output: ForwardOutput) -> None:
        stores.append(store)
        capture(store, output)

    monkeypatch.setattr(FeatureStore, "capture", note)
    target = make_target()
    expected, served = (Served(target, num_blocks=4) for _ in range(2))
    expected_stream, stream = expected.connect(), served.connect()
    expected.run(expected.submit(PROMPT))
    served.engine.start()
    served.tokens(served.submit(BEFORE))
    store = stores[-1]
    assert any(store.holds(block) for block in range(4))
    capture_every_row(store, HIDDEN, 4)  # as after requests that filled their last blocks too
    served.tokens(served.submit(PROMPT, k=0))
    num_before = len(stream.steps)
    served.tokens(served.submit(PROMPT, k=K))
    served.engine.stop()
    steps = stream.steps[num_before:]
    assert list(steps[0].opened.first_rows) == [0]
    torch.testing.assert_close(features_of(steps), features_of(expected_stream.steps))


SPANS = [([3, 4, 7, 8], 5, 4 * BLOCK_SIZE - 3), ([6, 2, 1], BLOCK_SIZE - 1, BLOCK_SIZE), ([6, 2, 1], 16, 33)]
"""(blocks, first row, last row) of pieces of which some lie side by side."""


def numbered_store(device: str) -> FeatureStore:
    """Nine blocks whose rows have their place in all columns."""
    target: Any = SimpleNamespace(hidden_size=HIDDEN, dtype=torch.float32, device=torch.device(device))
    store = FeatureStore(target, (1, 2), num_blocks=9)
    capture_every_row(store, HIDDEN, 9, target.device)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_are_read_are_those_of_their_blocks(dtype: torch.dtype) -> None:
    store = numbered_store("cpu")
    out = torch.empty(len(slots_of(SPANS)), 2 * HIDDEN, dtype=dtype)
    store.read(SPANS, out)
    assert_rows_of_spans(out)


@pytest.mark.gpu
@pytest.mark.parametrize("is_steps", [True, False], ids=["the steps' stream", "another one"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_rows_that_are_read_from_a_gpu_are_those_of_their_blocks(device: str, is_steps: bool) -> None:
    store = numbered_store("cuda")
    shape = len(slots_of(SPANS)), 2 * HIDDEN
    out = torch.empty(shape, device=device) if device == "cuda" else torch.empty(shape, pin_memory=True)
    with torch.cuda.stream(torch.cuda.default_stream() if is_steps else torch.cuda.Stream()):
        store.read(SPANS, out)
    torch.cuda.synchronize()
    assert_rows_of_spans(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copied_rows_are_those_of_their_places(dtype: torch.dtype) -> None:
    rows = torch.arange(9.0 * BLOCK_SIZE)[:, None].expand(-1, 5).contiguous()
    slots = slots_of(SPANS)
    out = torch.empty(len(slots), 5, dtype=dtype)
    copy_runs(rows, slots, out)
    assert_rows_of_spans(out)


def assert_rows_of_spans(out: torch.Tensor) -> None:
    expected = [
        blocks[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE
        for blocks, first, last in SPANS
        for row in range(first, last)
    ]
    assert out[:, 0].tolist() == expected
    assert torch.equal(out, out[:, :1].expand_as(out))
