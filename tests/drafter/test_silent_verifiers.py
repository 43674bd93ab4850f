"""A drafter ends a stream on which no whole message arrives."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from half_sent import HalfSender
from served import ServedDrafter, hello, step_message

from drafter_service.server import stream as stream_module
from draftwire.v1 import draft_pb2 as pb

SILENCE_S = 1.0
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SILENCE_S", SILENCE_S)


def test_a_silent_stream_ends(drafter: ServedDrafter) -> None:
    code, text = drafter.connect().error()
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert text == "no whole message has arrived within 1 s; a verifier sends one every 5 s"


def test_keep_alives_hold_a_stream_open(drafter: ServedDrafter) -> None:
    stream = drafter.connect()
    until = time.monotonic() + 2 * SILENCE_S
    while time.monotonic() < until:
        stream.send(pb.KeepAlive())
        time.sleep(SILENCE_S / 10)
    assert stream.ask(step_message(1)).drafts.step_id == 1  # keep-alives have no answers
    stream.end()
    assert stream.error()[0] == grpc.StatusCode.OK


@pytest.mark.parametrize("short", [1, 1 << 20], ids=["by_a_byte", "by_most"])
def test_a_half_sent_step_ends_its_stream(drafter: ServedDrafter, short: int) -> None:
    first = pb.DraftRequest(hello=hello()).SerializeToString()

    async def send_half() -> set[int]:
        async with HalfSender(drafter.address) as client:
            call = await client.begin("/draftwire.v1.Drafting/Draft")
            await client.send(call, len(first), 0, first)
            await client.send(call, (1 << 20) + 16, short)
            await client.wait_for_ends(1, WAIT_S)
            return client.dropped

    assert asyncio.run(send_half()) == set()  # the call ended with a status
