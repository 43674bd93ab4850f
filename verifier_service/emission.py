"""Output of one request in a step, on its way to a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftwire.v1 import generate_pb2
from verifier_service.sampler import Drawn
from verifier_service.scheduler import Work
from verifier_service.stop_conditions import Piece


class Emission(NamedTuple):
    """Output of one request in a step."""

    work: Work
    drawn: Drawn
    piece: Piece
    drawn_at: float  # monotonic s
    # At the end; where a stop text may end the output, at every step.
    statistics: generate_pb2.RequestStatistics | None = None


def response(emissions: Sequence[Emission]) -> generate_pb2.GenerateResponse:
    """The message of one request's output of one or several steps, without its text."""
    last = emissions[-1]
    token_ids: list[int] = []
    drafted: list[bool] = []
    logprobs: list[generate_pb2.TokenLogprobs] = []
    for work, drawn, piece, _, _ in emissions:
        count = len(piece.token_ids)
        num_accepted = min(work.num_drafts, len(drawn.tokens) - 1)
        token_ids += piece.token_ids
        drafted += [j < num_accepted for j in range(count)]
        if drawn.logprobs is not None:
            logprobs += drawn.logprobs.told(count)
    return generate_pb2.GenerateResponse(
        token_ids=token_ids,
        drafted=drafted,
        logprobs=logprobs,
        finish_reason=last.piece.finish_reason,
        stop_token_id=last.piece.stop_token_id,
        statistics=last.statistics,
    )
