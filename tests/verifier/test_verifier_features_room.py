"""Room for features in shared memory, where they are not sent."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from drafting_scene import CPU, Scene

from draftwire.transport import TensorSender
from draftwire.transport.host_segment import HostSegment
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ScheduledRows
from verifier_service.drafters.features import FeatureStore
from verifier_service.drafters.session import DraftSession, EarlyFeatures

SIZE = 4096
NUM_IDS = (SIZE - 128) // 4  # which take all of it


def begin(scene: Scene) -> dict[DraftSession, EarlyFeatures]:
    """What goes ahead of a step of the requests' last tokens alone."""
    works = [ScheduledRows(one, len(one.tokens) - 1, one.tokens[-1:], None, samples=True) for one in scene.requests]
    return scene.drafting.announce(works, torch.ones(len(works), 2, dtype=torch.int64), scene.stores)


@pytest.mark.parametrize("has_landed", [False, True], ids=["flies", "has-landed"])
def test_a_drafter_that_goes_in_mid_step_leaves_nothing_mapped(has_landed):
    """Its session is freed at once, whatever keeps the step: Python looks for cycles seldom, and to unmap memory of a
    GPU while a step is held would wait for that step."""
    scene = Scene()
    stream = scene.connect()
    scene.decode()
    scene.flush()
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
    """Those of the first of two drafters are there when there is no memory for those of the second."""
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
