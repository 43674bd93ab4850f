"""GPU shared memory, tested without a GPU: struct layouts, driver errors, negotiation, and untrusted peers."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_driver import GRANULARITY, FakeDriver
from open_files import open_files

from draftwire.transport import Rendezvous, SharedSegments, cuda_segment, meet
from draftwire.transport import rendezvous as rendezvous_module
from draftwire.transport.cuda_driver import CudaDriver, MemAccessDesc, MemAllocationProp, MemLocation
from draftwire.transport.cuda_segment import CudaSegment
from draftwire.transport.dlpack import tensor_at
from draftwire.transport.segment import SegmentError
from draftwire.v1 import draft_pb2 as pb

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)
SHM, BYTES, CUDA_IPC = pb.CARRIER_SHM, pb.CARRIER_BYTES, pb.CARRIER_CUDA_IPC
ALL = (CUDA_IPC, SHM, BYTES)
SIZE = GRANULARITY - 100


# Layouts of cuda.h.


def test_structures_are_laid_out_as_in_cuda_h():
    assert [ctypes.sizeof(one) for one in (MemLocation, MemAllocationProp, MemAccessDesc)] == [8, 32, 12]
    fields = ("location", "win32HandleMetaData", "compressionType", "usage")
    assert [getattr(MemAllocationProp, name).offset for name in fields] == [8, 16, 24, 26]
    assert MemAccessDesc.flags.offset == 8


class FakeLibrary:
    """A fake libcuda.so.1, in which one function may fail.

    Attributes
    ----------
    calls
        Names of the functions that were called.
    """

    NAMES = (
        *("cuInit", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemRelease", "cuMemExportToShareableHandle"),
        *("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemAddressFree", "cuMemMap", "cuMemUnmap"),
        *("cuMemSetAccess", "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"),
    )

    def __init__(self, failing: str = "", status: int = 2) -> None:
        self.calls: list[str] = []
        self.arguments: dict[str, tuple] = {}
        for name in self.NAMES:
            setattr(self, name, self._function(name, status if name == failing else 0))

        def error_string(_status: int, text: object) -> int:
            text._obj.value = b"out of memory"
            return 0

        self.cuGetErrorString = error_string

    def _function(self, name: str, status: int) -> Callable[..., int]:
        def function(*arguments: object) -> int:
            self.calls.append(name)
            self.arguments[name] = arguments
            return status

        return function


def test_an_error_names_the_function_and_what_the_driver_says():
    with pytest.raises(SegmentError, match=r"^cuMemCreate: out of memory \(CUDA error 2\)$"):
        CudaDriver(FakeLibrary("cuMemCreate")).allocate(1 << 21, GPU)
    with pytest.raises(SegmentError, match=r"^cuInit: "):
        CudaDriver(FakeLibrary("cuInit"))


def test_memory_is_asked_for_of_the_device_and_as_a_file():
    library = FakeLibrary()
    CudaDriver(library).allocate(1 << 21, GPU)
    size, prop = library.arguments["cuMemCreate"][1], library.arguments["cuMemCreate"][2]._obj
    assert (size, prop.type, prop.requestedHandleTypes) == (1 << 21, 1, 1)
    assert (prop.location.type, prop.location.id) == (1, 3)


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemMap", ["cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_a_mapping_that_fails_is_undone(failing, undone):
    library = FakeLibrary(failing)
    with pytest.raises(SegmentError, match=failing):
        CudaDriver(library).map(7, 1 << 21, GPU)
    assert library.calls[library.calls.index(failing) + 1 :] == undone


def test_without_a_driver_or_a_gpu_there_is_no_such_memory():
    with pytest.raises(SegmentError, match="no CUDA driver"):
        CudaDriver(object())
    with pytest.raises(SegmentError, match="cpu has no CUDA memory to share"):
        CudaSegment.create(SIZE, CPU, CudaDriver(FakeLibrary()))


# Memory at an address as a tensor.


def test_a_tensor_shows_the_memory_at_an_address():
    memory = (ctypes.c_ubyte * 10)(*range(10))
    tensor = tensor_at(ctypes.addressof(memory), 10, CPU)
    view = tensor[3:]
    view[0] = 99
    del tensor
    assert memory[3] == 99
    memory[4] = 77
    assert view.tolist() == [99, 77, 5, 6, 7, 8, 9]
    assert (view.dtype, view.device) == (torch.uint8, CPU)


# Segments.


def test_a_segment_is_one_memory_until_its_last_reference():
    driver, files = FakeDriver(), open_files()
    made, fds = CudaSegment.create(SIZE, CPU, driver)
    attached = CudaSegment.attach(fds, SIZE, CPU, driver)
    for fd in fds:
        os.close(fd)
    assert made.size == attached.size == SIZE
    attached.write_nonce(bytes(range(32)))
    assert made.read_nonce() == bytes(range(32))
    assert (len(driver.handles), len(driver.mappings)) == (0, 2)
    del made, attached
    assert not open_files() - files
    assert not driver.mappings


@pytest.mark.parametrize("failing", ["allocate", "export", "map"])
def test_a_segment_that_cannot_be_made_leaves_nothing(failing):
    driver, files = FakeDriver(), open_files()

    def refuse(*_: object) -> int:
        raise SegmentError("no memory today")

    setattr(driver, failing, refuse)
    with pytest.raises(SegmentError, match="no memory today"):
        CudaSegment.create(SIZE, CPU, driver)
    assert (driver.handles, driver.mappings, open_files() - files) == ({}, {}, {})


def null(_fds: list[int]) -> list[int]:
    return [os.open("/dev/null", os.O_RDWR)]


UNSAFE: dict[str, tuple[Callable[[list[int]], list[int]], int, str]] = {
    "no file": (lambda _: [], SIZE, "described by 1 file, not 0"),
    "two files": (lambda fds: 2 * fds, SIZE, "described by 1 file, not 2"),
    "a device": (null, SIZE, "cuMemImportFromShareableHandle"),
    "smaller than said": (lambda fds: fds, GRANULARITY + 1, "cuMemMap"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_files_that_are_no_segment_are_refused(name):
    change, size, text = UNSAFE[name]
    driver = FakeDriver()
    made, fds = CudaSegment.create(SIZE, CPU, driver)
    offered = change(fds)
    with pytest.raises(SegmentError, match=text):
        CudaSegment.attach(offered, size, CPU, driver)
    assert (len(driver.handles), len(driver.mappings)) == (0, 1)
    assert made.size == SIZE
    for fd in {*fds, *offered}:
        os.close(fd)


# Negotiation. Only the driver, which is fake here, needs a GPU.


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(rendezvous_module, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(cuda_segment, "cuda_driver", lambda: made)
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def both(
    pool: ThreadPoolExecutor,
    verifier: tuple[int, ...] = ALL,
    logits: tuple[int, ...] = ALL,
    drafter: tuple[int, ...] = ALL,
) -> tuple[SharedSegments, SharedSegments]:
    """Return the segments that verifier and drafter hold after the rendezvous."""
    with Rendezvous() as rendezvous:
        serving = pool.submit(rendezvous.serve, verifier, logits, SIZE, CPU)
        met = meet(rendezvous.encode(), drafter, SIZE, CPU)
    return serving.result(), met


def carriers(sides: tuple[SharedSegments, SharedSegments]) -> tuple[pb.Carrier, pb.Carrier]:
    """Return the carriers of features and of draft logits; check that both sides agree."""
    verifier, drafter = sides
    assert verifier.outgoing.carrier == drafter.incoming.carrier
    assert verifier.incoming.carrier == drafter.outgoing.carrier
    return verifier.outgoing.carrier, verifier.incoming.carrier


def test_memory_of_gpus_is_preferred_where_both_can_map_it(pool, driver):
    sides = both(pool)
    assert carriers(sides) == (CUDA_IPC, CUDA_IPC)
    assert (len(driver.handles), len(driver.mappings)) == (0, 4)
    del sides
    gc.collect()
    assert not driver.mappings


@pytest.mark.usefixtures("driver")
def test_each_direction_has_its_own(pool):
    assert carriers(both(pool, logits=(SHM, BYTES))) == (CUDA_IPC, SHM)


@pytest.mark.parametrize("side", ["verifier", "drafter"])
def test_one_that_does_not_allow_it_leaves_host_memory(pool, driver, side):
    rest = (SHM, BYTES)
    sides = both(pool, rest, rest) if side == "verifier" else both(pool, drafter=rest)
    assert carriers(sides) == (SHM, SHM)
    assert not driver.mappings


@pytest.mark.parametrize("failing", ["allocate", "import_allocation", "map"])
def test_where_the_driver_refuses_host_memory_is_left(pool, driver, failing, monkeypatch):
    def refuse(*_: object) -> int:
        raise SegmentError(f"{failing}: not today")

    monkeypatch.setattr(driver, failing, refuse)
    assert carriers(both(pool)) == (SHM, SHM)
    assert (driver.handles, driver.mappings) == ({}, {})


def test_without_a_driver_host_memory_is_left(pool, monkeypatch):
    def none() -> CudaDriver:
        return CudaDriver(object())

    monkeypatch.setattr(cuda_segment, "cuda_driver", none)
    assert carriers(both(pool)) == (SHM, SHM)


def test_memory_that_is_another_than_the_receivers_is_not_shared(pool, driver, monkeypatch):
    def another(_fd: int) -> int:
        return driver.allocate(GRANULARITY, CPU)

    monkeypatch.setattr(driver, "import_allocation", another)
    assert carriers(both(pool)) == (SHM, SHM)
    gc.collect()
    assert (driver.handles, driver.mappings) == ({}, {})
