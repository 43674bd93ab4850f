"""Which sequences share a verify step: whether those that are ready wait for drafts that are on their way.

A step pays for the target's weights whatever its rows, so two groups that are ready within less than that fixed time of
each other are faster as one. Further apart they had better alternate: the pass of one hides the latency of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verifier_service.pacing.costs import TargetCost


@dataclass(frozen=True)
class Group:
    """Sequences that run in one step."""

    rows: int
    tokens: float  # expected to be emitted


@dataclass(frozen=True)
class Expected:
    """A group whose drafts are on their way."""

    group: Group
    arrival: float  # monotonic time
    latest: float  # monotonic time after which they are not counted on


def hold_until(
    now: float, ready: Group, undrafted: Group, expected: Iterable[Expected], target: TargetCost, lead_s: float = 0.0
) -> float | None:
    """Time until which a step of `ready` should wait for drafts, None for not at all.

    Parameters
    ----------
    undrafted
        The part of `ready` that waits for no drafts and so is ready again for the next step.
    lead_s
        What the host takes before a step of `ready`, where the joint one would be launched while its drafts are
        awaited, and the second of two while the first one runs; else 0.

    Notes
    -----
    With the group joined, ready and expected tokens come out after the wait and one step. Without it they come out
    after two steps, in the second of which the sequences without drafts run again. The greater rate of tokens wins.
    With no such sequences this is: wait while the drafts are less than the fixed time of a step away.
    """
    fixed = target.fixed
    best, until = 0.0, None
    rows, tokens = 0, 0.0
    for one in sorted(expected, key=lambda entry: entry.arrival):
        delay = max(0.0, one.arrival - now)
        if now >= one.latest or delay >= fixed:
            continue
        rows, tokens = rows + one.group.rows, tokens + one.group.tokens
        joined = (ready.tokens + tokens) / (max(delay, lead_s) + target.seconds(ready.rows + rows))
        apart = (ready.tokens + tokens + undrafted.tokens) / (
            lead_s + target.seconds(ready.rows) + target.seconds(rows + undrafted.rows)
        )
        if joined > max(best, apart):
            best, until = joined, one.latest
    return until
