"""Features that leave for a drafter before the host has the tokens of their step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from covering import covering
from drafting_scene import answer_to
from engine_scene import HIDDEN, K, Served, scheduling  # noqa: F401

from draftwire.transport import TensorReceiver, TensorSender
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.sender import Outgoing
from draftwire.v1 import draft_pb2 as pb
from verifier_service.drafters.features import FeatureStore
from verifier_service.drafters.sender import StepSender
from verifier_service.drafters.session import DraftSession, EarlyFeatures
from verifier_service.drafters.stream import Answered

pytestmark = pytest.mark.usefixtures("scheduling")

CPU = torch.device("cpu")
PROMPTS = [[3 + i, 1, 4] for i in range(4)]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each message with rows whether its features were there before. All are what the store has of the rows."""
    was_early: list[bool] = []
    fill = StepSender.fill

    def compared(
        self: StepSender,
        step: pb.DraftStep,
        session: DraftSession,
        store: FeatureStore,
        rows: Any,
        early: EarlyFeatures | None,
    ) -> Outgoing | None:
        features = fill(self, step, session, store, rows, early)
        if features is not None:
            columns = zip(rows.bindings, rows.first_rows, rows.num_rows, strict=True)
            spans = [(one.request.blocks, first, first + count) for one, first, count in columns]
            expected = torch.empty_like(features.tensor)
            store.read(spans, expected)
            assert torch.equal(features.tensor, expected)
            was_early.append(early is not None)
        return features

    monkeypatch.setattr(StepSender, "fill", compared)
    return was_early


def test_they_are_those_of_nearly_every_verify_step(target, sources):
    own = Served(target)
    own.connect_with(lambda step: [5 + step.step_id % 7, 6, 7])
    made = [own.submit(prompt, max_tokens=40, temperature=0.9, seed=i) for i, prompt in enumerate(PROMPTS)]
    own.run(*made)
    assert sum(sources) > 0.5 * len(sources)


HEADS = [[{}], [{"layers": (0, 2)}, {"layers": (1, 2)}], [{"dtype": torch.float16, "row_bytes": 4 * HIDDEN}]]
LIMITS = [{}, {"num_blocks": 9}, {"max_prefill_rows": 2}, {"max_num_seqs": 2}, {"draft_deadline_s": 0.0005}]
KINDS = [{"k": 1}, {"temperature": 0.9, "stop_token_ids": [2, 9]}, {"min_tokens": 8}]


# Of 90 combinations those that have every two values together.
@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "limits", "kind", "scheduling"), covering(HEADS, LIMITS, KINDS, [False, True]), indirect=["scheduling"]
)
def test_whatever_happens_to_requests_features_match_their_rows(target, sources, heads, limits, kind):
    own = Served(target, **limits)
    for head in heads:
        own.connect_with(lambda step: [5 + step.step_id % 7, 6, 7], **head)
    made = [own.submit(prompt, max_tokens=30 - 3 * i) for i, prompt in enumerate(PROMPTS)]
    made += [own.submit(prompt, max_tokens=20 + i, **kind) for i, prompt in enumerate(PROMPTS)]
    own.run(*made)
    assert sources


@pytest.fixture
def segments() -> Iterator[tuple[HostSegment, HostSegment]]:
    """Memory of 16 KiB as both sides see it, 13 steps of three requests."""
    made, fds = HostSegment.create(16384, CPU)
    yield made, HostSegment.attach(fds, 16384, CPU)
    for fd in fds:
        os.close(fd)


def test_room_of_features_that_are_not_sent_comes_back(target, segments):
    """A request that ends with a step is not in its message, which has other features then."""
    own = Served(target)
    ours, theirs = segments
    receiver = TensorReceiver(CPU, theirs)
    storages: list[str | None] = []
    stream = own.connect()
    stream.sender = TensorSender(CPU, ours)

    def on_send(step: pb.DraftStep) -> None:
        if step.num_rows:
            storages.append(step.features.WhichOneof("storage"))
            shape = (sum(step.num_rows), 2 * HIDDEN)
            receiver.claim(step.features, "features", torch.float32, shape).load()
        drafts = answer_to(step)
        drafts.features_read = receiver.generation_read
        own.engine.post(Answered(stream, drafts))

    stream.on_send = on_send
    made: list[Any] = [own.submit([1 + i % 7, 2], max_tokens=2 + i % 5) for i in range(8)]
    own.engine.start()
    for i in range(60):
        own.tokens(made.pop(0))
        made.append(own.submit([1 + i % 7, 2], max_tokens=3 + i % 5, k=K))
    for one in made:
        own.tokens(one)
    own.engine.stop()
    assert len(storages) > 30
    assert set(storages) == {"span"}
