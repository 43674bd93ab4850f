"""Records some steps of each kind in a verifier with torch's profiler, for `draftwire_bench.kernel_gaps`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from methods import wrapping  # type: ignore[import-not-found]  # in this directory, which is on the path

STEPS = 30
STEPS_BEFORE = 20  # of a kind, before the recorded steps
# Steps that are further apart belong to different levels.
GAP_S = 0.5


class PassProfiler:
    """Writes a trace of the device for `STEPS` consecutive steps of a kind (requests, with or without drafts).

    Used by the thread that launches steps.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run: Any = None
        self._kind: tuple[int, bool] | None = None  # requests of a step, and whether the step has drafts
        self._num_alike = 0
        self._number = 0
        self._last_step = self._began = 0.0  # monotonic times of the last step and record

    def note(self, rows: Sequence[Any]) -> None:
        """Count a step with these rows, which is about to be executed."""
        now = time.monotonic()
        kind = len(rows), any(row.num_drafts > 0 for row in rows)
        if kind != self._kind or now - self._last_step > GAP_S:
            self._stop(is_kept=False)
            self._kind, self._num_alike = kind, 0
        self._num_alike += 1
        self._last_step = now
        if self._run is not None and self._num_alike == STEPS_BEFORE + STEPS:
            self._stop(is_kept=True)
        elif self._num_alike == STEPS_BEFORE:
            self._start()
            self._began = now

    def _start(self) -> None:
        import torch  # only after the process has imported torch
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._run = profile(activities=[kind])
        self._run.start()

    def _stop(self, *, is_kept: bool) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.stop()
        if is_kept:
            assert self._kind is not None
            path = self._directory / f"{self._number}.json"
            self._number += 1
            run.export_chrome_trace(str(path))
            requests, has_drafts = self._kind
            about = {"at": self._began, "requests": requests, "has_drafts": has_drafts}
            path.with_suffix(".about").write_text(json.dumps(about))


def wrappers(directory: Path) -> dict[str, Callable[[ModuleType], None]]:
    """Return wrappers that record launched steps."""

    profiler = PassProfiler(directory)

    def noting(execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def noted(self: Any, step: Any, *args: Any) -> Any:
            profiler.note(step.rows)
            return execute(self, step, *args)

        return noted

    return {"verifier_service.engine.executor": wrapping({"Executor.execute": noting})}
