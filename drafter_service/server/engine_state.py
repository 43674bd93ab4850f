"""The engine's state for the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.engine.answer import Load


@dataclass(frozen=True)
class EngineState:
    """Load, queue and counters of the engine."""

    load: Load
    waiting_rows: int  # rows of waiting steps
    evictions: int  # sequences evicted for another session
    taken_ahead: int  # early batches that a Commit took
    wasted_ahead: int  # early batches that were dropped
    idle_s: float  # seconds of the engine's thread without a step
