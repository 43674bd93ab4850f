"""A verifier on the drafter's host that lies about shared memory: at the rendezvous, about spans, in the rings, and in
announcements and commits."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
from random import Random

import torch
from fuzz_noise import EDGES, mutated
from fuzz_steps import WIDTH, set_hostile

from draftwire.transport import Channel, Rendezvous, SharedSegments, TensorSender, segment_bytes
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")
CARRIERS = (pb.CARRIER_SHM, pb.CARRIER_BYTES)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
TIMEOUT_S = 10.0


class LyingRendezvous:
    """A replacement of `Rendezvous` that violates the protocol."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._token = secrets.token_bytes(32)
        self._name = f"draftwire-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen()
        self._socket.settimeout(TIMEOUT_S)

    def encode(self) -> pb.Rendezvous:
        """Return the rendezvous as a message, in which the token or the name may be wrong."""
        kind = self._rng.randrange(8)
        if kind == 0:
            return pb.Rendezvous(socket=self._name, token=self._rng.randbytes(self._rng.choice((0, 31, 32, 33, 999))))
        if kind == 1:
            names = ("", "draftwire-", "../../tmp/x", f"draftwire-{'0' * 32}", self._name + "\0", "é" * 40, "x" * 5000)
            return pb.Rendezvous(socket=self._rng.choice(names), token=self._token)
        return pb.Rendezvous(socket=self._name, token=self._token)

    def serve(self) -> None:
        """Talk to the drafter if it connects."""
        with contextlib.suppress(OSError):
            connection = self._socket.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                connection.recv(64)
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        rng = self._rng
        for _ in range(rng.randrange(1, 5)):
            kind = rng.randrange(5)
            if kind == 0:
                return
            if kind == 1:
                connection.send(rng.randbytes(rng.choice((1, 40, 1500))))
            elif kind == 2:
                _, files, _, _ = socket.recv_fds(connection, 1024, 1)
                for fd in files:
                    os.close(fd)
                verdict = pb.SegmentVerdict(shared=rng.random() < 0.5, detail=rng.choice(("", "no", "x" * 900)))
                connection.send(verdict.SerializeToString())
            else:
                self._offer(connection)

    def _offer(self, connection: socket.socket) -> None:
        rng = self._rng
        size = rng.choice((4096, 4 << 20))
        nonce = rng.randbytes(32)
        fd = self._file(size, nonce)
        offer = pb.SegmentOffer(
            carrier=rng.choice((0, 1, 2, 2, 2, 3, 77)),
            size=rng.choice((size, size, size + 1, *EDGES)),
            nonce=rng.choice((nonce, nonce, b"", rng.randbytes(32), rng.randbytes(700))),
        )
        data = offer.SerializeToString()
        if rng.random() < 0.2:
            data = mutated(rng, data) or b"\0"
        try:
            socket.send_fds(connection, [data], [fd] * rng.choice((0, 1, 1, 1, 3)))
        finally:
            os.close(fd)

    def _file(self, size: int, nonce: bytes) -> int:
        """Return a memory file, possibly with a wrong size or wrong seals, or another kind of file."""
        rng = self._rng
        kind = rng.randrange(6)
        if kind == 0:
            return os.open("/dev/null", os.O_RDWR)
        if kind == 1:
            ends = os.pipe()
            os.close(ends[1])
            return ends[0]
        fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(fd, size if kind != 2 else size // 2)
        os.pwrite(fd, nonce, 0)
        if kind != 3:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | (fcntl.F_SEAL_WRITE if kind == 4 else 0))
        return fd

    def close(self) -> None:
        """End a `serve` that still waits."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def lie_about(rng: Random, span: pb.SharedSpan) -> None:
    """Change the offset and generation of a tensor in shared memory to wrong values."""
    kind = rng.randrange(3)
    if kind == 0:
        span.offset = rng.choice((*EDGES, span.offset + 1, span.offset + 64, span.offset - 64, 128))
    elif kind == 1:
        span.generation = rng.choice((*EDGES, span.generation - 1, span.generation + 1))
    else:
        span.offset, span.generation = rng.choice(EDGES), rng.choice(EDGES)


def lie_about_span(rng: Random, features: pb.Tensor) -> None:
    """Change the span or the shape of a tensor in shared memory to wrong values."""
    if rng.randrange(4):
        lie_about(rng, features.span)
    else:
        features.shape[:] = [features.shape[0], WIDTH * rng.choice((2, 1000, 2**20))]


class Announcer:
    """Right and wrong announcements and commits of one stream's steps."""

    def __init__(self, rng: Random, channel: Channel, sender: TensorSender) -> None:
        self._rng = rng
        self._channel = channel
        self._sender = sender
        self._last_id = 0

    def announce(self, step: pb.DraftStep) -> bool:
        """Announce a step whose features are in its message; return whether the announcement is right and was sent."""
        rng, numbers = self._rng, _numbers(step)
        features = self._sender.begin(torch.float32, tuple(step.features.shape))
        if features.carrier != pb.CARRIER_SHM:
            return False
        data = torch.frombuffer(bytearray(step.features.data), dtype=torch.float32)
        features.tensor.copy_(data.view_as(features.tensor))
        self._last_id += 1
        announce = pb.Announce(
            announced_id=self._last_id,
            sequence_ids=step.sequence_ids,
            first_rows=step.first_rows,
            num_drafts=max(*step.num_drafts, 1),
            columns=numbers.shape[1],
            num_rows=len(features.tensor),
        )
        features.announce(announce.features)
        kind = rng.randrange(12)
        if kind == 0:  # invalid tokens or counts of rows
            place = rng.randrange(len(numbers)), rng.randrange(numbers.shape[1])
            numbers[place] = rng.choice((-1, 0, 2**31 - 1, 10**6))
        elif kind == 1:
            set_hostile(rng, announce)
        elif kind == 2:
            lie_about(rng, announce.features)
        elif kind == 3:  # sequences that are not open
            announce.sequence_ids[0] = rng.choice((0, 999, 2**63, *EDGES)) & (2**64 - 1)
        elif kind == 4:
            numbers = numbers[: rng.randrange(len(numbers) + 1)]
        message = pb.DraftRequest(announce=announce).SerializeToString()
        if kind == 5:
            message = mutated(rng, message) or b"\0"
        is_sent = self._channel.send(message, numbers if len(numbers) else None)
        return is_sent and kind > 5

    def commit(self, step: pb.DraftStep) -> tuple[pb.Commit, bool]:
        """Return a commit of the last announced step, and whether the commit is right if the announcement was."""
        rng = self._rng
        commit = pb.Commit(step_id=step.step_id, announced_id=self._last_id, num_drafts=step.num_drafts)
        kind = rng.randrange(12)
        if kind == 0:  # an unknown step, or one committed before
            commit.announced_id = rng.choice((0, max(self._last_id - 1, 0), self._last_id + 1, 2**64 - 1))
        elif kind == 1:
            commit.closed_ids.extend([*step.sequence_ids[:1], rng.choice((0, 2**64 - 1))])
        elif kind == 2:
            set_hostile(rng, commit)
        return commit, kind > 2

    @property
    def last_id(self) -> int:
        """Return the id of the last announced step."""
        return self._last_id


def _numbers(step: pb.DraftStep) -> torch.Tensor:
    """Return what a verifier's device writes for a step: the number of rows and the tokens of each sequence."""
    tokens = torch.frombuffer(bytearray(step.tokens.data), dtype=torch.int32).tolist()
    numbers = torch.full((len(step.num_rows), 1 + max(step.num_rows)), -1, dtype=torch.int32)
    begin = 0
    for row, count in zip(numbers, step.num_rows, strict=True):
        row[: 1 + count] = torch.tensor([count, *tokens[begin : begin + count]])
        begin += count
    return numbers


def scribble(rng: Random, sender: TensorSender, shared: SharedSegments) -> None:
    """Write random bytes into the memory that the drafter reads, and claim room for a tensor that is never sent."""
    if shared.outgoing is not None:
        memory = shared.outgoing.memory
        at = rng.randrange(len(memory) - 4096)
        memory[at : at + 4096] = torch.frombuffer(bytearray(rng.randbytes(4096)), dtype=torch.uint8)
    if shared.channel is not None and rng.random() < 0.5:
        rings = shared.channel.memory
        at = rng.randrange(64, len(rings) // 2 if rng.random() < 0.5 else 4096)
        size = rng.choice((1, 4, 8, 64, 1000))
        rings[at : at + size] = torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8)
    sender.begin(torch.float32, (rng.choice((1, 1000)), WIDTH)).finish(pb.Tensor())


async def share(rendezvous: Rendezvous) -> asyncio.Future[SharedSegments]:
    """Serve a valid rendezvous in a thread."""
    size = segment_bytes(4 * WIDTH * 64)
    return asyncio.ensure_future(asyncio.to_thread(rendezvous.serve, CARRIERS, CARRIERS, size, CPU))
