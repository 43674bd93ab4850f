"""Sizes of captured graphs, a failed capture, and a stream that waits for the host."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftwire.contract.errors import CheckpointError
from draftwire.model.batch_sizes import row_counts
from draftwire.model.kv_cache import BatchBuffers
from draftwire.transport.cuda_driver import CudaDriver
from draftwire.transport.segment import SegmentError
from verifier_service.target import stream_hold
from verifier_service.target.graph_inputs import GraphInputs
from verifier_service.target.graph_sizes import Bucket, Buckets, sequence_counts
from verifier_service.target.step_graph import capture_graph
from verifier_service.target.stream_hold import StreamHold
from verifier_service.target.target import Target


@pytest.mark.parametrize("most", [1, 2, 5, 16, 63, 64, 65, 100, 256, 4096])
def test_sequence_counts_rise_to_the_most_with_little_padding(most):
    counts = sequence_counts(most)
    assert (counts[0], counts[-1]) == (1, most)
    assert counts == sorted(set(counts))
    for below, count in pairwise(counts):
        fewest = below + 1
        assert (count - fewest) / fewest <= (1 / 2 if below < 64 else 1 / 8)
    assert len(counts) < 80


@pytest.mark.parametrize("most", [2, 8, 63, 64, 65, 100, 256, 762, 832, 8512])
def test_row_counts_rise_to_the_most_and_padding_adds_little(most):
    counts = row_counts(most)
    assert counts[-1] == most
    assert counts == sorted(set(counts))
    assert counts[0] <= 64
    for below, count in pairwise(counts):
        assert count - (below + 1) < max(32, (below + 1) / 8)
    assert len(counts) < 60


@pytest.mark.parametrize(
    ("num_sequences", "num_rows", "max_rows", "bucket"),
    [
        (1, 1, 1, Bucket(1, 1, 2, 2)),
        (1, 5, 5, Bucket(1, 5, 5, 5)),
        (5, 5, 1, Bucket(6, 1, 6, 6)),
        (8, 9, 2, Bucket(8, 5, 40, 40)),
        (9, 13, 5, Bucket(12, 5, 24, 24)),
        (9, 36, 4, Bucket(12, 5, 36, 36)),
        (9, 37, 5, Bucket(12, 5, 60, 60)),
        (50, 50, 1, Bucket(50, 1, 50, 50)),
        (50, 51, 2, Bucket(50, 5, 100, 100)),
        (51, 51, 1, None),
        (50, 55, 6, Bucket(50, 64, 64, 64)),
        (3, 250, 240, Bucket(50, 256, 256, 250)),
        (50, 749, 506, Bucket(50, 762, 762, 250)),
        (50, 763, 513, None),
    ],
)
def test_a_step_is_padded_to_the_next_bucket(num_sequences, num_rows, max_rows, bucket):
    buckets = Buckets(50, 5, 762)
    assert buckets.find(num_sequences, num_rows, max_rows, num_sequences) == bucket
    assert bucket is None or bucket in buckets.decoding + buckets.with_prompts


def test_a_step_has_no_bucket_with_fewer_logits_than_it_wants():
    buckets = Buckets(10, 5, 550)
    assert buckets.find(1, 300, 300, 50) == Bucket(10, 320, 320, 50)
    assert buckets.find(1, 300, 300, 51) is None
    assert buckets.find(1, 60, 60, 50) == Bucket(10, 64, 64, 50)
    assert buckets.find(1, 60, 60, 51) is None
    assert Buckets(1, 1, 512).find(1, 300, 300, 1) == Bucket(1, 320, 320, 2)


@pytest.mark.parametrize("rows_per_sequence", range(1, 18))
@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 64])
def test_every_bucket_holds_what_its_graph_is_captured_with(max_num_seqs, rows_per_sequence):
    every = Buckets(max_num_seqs, rows_per_sequence, max_num_seqs * rows_per_sequence + 40)
    buckets = every.decoding + every.with_prompts
    assert len(set(buckets)) == len(buckets)
    buffers = BatchBuffers(max(bucket.num_rows for bucket in buckets), max_num_seqs, 4, torch.device("cpu"))
    for bucket in buckets:
        loaded = buffers.load([], bucket.num_rows, bucket.num_sequences, max_rows=bucket.max_rows)
        sizes = (loaded.num_rows, loaded.num_sequences, loaded.max_rows)
        assert sizes == (bucket.num_rows, bucket.num_sequences, bucket.max_rows)


@pytest.mark.parametrize("rows_per_sequence", [1, 2, 3, 5, 9, 17])
def test_every_step_up_to_the_most_has_a_bucket(rows_per_sequence):
    buckets = Buckets(20, rows_per_sequence, 20 * rows_per_sequence)
    for num_sequences in range(1, 21):
        for num_rows in range(num_sequences, num_sequences * rows_per_sequence + 1):
            fewest = -(-num_rows // num_sequences)
            most = min(num_rows - num_sequences + 1, rows_per_sequence)
            for max_rows in {fewest, most}:
                found = buckets.find(num_sequences, num_rows, max_rows, num_rows)
                assert found in buckets.decoding
                assert found.has_all_logits
                assert found.num_sequences >= num_sequences
                assert found.num_rows >= num_rows
                assert found.max_rows >= max_rows


def test_buckets_come_from_the_largest_on_and_each_once():
    buckets = Buckets(4, 3, 100)
    assert buckets.decoding == [
        *(Bucket(4, 3, 12, 12), Bucket(3, 3, 9, 9), Bucket(2, 3, 6, 6), Bucket(4, 1, 4, 4)),
        *(Bucket(3, 1, 3, 3), Bucket(1, 3, 3, 3), Bucket(2, 1, 2, 2), Bucket(1, 1, 2, 2)),
    ]
    assert buckets.with_prompts == [Bucket(4, 100, 100, 12), Bucket(4, 96, 96, 12), Bucket(4, 64, 64, 12)]


CPU = torch.device("cpu")
BUCKET = Bucket(num_sequences=1, max_rows=2, num_rows=2, num_logit_rows=2)


class EndedCapture:
    """A CUDA graph whose capture was ended by an error."""

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
def test_what_ended_the_capture_is_described(
    graph: EndedCapture, error: Exception, raised: type[Exception], message: str
) -> None:
    def forward(*_: object) -> None:
        if graph.is_capturing:
            raise error

    target = cast("Target", SimpleNamespace(name="asking", forward=forward))
    inputs = GraphInputs([BUCKET], 1, CPU)
    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    with pytest.raises(raised, match=message):
        capture_graph(target, cast("Any", None), inputs, BUCKET, None, stream)
    assert not graph.is_capturing


@pytest.mark.parametrize(
    ("num_rows", "library"), [(31, "cublas"), (32, "cublaslt"), (192, "cublaslt"), (193, "cublas")]
)
def test_the_rows_decide_the_library_of_products(
    graph: EndedCapture, monkeypatch: pytest.MonkeyPatch, num_rows: int, library: str
) -> None:
    preferred, used = ["default"], []

    def preferred_blas_library(given: str | None = None) -> str:
        """Behave like torch's function, which has no effect without a GPU."""
        preferred[0] = given or preferred[0]
        return preferred[0]

    def forward(*_: object) -> None:
        used.append(preferred[0])
        if graph.is_capturing:
            raise RuntimeError("ends the capture")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred_blas_library)
    bucket = Bucket(num_sequences=1, max_rows=num_rows, num_rows=num_rows, num_logit_rows=num_rows)
    target = cast("Target", SimpleNamespace(name="any", forward=forward))
    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    with pytest.raises(CheckpointError):
        capture_graph(target, cast("Any", None), GraphInputs([bucket], 64, CPU), bucket, None, stream)
    assert used == [library] * 2
    assert preferred == ["default"]


class Waits:
    """A driver that records requested waits as (address, value)."""

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
    hold.stop()  # the next pass is held again
    assert word(hold) != waits.asked[1][1]
    assert hold.release(lambda: None)


def test_a_driver_that_cannot_wait_says_so():
    class Library:
        """A driver library in which only `cuStreamWaitValue32_v2` fails."""

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
