"""What a scrape of the metrics reads of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.engine.answer import Load


@dataclass(frozen=True)
class EngineState:
    """Its load, its queue and its counters."""

    load: Load
    waiting_rows: int  # of steps that it has, in no batch yet
    evictions: int  # sequences taken away for another session's
    taken_ahead: int  # batches that were begun before their step, and that a step asked for
    wasted_ahead: int  # and that none did
    idle_s: float  # time of its thread without a step
