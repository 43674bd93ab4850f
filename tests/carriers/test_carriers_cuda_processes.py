"""GPU memory shared by two processes: tensors arrive, and the memory is freed when one process is killed."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from echo_peer import DTYPE, take
from outgoing import send
from waiting import wait_for

from draftwire.model.devices import make_current
from draftwire.transport import ALL_CARRIERS, Rendezvous, SharedSegments, TensorReceiver, TensorSender
from draftwire.transport.cuda_segment import CudaSegment
from draftwire.transport.segment import SegmentError
from draftwire.v1 import draft_pb2 as pb

PATIENCE_S = 60.0
CPU, FIRST = torch.device("cpu"), torch.device("cuda", 0)
SHM, CUDA_IPC = pb.CARRIER_SHM, pb.CARRIER_CUDA_IPC
MIB = 1 << 20

PAIRS = [
    pytest.param("cuda:0", "cuda:0", marks=pytest.mark.gpu, id="one GPU"),
    pytest.param("cuda:0", "cuda:1", marks=pytest.mark.gpu(2), id="two GPUs"),
]


class Echo:
    """The verifier's side; a drafter in another process sends each tensor back, with 1 added to every element."""

    def __init__(self, device: torch.device, process: subprocess.Popen[bytes], shared: SharedSegments) -> None:
        assert shared.channel is not None
        self.process = process
        self.carriers = {one.carrier for one in (shared.outgoing, shared.incoming) if one is not None}
        self.sender = TensorSender(device, shared.outgoing)
        self._device = device
        self._receiver = TensorReceiver(device, shared.incoming)
        self._channel = shared.channel
        self._last_step = 0

    def exchange(self, num_elements: int) -> str:
        """Send new numbers and check the answer; return where they were: "span" (shared) or "data" (in the message)."""
        self._last_step += 1
        tensor = torch.arange(num_elements, dtype=DTYPE, device=self._device) * self._last_step
        step = pb.DraftStep(step_id=self._last_step, logits_read=self._receiver.generation_read)
        send(self.sender, tensor, step.features)
        assert self._channel.send(step.SerializeToString())
        assert select.select([self._channel], [], [], PATIENCE_S)[0], "no answer"
        ((message, _, _),) = self._channel.receive()
        answer = pb.Drafts.FromString(message)
        self.sender.release(answer.features_read, "features_read")
        assert torch.equal(take(self._receiver, answer.logits, self._device), tensor + 1)
        assert step.features.WhichOneof("storage") == answer.logits.WhichOneof("storage")
        return step.features.WhichOneof("storage")

    def write(self, num_elements: int) -> None:
        """Write a tensor that is never read."""
        send(self.sender, torch.ones(num_elements, dtype=DTYPE, device=self._device), pb.Tensor())


@contextmanager
def echo(device: torch.device, peer: str, size: int = 4 * MIB, **environment: str) -> Iterator[Echo]:
    """Yield the verifier's side; the drafter computes on `peer`, and each direction has a segment of `size` bytes."""
    make_current(device)
    with Rendezvous() as rendezvous, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(rendezvous.serve, ALL_CARRIERS, ALL_CARRIERS, size, device)
        arguments = (rendezvous.encode().SerializeToString().hex(), peer, str(size))
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("echo_peer.py"), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )
        try:
            shared = serving.result(PATIENCE_S)
        except BaseException:
            process.kill()
            rendezvous.close()
            raise
    try:
        yield Echo(device, process, shared)
    finally:
        process.kill()
        process.wait()
        if shared.channel is not None:
            shared.channel.close()


@pytest.mark.parametrize(
    ("device", "peer", "carrier"),
    [
        pytest.param("cpu", "cpu", SHM, id="no GPU"),
        pytest.param("cpu", "cuda:0", SHM, marks=pytest.mark.gpu, id="GPU of the receiver alone"),
        pytest.param("cuda:0", "cpu", SHM, marks=pytest.mark.gpu, id="GPU of the sender alone"),
        pytest.param("cuda:0", "cuda:0", CUDA_IPC, marks=pytest.mark.gpu, id="one GPU"),
        pytest.param("cuda:0", "cuda:1", CUDA_IPC, marks=pytest.mark.gpu(2), id="two GPUs"),
    ],
)
def test_what_one_process_writes_the_other_reads(device, peer, carrier):
    with echo(torch.device(device), peer) as made:
        assert made.carriers == {carrier}
        for step in range(60):  # many times the segment's size
            assert made.exchange((7, 2048, 100_000, MIB // 2)[step % 4]) == "span"


@pytest.mark.gpu(2)
def test_processes_with_one_visible_gpu_each_share_some_memory():
    with echo(FIRST, "cuda:0", CUDA_VISIBLE_DEVICES="1") as made:
        assert made.carriers <= {CUDA_IPC, SHM}
        print("GPUs that the other process does not see:", [pb.Carrier.Name(one) for one in made.carriers])
        for _ in range(20):
            assert made.exchange(100_000) == "span"


def free_bytes(*devices: str) -> list[int]:
    """Return the free memory of GPUs, after this process has emptied its cache."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(device)[0] for device in devices]


SEGMENT, SLACK = 256 * MIB, 64 * MIB


@pytest.mark.parametrize(("device", "peer"), PAIRS)
def test_a_killed_process_harms_nobody_and_leaves_no_memory(device, peer):
    with echo(torch.device(device), peer, SEGMENT) as warm:
        warm.exchange(1000)
    del warm
    devices = sorted({device, peer})
    free_bytes(*devices)
    time.sleep(1)
    before = free_bytes(*devices)
    for _ in range(3):
        with echo(torch.device(device), peer, SEGMENT) as made:
            assert made.carriers == {CUDA_IPC}
            assert made.exchange(MIB) == "span"
            made.process.kill()
            made.process.wait()
            time.sleep(1)
            for _ in range(10):  # the killed receiver's memory is still mapped
                made.write(MIB)
            torch.cuda.synchronize(device)
            (free,) = free_bytes(peer)
            assert free < before[devices.index(peer)] - SEGMENT + SLACK
        del made
        wait_for(
            lambda: all(now > then - SLACK for now, then in zip(free_bytes(*devices), before, strict=True)),
            "all memory is free again",
        )


@pytest.mark.gpu
def test_on_a_gpu_too_files_that_are_no_segment_are_refused():
    make_current(FIRST)
    made, fds = CudaSegment.create(4 * MIB, FIRST)
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for files, size in (
            ([], 4 * MIB),
            ([null], 4 * MIB),
            ([*fds, *fds], 4 * MIB),
            (fds, 8 * MIB),
            (fds, 64 * MIB),
        ):
            with pytest.raises(SegmentError):
                CudaSegment.attach(files, size, FIRST)
    finally:
        for fd in (*fds, null):
            os.close(fd)
    made.write_nonce(bytes(range(32)))
    assert made.read_nonce() == bytes(range(32))


@pytest.mark.gpu(2)
def test_memory_of_another_gpu_is_used_on_the_own_ones_streams():
    make_current(FIRST)
    made, fds = CudaSegment.create(4 * MIB, torch.device("cuda", 1))
    attached = CudaSegment.attach(fds, 4 * MIB, FIRST)
    for fd in fds:
        os.close(fd)
    assert (attached.memory.device, made.memory.device) == (FIRST, torch.device("cuda", 1))
    attached.memory.fill_(7)
    torch.cuda.synchronize(FIRST)
    assert bool((made.memory == 7).all())
