"""The place where a verifier and a drafter of one host exchange segments; peers of other hosts cannot reach it.

`Rendezvous` in draft.proto describes the conversation. Its functions block and run in a separate thread; each message
has a time limit.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from google.protobuf.message import DecodeError, Message

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.devices import make_current
from draftwire.transport.carriers import carrier_name
from draftwire.transport.channel import Channel, drafter_channel, verifier_channel
from draftwire.transport.cuda_segment import CudaSegment
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.ring import ring_bytes
from draftwire.transport.segment import ALIGNMENT, MAX_SEGMENT_BYTES, NONCE_BYTES, Segment, SegmentError
from draftwire.v1 import draft_pb2 as pb

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
_SOCKET_NAME = re.compile(r"draftwire-[0-9a-f]{32}")
_TOKEN_BYTES = 32
_MAX_MESSAGE_BYTES = 1024
_MAX_FILES = 2  # of a segment
_RING_CARRIERS = (pb.CARRIER_SHM,)
_KINDS: dict[int, type[Segment]] = {kind.carrier: kind for kind in (HostSegment, CudaSegment)}
_CPU = torch.device("cpu")
# A socket's path has at most 107 bytes, of which its name takes 43.
_MAX_DIRECTORY_BYTES = 64


@dataclass(frozen=True)
class SharedSegments:
    """The segments of one side after the conversation; None if tensors or messages use the stream."""

    outgoing: Segment | None = None
    incoming: Segment | None = None
    channel: Channel | None = None


def check_rendezvous_dir(directory: Path | None) -> None:
    """Raise InvalidArgumentError if sockets cannot be in `directory`."""
    if directory is None:
        return
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidArgumentError("rendezvous_dir", str(directory), "must be a directory that can be written to")
    # A process that can replace a socket learns the token and gets the drafter's connection.
    if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgumentError("rendezvous_dir", str(directory), "must be writable for its owner alone")
    if len(os.fsencode(directory)) > _MAX_DIRECTORY_BYTES:
        raise InvalidArgumentError("rendezvous_dir", str(directory), f"must have at most {_MAX_DIRECTORY_BYTES} bytes")


def _address(directory: Path | None, name: str) -> str:
    """Return the address of a socket in a directory, or in the abstract namespace of this network namespace."""
    return f"\0{name}" if directory is None else str(directory / name)


class Rendezvous:
    """The verifier's socket. A context manager that closes it."""

    def __init__(self, directory: Path | None = None) -> None:
        """With a `directory`, which may be mounted in the drafters' containers, the socket is a file there."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._name = f"draftwire-{secrets.token_hex(16)}"
        self._file = None if directory is None else directory / self._name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_address(directory, self._name))
        self._socket.listen()

    def encode(self) -> pb.Rendezvous:
        """Return the wire form."""
        return pb.Rendezvous(socket=self._name, token=self._token)

    def serve(
        self,
        carriers: Sequence[pb.Carrier],
        logits_carriers: Sequence[pb.Carrier],
        logits_bytes: int,
        device: torch.device,
    ) -> SharedSegments:
        """Wait for the drafter and settle both directions; return no segments if the drafter does not come before
        `close`.

        Args:
            carriers, logits_carriers: Carriers that the verifier allows for features and for draft logits, best first.
            logits_bytes: Size of the segment for draft logits; 0 for none.
        """
        make_current(device)
        while (connection := self._accept()) is not None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(connection)
                try:
                    connection.settimeout(TIMEOUT_S)
                    if not hmac.compare_digest(connection.recv(_TOKEN_BYTES + 1), self._token):
                        continue
                    outgoing = _attach(connection, carriers, device)
                    incoming = _offer(connection, logits_carriers, logits_bytes, device)
                    rings = _attach(connection, _RING_CARRIERS, device)
                    channel = None if rings is None else verifier_channel(connection, rings, device)
                    if channel is not None:
                        stack.pop_all()
                    return SharedSegments(outgoing, incoming, channel)
                except (OSError, DecodeError, SegmentError) as error:
                    logger.warning("nothing is shared with the drafter: %s", str(error) or type(error).__name__)
        return SharedSegments()

    def _accept(self) -> socket.socket | None:
        """Return the next connection; None when the socket was closed."""
        try:
            return self._socket.accept()[0]
        except OSError:
            return None

    def close(self) -> None:
        """End a `serve` that still waits."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def meet(
    rendezvous: pb.Rendezvous,
    carriers: Sequence[pb.Carrier],
    features_bytes: int,
    device: torch.device,
    directory: Path | None = None,
    num_ring_bytes: int = ring_bytes(1, 1),
) -> SharedSegments:
    """Return the drafter's segments; none if the verifier is not on this host.

    Args:
        rendezvous: The rendezvous of the verifier's hello; untrusted.
        carriers: Carriers that verifier and drafter allow, best first.
        features_bytes: Size of the segment for features.
        directory: Directory of the verifier's socket; the verifier sends only the file name.
        num_ring_bytes: Size of the rings; 0 for none, so that all messages go over the stream.
    """
    if not _SOCKET_NAME.fullmatch(rendezvous.socket) or len(rendezvous.token) != _TOKEN_BYTES:
        return SharedSegments()
    make_current(device)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            connection.settimeout(TIMEOUT_S)
            connection.connect(_address(directory, rendezvous.socket))
        except OSError as error:
            logger.debug("the verifier is not on this host: %s", str(error))
            return SharedSegments()
        try:
            connection.send(rendezvous.token)
            incoming = _offer(connection, carriers, features_bytes, device)
            outgoing = _attach(connection, carriers, device)
            rings = _offer(connection, _RING_CARRIERS, num_ring_bytes, device)
            channel = None if rings is None else drafter_channel(connection, rings, device)
            if channel is not None:
                stack.pop_all()
            return SharedSegments(outgoing, incoming, channel)
        except (OSError, DecodeError, SegmentError) as error:
            logger.warning("nothing is shared with the verifier: %s", str(error) or type(error).__name__)
            return SharedSegments()


def create_segment(carrier: pb.Carrier, size: int, device: torch.device) -> tuple[Segment, list[int]]:
    """Return a new segment of a carrier; see `Segment.create`."""
    return _kind(carrier).create(size, device)


def attach_segment(carrier: pb.Carrier, fds: Sequence[int], size: int, device: torch.device) -> Segment:
    """Map the segment of a carrier; see `Segment.attach`. The `size` is untrusted."""
    if not 2 * ALIGNMENT <= size <= MAX_SEGMENT_BYTES:
        raise SegmentError(f"size = {size}: allowed range [{2 * ALIGNMENT}, {MAX_SEGMENT_BYTES}]")
    return _kind(carrier).attach(fds, size, device)


def _kind(carrier: pb.Carrier) -> type[Segment]:
    if carrier not in _KINDS:
        raise SegmentError(f"there are no segments of {carrier_name(carrier)}")
    return _KINDS[carrier]


def _offer(
    connection: socket.socket, carriers: Sequence[pb.Carrier], num_bytes: int, device: torch.device
) -> Segment | None:
    """Play the receiver: offer segments, best first, until the sender accepts one, and return it."""
    for carrier in carriers if num_bytes else ():
        if carrier == pb.CARRIER_BYTES:
            break
        try:
            segment, fds = create_segment(carrier, num_bytes, device)
        except SegmentError as error:
            logger.info("%s: %s", pb.Carrier.Name(carrier), error)
            continue
        try:
            if _is_shared(connection, segment, fds):
                return segment
        finally:
            for fd in fds:
                os.close(fd)
    _send(connection, pb.SegmentOffer(carrier=pb.CARRIER_BYTES))
    return None


def _is_shared(connection: socket.socket, segment: Segment, fds: Sequence[int]) -> bool:
    nonce = secrets.token_bytes(NONCE_BYTES)
    segment.write_nonce(nonce)
    offer = pb.SegmentOffer(carrier=segment.carrier, size=segment.size, nonce=nonce)
    socket.send_fds(connection, [offer.SerializeToString()], fds)
    answer = pb.SegmentVerdict.FromString(connection.recv(_MAX_MESSAGE_BYTES))
    shared = answer.shared and segment.read_nonce() == _complement(nonce)
    if not shared:
        logger.info("%s: %s", pb.Carrier.Name(segment.carrier), answer.detail or "the nonce was not written")
    _send(connection, pb.SegmentVerdict(shared=shared, detail="" if shared else "not seen by the receiver"))
    return shared


def _attach(connection: socket.socket, carriers: Sequence[pb.Carrier], device: torch.device) -> Segment | None:
    """Play the sender: accept the first offered segment that can be mapped, and return it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        data, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, _MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        try:
            offer = pb.SegmentOffer.FromString(data)
            if not data:
                raise ConnectionError("the connection has ended")
            if offer.carrier == pb.CARRIER_BYTES:
                return None
            segment = None
            try:
                segment = _map(offer, fds, carriers, device)
                _send(connection, pb.SegmentVerdict(shared=True))
            except SegmentError as error:
                logger.info("carrier %d: %s", offer.carrier, error)
                _send(connection, pb.SegmentVerdict(detail=str(error)[:512]))
            verdict = pb.SegmentVerdict.FromString(connection.recv(_MAX_MESSAGE_BYTES))
            if segment is not None and verdict.shared:
                return segment
        finally:
            for fd in fds:
                os.close(fd)
    raise TimeoutError(f"no segment within {TIMEOUT_S:g} s")


def _map(offer: pb.SegmentOffer, fds: Sequence[int], carriers: Sequence[pb.Carrier], device: torch.device) -> Segment:
    if offer.carrier not in carriers:
        raise SegmentError(f"carrier {offer.carrier}: not allowed here")
    segment = attach_segment(offer.carrier, fds, offer.size, device)
    if len(offer.nonce) != NONCE_BYTES or segment.read_nonce() != offer.nonce:
        raise SegmentError("the nonce is not in the memory")
    segment.write_nonce(_complement(offer.nonce))
    return segment


def _complement(nonce: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in nonce)


def _send(connection: socket.socket, message: Message) -> None:
    connection.send(message.SerializeToString())
