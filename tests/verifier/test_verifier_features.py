"""The rows whose features are stored, and when features are sent to a drafter."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import covering
from drafter_scene import start
from drafting_scene import CPU, Scene, answer_to, capture_every_row
from engine_scene import (
    HIDDEN,
    K,
    Served,
    features_of,
    make_target,
)

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.transport import TensorReceiver, TensorSender
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.sender import Outgoing
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ForwardOutput, ScheduledRows
from verifier_service.drafters.features import FeatureStore, copy_runs, slots_of
from verifier_service.drafters.sender import StepSender
from verifier_service.drafters.session import DraftSession, EarlyFeatures
from verifier_service.drafters.stream import Answered

BEFORE, PROMPT = [2] * 33, [5] * 33


@pytest.mark.full
def test_rows_without_features_are_never_sent_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests run one after another in a cache of three blocks. The first has drafts. The second has none and
    takes the first's blocks. The third has drafts and the second's prompt."""
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
    with served:
        served.tokens(served.submit(BEFORE))
        store = stores[-1]
        assert any(store.holds(block) for block in range(4))
        capture_every_row(store, HIDDEN, 4)  # as if requests had filled their last blocks too
        served.tokens(served.submit(PROMPT, k=0))
        num_before = len(stream.steps)
        served.tokens(served.submit(PROMPT, k=K))
    steps = stream.steps[num_before:]
    assert list(steps[0].opened.first_rows) == [0]
    torch.testing.assert_close(features_of(steps), features_of(expected_stream.steps))


SPANS = [([3, 4, 7, 8], 5, 4 * BLOCK_SIZE - 3), ([6, 2, 1], BLOCK_SIZE - 1, BLOCK_SIZE), ([6, 2, 1], 16, 33)]
"""(blocks, first row, end row), in blocks of which some are adjacent in the cache."""


def numbered_store(device: str) -> FeatureStore:
    """Return a store of nine blocks; every column of a row is the row's index in the cache."""
    target: Any = SimpleNamespace(hidden_size=HIDDEN, dtype=torch.float32, device=torch.device(device))
    store = FeatureStore(target, (1, 2), num_blocks=9)
    capture_every_row(store, HIDDEN, 9, target.device)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_are_read_are_those_of_their_blocks(dtype: torch.dtype) -> None:
    out = torch.empty(len(slots_of(SPANS)), 2 * HIDDEN, dtype=dtype)
    numbered_store("cpu").read(SPANS, out)
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


SIZE = 4096
NUM_IDS = (SIZE - 128) // 4  # ids that fill the segment


def begin(scene: Scene) -> dict[DraftSession, EarlyFeatures]:
    """Announce a step with only the last token of each request; return its early features."""
    works = [ScheduledRows(one, len(one.tokens) - 1, one.tokens[-1:], None, samples=True) for one in scene.requests]
    return scene.drafting.announce(works, torch.ones(len(works), 2, dtype=torch.int64), scene.stores)


@pytest.mark.parametrize("has_landed", [False, True], ids=["flies", "has-landed"])
def test_a_drafter_that_goes_in_mid_step_leaves_nothing_mapped(has_landed):
    """The session is freed at once, without the garbage collector. Unmapping its GPU memory later might wait for a step
    that waits for drafts."""
    scene, stream, _ = start()
    begun = begin(scene)
    session = weakref.ref(next(iter(begun)))
    gc.collect()
    gc.disable()
    try:
        if has_landed:
            scene.drafting.commit(begun)
        scene.disconnect(stream)
        if not has_landed:
            scene.drafting.commit(begun)
        assert session() is None
    finally:
        gc.enable()


def test_room_of_features_that_cannot_be_read_comes_back(monkeypatch):
    """The first drafter's features are read; reading the second drafter's features fails for lack of memory."""
    scene = Scene()
    senders = []
    for layers in ((1, 3), (0, 3)):
        stream = scene.connect(layers=layers)
        stream.sender = TensorSender(CPU, HostSegment.unshared(SIZE, CPU))
        senders.append(stream.sender)
        scene.decode()
    scene.flush()
    is_read = iter([True])

    def fail_second(*_: object) -> None:
        if not next(is_read, False):
            raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "read_accepted_rows", fail_second)
        with pytest.raises(MemoryError):
            begin(scene)
    scene.flush()
    for sender in senders:
        sender.release(1, "drafts.features_read")
        assert sender.begin(torch.int32, (NUM_IDS,)).carrier == pb.CARRIER_SHM


PROMPTS = [[3 + i, 1, 4] for i in range(4)]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether the features of each message were copied early; check that all features equal the store's rows."""
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


@pytest.mark.usefixtures("scheduling")
def test_nearly_every_verify_step_sends_its_features_early(target, sources):
    own = Served(target)
    own.connect_with(lambda step: [5 + step.step_id % 7, 6, 7])
    made = [own.submit(prompt, max_tokens=40, temperature=0.9, seed=i) for i, prompt in enumerate(PROMPTS)]
    own.run(*made)
    assert sum(sources) > 0.5 * len(sources)


HEADS = [[{}], [{"layers": (0, 2)}, {"layers": (1, 2)}], [{"dtype": torch.float16, "row_bytes": 4 * HIDDEN}]]
LIMITS = [{}, {"num_blocks": 9}, {"max_prefill_rows": 2}, {"max_num_seqs": 2}, {"draft_deadline_s": 0.0005}]
KINDS = [{"k": 1}, {"temperature": 0.9, "stop_token_ids": [2, 9]}, {"min_tokens": 8}]


# A subset of the 90 combinations that covers every pair of values.
@pytest.mark.full
@pytest.mark.usefixtures("scheduling")
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
    """Yield a segment of 16 KiB as both sides map it, with room for a few steps."""
    made, fds = HostSegment.create(16384, CPU)
    yield made, HostSegment.attach(fds, 16384, CPU)
    for fd in fds:
        os.close(fd)


@pytest.mark.usefixtures("scheduling")
def test_room_of_features_that_are_not_sent_comes_back(target, segments):
    """A message omits requests that ended with its step, and then does not use the step's early features."""
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
    with own:
        for i in range(60):
            own.tokens(made.pop(0))
            made.append(own.submit([1 + i % 7, 2], max_tokens=3 + i % 5, k=K))
        for one in made:
            own.tokens(one)
    assert len(storages) > 30
    assert set(storages) == {"span"}
