"""State of one verifier's stream in the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.answer import Answer
from drafter_service.engine.step_work import StepWork


@dataclass(eq=False)
class Session:
    """Sequences and waiting steps of one stream; only the engine's thread uses it."""

    terms: SessionTerms
    deliver: Callable[[Answer | Exception], None]  # called on the engine's thread
    slots: dict[int, int] = field(default_factory=dict)  # of the open sequences, by id
    waiting_steps: deque[StepWork] = field(default_factory=deque)
    waiting_rows: int = 0
    # Early batches that may begin: one for each arrived step. Negative after a dropped early batch.
    steps_ahead: int = 0
    has_claimed: bool = False  # room of evicted sequences is free in the next batch
