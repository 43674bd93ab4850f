"""Stop conditions on tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb


@dataclass(slots=True)
class Piece:
    """Output of one request in one step."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None


class StopConditions:
    """Cuts emitted tokens at the first end token, stop token or length limit.

    `ResponseText` finds stop texts.
    """

    def __init__(self, params: config_pb2.SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self.has_stop_texts = len(params.stop) > 0
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._end_token_ids = self._stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        self._count = 0

    def takes_all(self, token_ids: list[int], room: int) -> bool:
        """Take a step's tokens if the output continues after all of them, and return whether it continues.

        `room` is the number of tokens that still fit into the context.
        """
        count = len(token_ids)
        continues = (
            count < self._max_tokens - self._count and count < room and self._end_token_ids.isdisjoint(token_ids)
        )
        if continues:
            self._count += count
        return continues

    def cut(self, token_ids: list[int], room: int) -> Piece:
        """Take a step's tokens up to the first stop condition; `room` as above."""
        if self.takes_all(token_ids, room):
            return Piece(token_ids)
        last = min(self._max_tokens - self._count, room)
        piece = Piece()
        for number, token_id in enumerate(token_ids, 1):
            self._count += 1
            piece.token_ids.append(token_id)
            if token_id in self._end_token_ids and self._count > self._min_tokens:
                piece.finish_reason = pb.FINISH_REASON_STOP
                piece.stop_token_id = token_id if token_id in self._stop_token_ids else None
                break
            if number >= last:
                piece.finish_reason = pb.FINISH_REASON_LENGTH
                break
        return piece
