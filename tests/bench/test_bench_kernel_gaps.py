"""The time between the kernels of passes: what is recorded, and what is made of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftwire_bench.kernel_gaps import main, passes_of

ROOT = Path(__file__).resolve().parents[2]


def events_of(launch: int, starts: list[float], taken: float) -> list[dict[str, Any]]:
    return [{"cat": "kernel", "ts": at, "dur": taken, "args": {"correlation": launch}} for at in starts]


def test_gaps_between_kernels_are_separate_from_kernel_times():
    """Three passes of 40 kernels of 2 us each, by 0.5 and 1 us apart and by 0.5 over each other; beside them a pass of
    50, a launch of one kernel and a copy."""
    events = [
        *events_of(1, [2.5 * i for i in range(40)], 2.0),
        *events_of(2, [1000 + 3 * i for i in range(40)], 2.0),
        *events_of(3, [2000 + 1.5 * i for i in range(40)][::-1], 2.0),
        *events_of(4, [3000 + 9 * i for i in range(50)], 2.0),
        *events_of(5, [4000], 700.0),
        {"cat": "gpu_memcpy", "ts": 5000, "dur": 3, "args": {"correlation": 1}},
        {"ph": "M", "name": "process_name"},
    ]
    assert passes_of(events) == pytest.approx((3, 40, 80.0, 39 * 0.5))


def test_single_launches_are_no_passes():
    assert passes_of([event for i in range(100) for event in events_of(i, [10.0 * i], 2.0)]) is None


def test_steps_of_each_kind_are_recorded_once_in_a_level(tmp_path, monkeypatch):
    """The steps of a launcher that has nothing to launch: too few of a kind, 8 requests with drafts, pause, again."""
    program = """if True:
        import time
        from types import SimpleNamespace
        import verifier_service.engine.executor as module
        def step(requests, drafts):
            planned = SimpleNamespace(rows=[SimpleNamespace(num_drafts=drafts)] * requests)
            try:
                module.Executor.execute(None, planned, None)
            except AttributeError:
                pass
        for requests, drafts, count in ((1, 0, 30), (8, 4, 60), (8, 4, 60), (2, 0, 60)):
            for _ in range(count):
                step(requests, drafts)
            time.sleep(0.6)
        """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    path = tmp_path / "gaps.json"
    result = CliRunner().invoke(main, ["--json", str(path), sys.executable, "-c", program])
    assert result.exit_code == 0, result.output
    records = json.loads(path.read_text())["records"]
    assert [(record["requests"], record["has_drafts"]) for record in records] == [(8, True), (8, True), (2, False)]
