"""Which rows' features are kept."""

from __future__ import annotations

import torch
from engine_scene import HIDDEN, K, Served, make_target

from draftwire.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb

BEFORE, PROMPT = [2] * 33, [5] * 33


def features_of(steps: list[pb.DraftStep]) -> torch.Tensor:
    """[rows, width] of what was sent."""
    sent = [
        decode_tensor(step.features, "features", torch.float32, (sum(step.num_rows), 2 * HIDDEN))
        for step in steps
        if step.num_rows
    ]
    return torch.cat(sent)


def test_features_of_another_request_are_never_sent_for_rows_that_were_computed_without() -> None:
    """Three requests, one after the other, in a cache of three blocks: one that drafts, one without drafts that takes
    its blocks, and one with the same prompt that drafts."""
    target = make_target()
    expected, served = (Served(target, num_blocks=4) for _ in range(2))
    expected_stream, stream = expected.connect(), served.connect()
    expected.engine.start()
    expected.tokens(expected.submit(PROMPT))
    expected.engine.stop()
    served.engine.start()
    served.tokens(served.submit(BEFORE))
    (store,) = served.engine._stores.by_kind.values()
    assert store._is_written.any()
    store._is_written[:] = True  # as after requests that filled their last blocks too
    served.tokens(served.submit(PROMPT, k=0))
    num_before = len(stream.steps)
    served.tokens(served.submit(PROMPT, k=K))
    served.engine.stop()
    steps = stream.steps[num_before:]
    assert list(steps[0].opened.first_rows) == [0]
    torch.testing.assert_close(features_of(steps), features_of(expected_stream.steps))
