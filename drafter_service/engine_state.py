"""What a scrape of the metrics reads of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drafter_service.answer import Load
from drafter_service.engine_times import Phase


@dataclass(frozen=True)
class EngineState:
    """Its load, its queue and its counters."""

    load: Load
    waiting_rows: int  # of steps that it has, in no batch yet
    evictions: int  # sequences taken away for another session's
    seconds: Mapping[Phase, float]
