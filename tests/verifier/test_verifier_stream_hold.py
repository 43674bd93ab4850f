"""A stream that waits for the host, and one that is not left waiting."""

from __future__ import annotations

import time

import pytest
import torch

from draftwire.transport.cuda_driver import CudaDriver
from draftwire.transport.segment import SegmentError
from verifier_service.target import stream_hold
from verifier_service.target.stream_hold import StreamHold

CPU = torch.device("cpu")


class Waits:
    """What a driver was asked for: (address, value)."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, stream: int, address: int, value: int) -> None:  # noqa: ARG002
        self.asked.append((address, value))


def word(hold: StreamHold) -> int:
    return int(hold.word.item())


def test_the_word_gets_the_awaited_value_once_all_is_written():
    waits, seen = Waits(), []
    hold = StreamHold(CPU, waits)
    for _ in range(3):
        hold.stop()
        address, value = waits.asked[-1]
        assert address == hold.word.data_ptr()
        assert word(hold) != value
        assert hold.release(lambda: seen.append(word(hold)))
        assert word(hold) == value
        assert seen.pop() != value
    assert len({value for _, value in waits.asked}) == 3


def test_an_unreleased_stream_continues_and_its_result_is_unused(monkeypatch):
    monkeypatch.setattr(stream_hold, "MOST_HELD_S", 0.2)
    waits, written = Waits(), []
    hold = StreamHold(CPU, waits)
    hold.stop()
    assert word(hold) == 0
    deadline = time.monotonic() + 10
    while word(hold) != waits.asked[0][1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert word(hold) == waits.asked[0][1]
    assert not hold.release(lambda: written.append(1))
    assert written == []
    hold.stop()  # and the next one is held again
    assert word(hold) != waits.asked[1][1]
    assert hold.release(lambda: None)


def test_a_driver_that_cannot_wait_says_so():
    class Library:
        """All functions succeed but for one."""

        def __getattr__(self, name: str) -> object:
            def function(*_: object) -> int:
                return 801 if name == "cuStreamWaitValue32_v2" else 0

            return function

    hold = StreamHold(CPU, CudaDriver(Library()).wait_for_value)
    with pytest.raises(SegmentError, match=r"^cuStreamWaitValue32_v2: .* \(CUDA error 801\)$"):
        hold.stop()
    assert not hold.release(lambda: None)


@pytest.mark.gpu
def test_a_held_launch_reads_what_was_written_before_the_release():
    device = torch.device("cuda")
    hold = StreamHold(device)
    source = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    for number in range(1, 50):
        found = torch.zeros(8, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        hold.stop()
        found.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if number % 10 == 0:
            time.sleep(0.01)
        assert not event.query()
        assert hold.release(lambda number=number: source.fill_(number))
        assert found.tolist() == [number] * 8
