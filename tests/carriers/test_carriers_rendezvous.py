"""How two processes agree on shared memory: proof by a nonce, fallback to other carriers, and untrusted peers."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from open_files import open_files

from draftwire.contract.errors import InvalidArgumentError
from draftwire.transport import (
    Rendezvous,
    SharedSegments,
    check_rendezvous_dir,
    meet,
    parse_carriers,
    segment_bytes,
)
from draftwire.transport import rendezvous as module
from draftwire.transport.rendezvous import attach_segment, create_segment
from draftwire.transport.segment import Segment, SegmentError
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")
SHM, BYTES, CUDA_IPC = pb.CARRIER_SHM, pb.CARRIER_BYTES, pb.CARRIER_CUDA_IPC
FEATURES, LOGITS = 1 << 16, 1 << 17


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.5)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path: pytest's are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="dw", dir="/tmp") as made:
        yield Path(made)


def both(
    pool: ThreadPoolExecutor,
    verifier: tuple[int, ...] = (SHM, BYTES),
    drafter: tuple[int, ...] = (SHM, BYTES),
    logits_bytes: int = LOGITS,
    directories: tuple[Path | None, Path | None] = (None, None),
) -> tuple[SharedSegments, SharedSegments]:
    """Return the segments that verifier and drafter hold after the rendezvous."""
    with Rendezvous(directories[0]) as rendezvous:
        serving = pool.submit(rendezvous.serve, verifier, verifier, logits_bytes, CPU)
        met = meet(rendezvous.encode(), drafter, FEATURES, CPU, directories[1])
    return serving.result(), met


def nothing_is_shared(*sides: SharedSegments) -> bool:
    return all(side.outgoing is None and side.incoming is None for side in sides)


def test_the_connection_stays_for_messages_whatever_is_shared(pool):
    for carriers in ((SHM, BYTES), (BYTES,)):
        verifier, drafter = both(pool, carriers)
        for here, there in ((verifier.channel, drafter.channel), (drafter.channel, verifier.channel)):
            assert here.send(b"step", torch.ones(1, 3, dtype=torch.int32))
            (record,) = there.receive()
            assert record.message == b"step"
            assert record.body.read((1, 3)).tolist() == [[1, 1, 1]]


def test_both_directions_are_shared(pool):
    verifier, drafter = both(pool)
    for writer, reader, size in (
        (verifier.outgoing, drafter.incoming, FEATURES),
        (drafter.outgoing, verifier.incoming, LOGITS),
    ):
        assert writer.carrier == reader.carrier == SHM
        assert writer.size == reader.size == size
        writer.memory[1000:1004] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        assert reader.memory[1000:1004].tolist() == [1, 2, 3, 4]


def test_a_common_directory_shares_memory_and_keeps_no_file(pool, directory):
    verifier, drafter = both(pool, directories=(directory, directory))
    assert verifier.outgoing.carrier == drafter.incoming.carrier == SHM
    assert list(directory.iterdir()) == []


def test_another_directory_shares_nothing(pool, directory):
    other = directory / "other"
    other.mkdir()
    for directories in ((directory, other), (directory, None), (None, directory)):
        assert nothing_is_shared(*both(pool, directories=directories))


def test_a_directory_that_no_socket_can_be_in_is_named(tmp_path):
    long = tmp_path / ("d" * 64)
    long.mkdir(mode=0o700)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for directory, allowed in (
        (tmp_path / "none", "a directory that can be written to"),
        (shared, "writable for its owner alone"),
        (long, "at most 64 bytes"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"rendezvous_dir = .*{allowed}"):
            check_rendezvous_dir(directory)


def test_a_direction_without_tensors_is_not_shared(pool):
    verifier, drafter = both(pool, logits_bytes=0)
    assert (verifier.incoming, drafter.outgoing) == (None, None)
    assert verifier.outgoing.carrier == drafter.incoming.carrier == SHM


@pytest.mark.parametrize(
    ("verifier", "drafter"), [((SHM, BYTES), (BYTES,)), ((BYTES,), (SHM, BYTES))], ids=["drafter", "verifier"]
)
def test_a_carrier_that_one_side_does_not_allow_is_not_used(pool, verifier, drafter):
    assert nothing_is_shared(*both(pool, verifier, drafter))


def test_a_carrier_that_fails_gives_way_to_the_next(pool):
    # On CPU devices, GPU memory cannot be allocated.
    verifier, drafter = both(pool, (CUDA_IPC, SHM, BYTES), (CUDA_IPC, SHM, BYTES))
    assert verifier.outgoing.carrier == drafter.outgoing.carrier == SHM


def test_memory_that_cannot_be_mapped_leaves_bytes(pool, monkeypatch):
    def refuse(*_: object) -> None:
        raise SegmentError("no room")

    monkeypatch.setattr(module, "attach_segment", refuse)
    assert nothing_is_shared(*both(pool))


def test_memory_that_is_not_the_same_is_not_shared(pool, monkeypatch):
    # The receiver's file was swapped on its way: size and seals are correct, the nonce is not.
    def attach_another(carrier: pb.Carrier, _: Sequence[int], size: int, device: torch.device) -> Segment:
        another, fds = create_segment(carrier, size, device)
        for fd in fds:
            os.close(fd)
        return another

    monkeypatch.setattr(module, "attach_segment", attach_another)
    assert nothing_is_shared(*both(pool))


def test_nothing_is_shared_when_nobody_comes(pool):
    with Rendezvous() as rendezvous:
        serving = pool.submit(rendezvous.serve, (SHM, BYTES), (SHM, BYTES), LOGITS, CPU)
    assert serving.result(5) == SharedSegments()


UNREACHABLE = {
    "other host": pb.Rendezvous(socket="draftwire-" + "0" * 32, token=bytes(32)),
    "socket of another program": pb.Rendezvous(socket="/tmp/.X11-unix/X0", token=bytes(32)),
    "no token": pb.Rendezvous(socket="draftwire-" + "0" * 32),
    "nothing": pb.Rendezvous(),
}


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_verifier_that_is_not_there_leaves_bytes(name):
    assert meet(UNREACHABLE[name], (SHM, BYTES), FEATURES, CPU) == SharedSegments()


def connect(rendezvous: Rendezvous, first: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect("\0" + rendezvous.encode().socket)
    connection.send(first)
    return connection


def test_a_stranger_without_the_token_gets_and_disturbs_nothing(pool):
    with Rendezvous() as rendezvous:
        serving = pool.submit(rendezvous.serve, (SHM, BYTES), (SHM, BYTES), LOGITS, CPU)
        with connect(rendezvous, bytes(32)) as stranger:
            assert socket.recv_fds(stranger, 1024, 1)[:2] == (b"", [])
        assert meet(rendezvous.encode(), (SHM, BYTES), FEATURES, CPU).incoming is not None
    assert serving.result().outgoing is not None


GARBAGE: dict[str, list[tuple[bytes, int]]] = {
    "silence": [],
    "end": [(b"", 0)],
    "noise": [(b"\xff" * 100, 0)],
    "offer without a file": [(pb.SegmentOffer(carrier=SHM, size=4096, nonce=bytes(32)).SerializeToString(), 0)],
    "offer of /dev/null": [(pb.SegmentOffer(carrier=SHM, size=4096, nonce=bytes(32)).SerializeToString(), 1)],
    "offer of 2^63 bytes": [(pb.SegmentOffer(carrier=SHM, size=2**63, nonce=bytes(32)).SerializeToString(), 1)],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_drafter_that_talks_nonsense_leaves_bytes(pool, name):
    with Rendezvous() as rendezvous:
        serving = pool.submit(rendezvous.serve, (SHM, BYTES), (SHM, BYTES), LOGITS, CPU)
        null = os.open("/dev/null", os.O_RDWR)
        with connect(rendezvous, rendezvous.encode().token) as drafter:
            for data, files in GARBAGE[name]:
                socket.send_fds(drafter, [data], [null] * files)
            if name == "silence":
                drafter.settimeout(5)
                assert drafter.recv(1) == b""  # the verifier has given up
        os.close(null)
    assert serving.result() == SharedSegments()


# Files whose memory the peer could remove while it is mapped.


def memory_file(size: int, seals: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file(size: int) -> int:
    fd = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, size)
    return fd


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
UNSAFE: dict[str, tuple[Callable[[], int], int, str]] = {
    "can shrink": (lambda: memory_file(8192), 8192, "not sealed"),
    "can be unsealed": (lambda: memory_file(8192, fcntl.F_SEAL_GROW), 8192, "not sealed"),
    "smaller than said": (lambda: memory_file(4096, ALL_SEALS), 8192, "has 4096 bytes, not 8192"),
    "file on a disk": (lambda: plain_file(8192), 8192, "cannot be mapped"),
    "cannot be written": (lambda: memory_file(8192, ALL_SEALS | fcntl.F_SEAL_WRITE), 8192, "cannot be mapped"),
    "tiny": (lambda: memory_file(64, ALL_SEALS), 64, "allowed range"),
    "huge": (lambda: memory_file(8192, ALL_SEALS), 1 << 40, "allowed range"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_memory_that_could_be_taken_away_is_not_mapped(name):
    make, size, text = UNSAFE[name]
    fd = make()
    with pytest.raises(SegmentError, match=text):
        attach_segment(SHM, [fd], size, CPU)
    os.close(fd)


def test_our_own_memory_cannot_be_cut():
    segment, (fd,) = create_segment(SHM, 8192, CPU)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)
    assert segment.memory.sum() == 0


# No leftovers.


def shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:draftwire")


def test_memory_is_free_when_both_have_let_go(pool):
    files, before = open_files(), shared_mappings()
    verifier, drafter = both(pool)
    view = verifier.outgoing.memory[:10]
    assert shared_mappings() == before + 6  # features, logits and rings, of both sides
    del verifier, drafter
    gc.collect()
    assert shared_mappings() == before + 1
    assert view.tolist()[5:] != [0] * 5  # the complement of the nonce: still mapped
    del view
    assert shared_mappings() == before
    assert not open_files() - files


def test_no_thread_is_left_at_a_rendezvous_that_is_closed():
    with Rendezvous() as rendezvous:
        waiting = threading.Thread(target=rendezvous.serve, args=((SHM,), (SHM,), LOGITS, CPU))
        waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


# The carriers that the operator allows.


@pytest.mark.parametrize(
    ("text", "carriers"),
    [
        ("auto", (CUDA_IPC, SHM, BYTES)),
        ("bytes", (BYTES,)),
        ("shm", (SHM, BYTES)),
        ("bytes, cuda_ipc", (CUDA_IPC, BYTES)),
        ("bytes,shm,cuda_ipc", (CUDA_IPC, SHM, BYTES)),
    ],
)
def test_the_option_allows_carriers_best_first(text, carriers):
    assert parse_carriers(text) == carriers


@pytest.mark.parametrize("text", ["", "tcp", "auto,shm", "shm,"])
def test_an_unknown_carrier_is_refused_by_name(text):
    with pytest.raises(InvalidArgumentError, match=r"carriers = .*allowed: auto, or a list of cuda_ipc, shm, bytes"):
        parse_carriers(text)


def test_a_segment_holds_some_steps_within_limits():
    assert segment_bytes(1) == 4 << 20
    assert segment_bytes(10 << 20) == 40 << 20
    assert segment_bytes(1 << 40) == 256 << 20
