"""Features that the verifier fuses before sending."""

from __future__ import annotations

import asyncio
import gc
import os
from types import AsyncGeneratorType
from typing import Any

import pytest
import torch
from link_scene import HIDDEN, Drafter, Linked, end, linked, make_info, on_loop, serve

from draftwire.model.fusion import FeatureFusion
from draftwire.v1 import draft_pb2 as pb
from verifier_service.drafters.features import FeatureKind
from verifier_service.drafters.stream import Connected

AT_ONCE_S = 15.0  # below a link's wait for a hello


def fusing_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """Return a drafter whose head fuses two layers' features of width 2 into states of width 3."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2 * HIDDEN, generator=draw).bfloat16()
    fusion = FeatureFusion(weight, [torch.rand(HIDDEN, generator=draw).bfloat16() for _ in range(2)], 1e-5)
    drafter = Drafter(make_info(fusion=fusion.describe(), **changes))
    drafter.fusion_data = b"".join(fusion.chunks())
    return drafter


@on_loop
async def test_a_head_that_fuses_gets_fused_features():
    drafter = fusing_drafter()
    async with linked(drafter) as own:
        head = (await own.connected()).head
        assert own.link.status.features_are_fused
        assert own.link.status.feature_row_bytes == head.row_bytes == 2 * 3
    (hello,) = drafter.hellos
    assert (hello.features.width, hello.features.fused_for) == (3, "f00d")
    assert list(hello.features.layers) == [1, 3]
    assert drafter.fusion_requests == ["f00d"]
    assert b"".join(head.fusion.chunks()) == drafter.fusion_data
    assert (head.width, head.kind) == (3, FeatureKind((1, 3), f"f00d {drafter.info.fusion.digest}"))


@on_loop
async def test_the_operator_can_have_features_sent_as_they_are():
    drafter = fusing_drafter()
    async with linked(drafter, fuses_features=False) as own:
        head = (await own.connected()).head
        assert (head.fusion, head.kind, head.width) == (None, FeatureKind((1, 3)), 4)
        assert not own.link.status.features_are_fused
    assert (drafter.hellos[0].features, drafter.fusion_requests) == (drafter.info.features, [])


@on_loop
async def test_fusion_that_saves_nothing_is_left_to_the_drafter():
    drafter = fusing_drafter()
    drafter.info.fusion.width = 4
    async with linked(drafter) as own:
        assert (await own.connected()).head.fusion is None
    assert drafter.fusion_requests == []


@on_loop
async def test_equal_heads_share_weights_and_get_their_own_features():
    one, other = fusing_drafter(5), fusing_drafter(5, head_fingerprint="0ddb")
    async with linked(one) as own:
        heads = [(await own.connected()).head]
        async with linked(other) as second:
            heads.append((await second.connected()).head)
    assert heads[0].fusion is heads[1].fusion
    assert heads[0].kind != heads[1].kind
    assert len(one.fusion_requests + other.fusion_requests) == 1


@on_loop
async def test_drafters_that_say_no_hello_delay_no_other():
    """The event loop's executor has few threads; a drafter may take a minute until its hello."""

    class Silent(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: ARG002, N802
            await anext(request_iterator)
            self.hellos.append(pb.VerifierHello())
            await asyncio.Event().wait()
            yield pb.DraftResponse()

    silent = Silent()
    server, port = await serve(silent)
    waiting = [Linked(port, {}) for _ in range(min(32, (os.cpu_count() or 1) + 4))]
    while len(silent.hellos) < len(waiting):
        await asyncio.sleep(0.01)
    try:
        async with linked(fusing_drafter(9)) as own:
            event = await own.next(AT_ONCE_S)
            assert isinstance(event, Connected)
            assert event.stream.head.fusion is not None
    finally:
        for one in waiting:
            await end(one)
        await server.stop(None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda drafter: setattr(drafter, "fusion_data", drafter.fusion_data[:-1]), "must be 32 bytes"),
        (lambda drafter: setattr(drafter, "fusion_data", drafter.fusion_data * 1000), "must be 32 bytes"),
        (lambda drafter: setattr(drafter, "fusion_data", bytes(32)), "fusion.digest"),
        (lambda drafter: setattr(drafter.info.fusion, "num_norms", 7), "fusion does not fit: width 3, num_norms 7"),
        (lambda drafter: drafter.hello.update(info=make_info(head_fingerprint="0ddb")), "the head has changed"),
    ],
    ids=["too little", "too much", "other weights", "no such fusion", "changed head"],
)
@on_loop
async def test_weights_that_are_not_the_heads_are_refused(change, text):
    drafter = fusing_drafter(7)
    change(drafter)
    async with linked(drafter) as own:
        assert text in await own.refused()
        assert own.events.empty()


@on_loop
async def test_no_garbage_is_left_of_weights_that_are_too_many():
    drafter = fusing_drafter(8)
    drafter.fusion_data *= 1000
    async with linked(drafter) as own:
        await own.refused()
        iterators = [one for one in gc.get_objects() if type(one) is AsyncGeneratorType]
        assert [one for one in iterators if "grpc" in one.ag_code.co_filename and one.ag_frame is not None] == []
