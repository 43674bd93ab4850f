"""Which sequences share a verify step: whether those that are ready wait for drafts that are on their way.

A step pays for the target's weights whatever its rows, so two groups that are ready within less than that fixed time of
each other are faster as one. Further apart they had better alternate: the pass of one hides the latency of the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from verifier_service.pacing.costs import TargetCost

# Drafts that are too late for a step are counted on to join the next one only where the others' drafts take less than
# this share of a step's fixed time: nearer to it they have a step of their own as soon as the others are a little late.
JOIN_WITHIN = 0.75


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
    latest: float  # monotonic time after which they are not waited for
    # Of those that join the next step of the ready ones where these go without them now: from the landing of a step to
    # its next drafts. Infinite for those that would have a step of their own.
    redraft_s: float = math.inf


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

    Where they would join the next step instead, two steps are compared, which are joint both times or the second time
    alone: a few that have just begun, whose drafter reads their prompts, miss one rather than that all wait for them.

    Drafts that are overdue are expected to take as long again as they are.
    """
    fixed = target.fixed
    best, until = 0.0, None
    rows, tokens, redraft_s = 0, 0.0, 0.0
    alone_s = target.seconds(ready.rows)
    for one in sorted(expected, key=lambda entry: entry.arrival):
        delay = abs(one.arrival - now)
        if now >= one.latest or delay >= fixed:
            continue
        rows, tokens = rows + one.group.rows, tokens + one.group.tokens
        redraft_s = max(redraft_s, one.redraft_s)
        both, joint_s = ready.tokens + tokens, target.seconds(ready.rows + rows)
        apart = (both + undrafted.tokens) / (lead_s + alone_s + target.seconds(rows + undrafted.rows))
        # The longest wait with which the joint step is no worse than one for each, and than to join the next one.
        longest = both / max(best, apart) - joint_s
        if redraft_s < JOIN_WITHIN * fixed:
            late = (both + ready.tokens) / (lead_s + alone_s + redraft_s + joint_s)
            longest = min(longest, 2 * both / late - 2 * joint_s - redraft_s)
        if max(delay, lead_s) < longest:
            best, until = both / (max(delay, lead_s) + joint_s), min(one.latest, one.arrival + longest)
    return until
