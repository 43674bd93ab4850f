"""Costs of the 8B shape as they are known once enough has been seen, and expected tokens."""

from __future__ import annotations

from verifier_service.pacing import DrafterCost, Profile, TargetCost

# The 8B shape on an H200: seconds of a step, of a row.
FIXED_S, ROW_S = 4.87e-3, 6.5e-6
ROW_BYTES = 8192


def learnt_target(fixed_s: float = FIXED_S, row_s: float = ROW_S) -> TargetCost:
    target = TargetCost()
    for i in range(300):
        rows = (5, 40, 160, 32)[i % 4]
        target.observe(rows, 0, fixed_s + row_s * rows, 0.01 * i)
    return target


def observe(
    drafter: DrafterCost,
    seconds: float,
    num_bytes: int,
    rows: int,
    drafts: int,
    sequences: int,
    compute_s: float,
    now: float,
    *,
    is_beside: bool = False,
) -> None:
    """Has it take an answer that came after so many seconds."""
    drafter.observe_link(seconds - compute_s, num_bytes, now)
    drafter.observe_compute(compute_s, rows, drafts, sequences, now, is_beside=is_beside)


def learnt_drafter(trip_s: float, byte_s: float = 1e-9, draft_s: float = 0.35e-3) -> DrafterCost:
    """A drafter that is `trip_s` away and takes `draft_s` for each draft position."""
    drafter = DrafterCost()
    for i in range(300):
        rows, drafts, sequences = ((3, 4, 1), (90, 4, 32), (24, 2, 8))[i % 3]
        num_bytes = ROW_BYTES * rows
        compute_s = draft_s * drafts
        seconds = trip_s + byte_s * num_bytes + compute_s
        observe(drafter, seconds, num_bytes, rows, drafts, sequences, compute_s, 0.01 * i)
    return drafter


def tokens_at(rate: float, k: int = 4) -> list[float]:
    """Expected tokens of 0 .. k drafts of that acceptance rate."""
    return [sum(rate**j for j in range(i + 1)) for i in range(k + 1)]


# A pass of the 8B shape on an H200 by its rows, seconds: bound by memory, then by arithmetic.
MEASURED = {1: 4.55e-3, 5: 4.62e-3, 40: 5.05e-3, 64: 5.6e-3, 160: 6.3e-3, 320: 9.6e-3}


def hidden_target(lead_s: float, turn_s: float = 0.0) -> TargetCost:
    """One whose host takes `lead_s` before a step, where it shows; sequences that take turns cost each other `turn_s`.
    """
    target = TargetCost(Profile(MEASURED))
    for i in range(100):
        rows = (320, 160)[i % 2]
        target.observe(rows, 0, MEASURED[rows], 0.01 * i)
        target.observe_host(lead_s, 0.01 * i, is_beside=False)
        if turn_s:
            target.observe_turn(rows, MEASURED[rows] + turn_s / 2, turn_s / 2, 0.01 * i)
    return target
