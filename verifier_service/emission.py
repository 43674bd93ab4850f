"""Output of one request in a step, on its way to a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftwire.v1 import generate_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.output import Piece
from verifier_service.sampler import Drawn


class Emission(NamedTuple):
    """Output of one request in a step, whose text is still to be written."""

    work: ScheduledRows
    drawn: Drawn
    piece: Piece
    drawn_at: float  # monotonic s
    statistics: generate_pb2.RequestStatistics | None = None  # at the end


def response(emissions: Sequence[Emission]) -> generate_pb2.GenerateResponse:
    """The message of one request's output of one or several steps, once the text is there."""
    last = emissions[-1]
    token_ids: list[int] = []
    drafted: list[bool] = []
    logprobs: list[generate_pb2.TokenLogprobs] = []
    text_ends: list[int] = []
    text = ""
    for work, drawn, piece, _, _ in emissions:
        count = len(piece.token_ids)
        num_accepted = min(work.num_drafts, len(drawn.tokens) - 1)
        token_ids += piece.token_ids
        drafted += [j < num_accepted for j in range(count)]
        if drawn.logprobs is not None:
            logprobs += drawn.logprobs.told(count)
        text_ends += [len(text) + end for end in piece.text_ends]
        text += piece.text
    return generate_pb2.GenerateResponse(
        token_ids=token_ids,
        text=text,
        drafted=drafted,
        logprobs=logprobs,
        finish_reason=last.piece.finish_reason,
        stop_text=last.piece.stop_text,
        stop_token_id=last.piece.stop_token_id,
        token_text_ends=text_ends,
        statistics=last.statistics,
    )
