"""A verifier's side of what is foretold: a board and features in memory that both have, and steps that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from harness import Rows, Stream
from tiny_head import WIDTH

from drafter_service.step import UpcomingStep
from draftwire.carriers import DrafterBoard, TensorReceiver, TensorSender, VerifierBoard, board_bytes
from draftwire.carriers.host_segment import HostSegment
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")


class Foreteller:
    """Foretells steps of one stream.

    Attributes
    ----------
    held
        Calls that write the generations on the board, while it `holds` them back.
    """

    def __init__(
        self,
        stream: Stream,
        k: int = 4,
        device: torch.device = CPU,
        *,
        holds: bool = False,
        feature_bytes: int = 1 << 20,
    ) -> None:
        self.held: list[Callable[[], object]] = []
        self._stream = stream
        self._columns = k + 2
        self._holds = holds
        self._device = device
        board = HostSegment.unshared(board_bytes(32, k), device)
        features = HostSegment.unshared(feature_bytes, device)
        self._words = board.memory.numpy().view(np.uint32)
        self._address = board.memory.data_ptr()
        self.writer = VerifierBoard(board, device, self._write if device.type == "cpu" else None)
        self.reader = DrafterBoard(board, device)
        self.sender, self.receiver = TensorSender(device, features), TensorReceiver(device, features)

    def _write(self, _stream: int, address: int, value: int) -> None:
        def write() -> None:
            self._words[(address - self._address) // 4] = value

        if self._holds:
            self.held.append(write)
        else:
            write()

    def foretell(
        self, rows: Sequence[Rows], numbers: Sequence[Sequence[int]] | None = None, offset: int = 0
    ) -> pb.SharedSpan:
        """What a step of these rows will be, and where its numbers are. `numbers` stand on the board instead of what
        they are; features are `offset` bytes behind where they are."""
        if numbers is None:
            tokens = [part.text.rows(part.first, part.count)[0].tolist() for part in rows]
            numbers = [[len(own), *own, *[-1] * (self._columns - 1 - len(own))] for own in tokens]
        drawn = torch.tensor(numbers, dtype=torch.int32)
        states = torch.cat([part.text.rows(part.first, part.count)[1] for part in rows])
        features = self.sender.begin(torch.float32, states.shape)
        features.tensor.copy_(states.to(self._device), non_blocking=True)
        features.seal()
        span = self.writer.post(drawn.to(self._device))
        assert span is not None
        assert features.offset is not None
        self._stream.engine.foresee(
            self._stream.session,
            UpcomingStep(
                [part.sequence_id for part in rows],
                np.array([part.first for part in rows], np.int64),
                np.array([part.drafts for part in rows], np.int64),
                self.reader,
                span.generation,
                span.offset,
                self._columns,
                self.receiver,
                features.offset + offset,
                torch.float32,
                WIDTH,
                is_fused=False,
            ),
        )
        return span
