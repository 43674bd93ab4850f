"""Causes of verify steps without drafts."""

from __future__ import annotations

from collections.abc import Collection

from draftwire.v1 import generate_pb2 as pb
from verifier_service.drafters.session import Binding, DraftSession

Cause = pb.FallbackCause


def cause_name(cause: Cause) -> str:
    """Return the cause's name in metrics and tables, such as `no_drafter`."""
    return pb.FallbackCause.Name(cause).removeprefix("FALLBACK_CAUSE_").lower()


def session_cause(session: DraftSession) -> Cause | None:
    """Return why none of a drafter's requests has drafts in its next step; None if the cause differs by request."""
    if session.is_late:
        return pb.FALLBACK_CAUSE_LATE
    return pb.FALLBACK_CAUSE_PACE if session.pace.is_off else None


def bound_cause(binding: Binding) -> Cause:
    """Return why a request with a drafter has no drafts in its next step, if its drafter has no `session_cause`."""
    session = binding.session
    if binding.asked_length == len(binding.request.tokens):
        return pb.FALLBACK_CAUSE_EMPTY_ANSWER
    is_new = binding.sequence_id != 0 and binding.asked_length == 0  # only rows were sent so far
    if binding.rows_behind > 0 or session.catches_up or is_new:
        return pb.FALLBACK_CAUSE_CATCHING_UP
    # With a sequence id, rows were sent without requesting drafts; otherwise no row was sent.
    return pb.FALLBACK_CAUSE_PACE if binding.sequence_id else pb.FALLBACK_CAUSE_NO_FEATURES


def unbound_cause(num_rows: int, sessions: Collection[DraftSession]) -> Cause:
    """Return why a request with `num_rows` feature rows has no place at any connected drafter."""
    staying = [session for session in sessions if not session.is_draining]
    if not staying:
        return pb.FALLBACK_CAUSE_NO_DRAFTER
    fitting = [session for session in staying if num_rows <= session.stream.head.max_model_len]
    if not fitting:
        return pb.FALLBACK_CAUSE_TOO_LONG
    if all(session.is_late or session.breaker.is_open for session in fitting):
        return pb.FALLBACK_CAUSE_LATE
    if any(session.pace.is_off and not session.is_late for session in fitting):
        return pb.FALLBACK_CAUSE_PACE
    return pb.FALLBACK_CAUSE_AT_CAPACITY
