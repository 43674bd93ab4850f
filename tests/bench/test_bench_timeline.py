"""The timeline of a step: what it records exists, and what it prints follows from the records."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.timeline import HOOK, NAMES, read, stretches, way, ways
from benchmarks.timeline_hook.calls import CALLS, WAY, WAYS_AHEAD, WAYS_BY_BOARD

ROOT = Path(__file__).resolve().parents[2]


def test_every_method_that_is_recorded_exists():
    for module, names in CALLS.items():
        for name in names:
            owner, method = name.split(".")
            assert callable(getattr(getattr(importlib.import_module(module), owner), method))
    assert {mark.call for marks in (WAY, *WAYS_AHEAD, *WAYS_BY_BOARD) for mark in marks} <= set(NAMES)


def test_a_process_records_its_calls_until_it_is_killed(tmp_path):
    program = """if True:
        import os, signal
        from drafter_service.step_decoder import StepDecoder
        for _ in range(3):
            try:
                StepDecoder.decode(None, None)
            except AttributeError:
                pass
        os.kill(os.getpid(), signal.SIGKILL)
        """
    path = os.pathsep.join([str(HOOK), str(ROOT), str(ROOT / "kernels")])
    env = os.environ | {"PYTHONPATH": path, "DRAFTWIRE_TIMELINE": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == -9
    records = read(tmp_path)
    calls = records["StepDecoder.decode"]
    assert calls.shape == (3, 2)
    assert (calls[:, 0] <= calls[:, 1]).all()
    assert sum(map(len, records.values())) == 3


def test_what_is_gone_through_for_practice_is_on_no_steps_way(tmp_path):
    program = """if True:
        from draftwire.practice import Practice, rehearse_with
        from drafter_service.rehearsal import Rehearsal
        rehearsal = rehearse_with(Rehearsal)
        practice = Practice(rehearsal, 1.0)
        for _ in range(30):
            practice.go_on()
        other = Rehearsal()
        other.prepare()
        list(other.run())
        """
    path = os.pathsep.join([str(HOOK), str(ROOT), str(ROOT / "kernels")])
    env = os.environ | {"PYTHONPATH": path, "DRAFTWIRE_TIMELINE": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == 0
    assert len(read(tmp_path)["StepDecoder.decode"]) == 1  # the one that was called directly


@pytest.mark.parametrize("lead", [0.0, 0.2e-3])
@pytest.mark.parametrize("marks", [WAY, *WAYS_AHEAD, *WAYS_BY_BOARD])
def test_the_way_of_a_step_goes_from_mark_to_mark(marks, lead):
    """200 steps, 10 ms apart; the marks of each are half a millisecond apart, and may begin before its tokens."""
    starts = 100 + 0.01 * np.arange(200)
    records = {name: np.empty((200, 2)) for name in NAMES}
    lead = 0.0 if marks[0] == WAY[0] else lead
    records[WAY[0].call][:, 1] = starts + lead
    for i, mark in enumerate(marks):
        records[mark.call][:, int(mark.end == "end")] = starts + 0.5e-3 * i
    found = way(records, marks, 100.5, 101.5)
    assert found == pytest.approx([0.5e-3 * i - lead for i in range(len(marks))], abs=1e-6)
    assert all(a <= b for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((), (WAY,)),
        (("DraftsAhead.begin", "Proposer.start"), WAYS_AHEAD),
        (("DraftsAhead.begin", "Proposer.start", "PassAhead.begin_with_board"), WAYS_BY_BOARD),
    ],
)
def test_the_ways_are_those_that_the_steps_have_taken(calls, expected):
    records = {name: np.zeros((0, 2)) for name in NAMES}
    for name in {mark.call for mark in WAY} | set(calls):
        records[name] = np.zeros((3, 2))
    assert ways(records) == expected


def test_levels_of_load_are_stretches_of_their_own_and_a_few_steps_are_none():
    records = {name: np.empty((0, 2)) for name in NAMES}
    begun = np.concatenate([np.arange(100) * 0.01, 5 + np.arange(80) * 0.01, 9 + np.arange(10) * 0.01])
    records[WAY[-1].call] = np.stack([begun - 1e-3, begun], 1)
    assert stretches(records) == pytest.approx([(0.25, 0.75), (5.2, 5.6)])
