"""From emitted tokens to the pieces of output that a client gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from verifier_service.tokenizer import Detokenizer, StopFinder, TextCodec


@dataclass(slots=True)
class Piece:
    """What one step adds to the output."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)  # [len(token_ids)] characters of text out after each token
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    stop_text: str | None = None
    stop_token_id: int | None = None


class OutputBuilder:
    """Cuts emitted tokens at the first reason to end, and turns them into text.

    `take` decides at once what is emitted, `write` adds the text later; where a stop text may end the output, the text
    is part of the decision.
    """

    def __init__(
        self,
        params: config_pb2.SamplingParams,
        eos_token_ids: frozenset[int],
        codec: TextCodec | None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(codec, prompt) if codec is not None else None
        self._stops = StopFinder(params.stop)
        self._has_stops = len(params.stop) > 0
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._end_token_ids = self._stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        self._count = 0

    def takes_all(self, token_ids: list[int], room: int) -> bool:
        """Takes a step's tokens if the output goes on after all of them, whatever their text is; `room` is how many
        more tokens the context holds. Their piece has just these tokens."""
        count = len(token_ids)
        goes_on = (
            count < self._max_tokens - self._count
            and count < room
            and not self._has_stops
            and self._end_token_ids.isdisjoint(token_ids)
        )
        if goes_on:
            self._count += count
        return goes_on

    def take(self, token_ids: list[int], room: int) -> Piece:
        """Takes a step's tokens, with what is known of them at once; `room` as above."""
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
            elif number >= last:
                piece.finish_reason = pb.FINISH_REASON_LENGTH
            if self._has_stops:
                self._write_token(token_id, piece, is_last=piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED)
            if piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                break
        return piece

    def write(self, piece: Piece) -> None:
        """Adds the text to the piece taken last."""
        if self._has_stops:
            return
        last = len(piece.token_ids) - 1
        for i, token_id in enumerate(piece.token_ids):
            has_ended = i == last and piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED
            self._write_token(token_id, piece, is_last=has_ended)

    def _write_token(self, token_id: int, piece: Piece, *, is_last: bool) -> None:
        """Adds a token's text, and with the last token what is held back; an end token has none."""
        is_stop = is_last and piece.finish_reason == pb.FINISH_REASON_STOP
        text = "" if self._detokenizer is None or is_stop else self._detokenizer.push(token_id)
        self._add_text(text, piece)
        if is_last and piece.stop_text is None:
            self._flush(piece)
        piece.text_ends.append(len(piece.text))

    def _add_text(self, text: str, piece: Piece) -> None:
        if self._count <= self._min_tokens:
            piece.text += text
            return
        free, stop = self._stops.push(text)
        piece.text += free
        if stop is not None:
            piece.stop_text = stop
            piece.stop_token_id = None
            piece.finish_reason = pb.FINISH_REASON_STOP

    def _flush(self, piece: Piece) -> None:
        """Gives out what is held back, unless a stop text is completed by it."""
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.flush(), piece)
        if piece.stop_text is None:
            piece.text += self._stops.flush()
