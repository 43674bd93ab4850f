"""The timeline of a step: the recorded methods exist, and the printed figures follow from the records."""

from __future__ import annotations

import importlib
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from draftwire_bench.hook.calls import CALLS, DRAFTED, WAY, WAY_WITHOUT_DRAFTS, WAYS_BOTH_EARLY, WAYS_EARLY
from draftwire_bench.timeline import NAMES, main, read, run_recorded, stretches, summaries, way, ways, without_drafts

ROOT = Path(__file__).resolve().parents[2]


def test_every_method_that_is_recorded_exists():
    for module, names in CALLS.items():
        for name in names:
            owner, method = name.split(".")
            assert callable(getattr(getattr(importlib.import_module(module), owner), method))
    every = (WAY, WAY_WITHOUT_DRAFTS, [DRAFTED], *WAYS_EARLY, *WAYS_BOTH_EARLY)
    assert {mark.call for marks in every for mark in marks} <= set(NAMES)


def test_a_process_records_its_calls_until_it_is_killed(tmp_path, monkeypatch):
    program = """if True:
        import os, signal
        from drafter_service.server.step_decoder import StepDecoder
        for _ in range(3):
            try:
                StepDecoder.decode(None, None)
            except AttributeError:
                pass
        os.kill(os.getpid(), signal.SIGKILL)
        """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    assert run_recorded([sys.executable, "-c", program], tmp_path) == -9
    records = read(tmp_path)
    calls = records["StepDecoder.decode"]
    assert calls.shape == (3, 2)
    assert (calls[:, 0] <= calls[:, 1]).all()
    assert sum(map(len, records.values())) == 3


@pytest.mark.parametrize("lead", [0.0, 0.2e-3])
@pytest.mark.parametrize("marks", [WAY, *WAYS_EARLY, *WAYS_BOTH_EARLY])
def test_the_way_of_a_step_goes_from_mark_to_mark(marks, lead):
    """200 steps, 10 ms apart, with marks 0.5 ms apart; a step's tokens come `lead` seconds after its first mark."""
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
        (("EarlyDrafts.begin", "Proposer.start"), WAYS_EARLY),
        (("EarlyDrafts.begin", "Proposer.start", "Executor.take_early_drafts"), WAYS_BOTH_EARLY),
    ],
)
def test_the_ways_are_those_that_the_steps_have_taken(calls, expected):
    records = {name: np.zeros((0, 2)) for name in NAMES}
    for name in {mark.call for mark in WAY} | set(calls):
        records[name] = np.zeros((3, 2))
    assert ways(records) == expected


def test_a_step_without_drafts_ends_with_its_own_tokens():
    """200 steps, 10 ms apart, each launched within 1 ms after the tokens of the previous step."""
    starts = 100 + 0.01 * np.arange(200)
    records = {name: np.empty((0, 2)) for name in NAMES}
    records["TokenSampler.finish"] = np.stack([starts - 1e-3, starts], 1)
    records["Executor.execute"] = np.stack([starts + 0.2e-3, starts + 0.9e-3], 1)
    records["StepGraph.launch"] = np.stack([starts + 0.3e-3, starts + 0.7e-3], 1)
    found = way(records, WAY_WITHOUT_DRAFTS, 100.5, 101.5)
    assert found == pytest.approx([0, 0.2e-3, 0.3e-3, 0.7e-3, 0.9e-3, 10e-3], abs=1e-6)


def test_steps_without_drafts_are_those_far_from_any_with_some():
    records = {name: np.empty((0, 2)) for name in NAMES}
    tokens, begun = 0.005 + np.arange(1000) * 0.01, 4 + np.arange(200) * 0.01
    records[WAY[0].call] = np.stack([tokens - 1e-3, tokens], 1)
    records[DRAFTED.call] = np.stack([begun - 1e-3, begun], 1)
    found = without_drafts(records)
    assert found == pytest.approx([time for time in tokens if time < 3.5 or time > 6.49])
    assert np.array(stretches(found)) == pytest.approx(np.array([(0.875, 2.625), (7.365, 9.125)]), abs=0.011)


def test_load_levels_are_separate_stretches_of_many_steps():
    begun = np.concatenate([np.arange(100) * 0.01, 5 + np.arange(80) * 0.01, 9 + np.arange(10) * 0.01])
    assert stretches(begun) == pytest.approx([(0.25, 0.75), (5.2, 5.6)])


def test_a_summary_has_the_way_and_the_calls_of_each_stretch():
    """1000 steps without drafts, 10 ms apart, each with two launches of 0.7 ms."""
    tokens = 0.01 * np.arange(1000)
    records = {name: np.empty((0, 2)) for name in NAMES}
    records["TokenSampler.finish"] = np.stack([tokens - 1e-3, tokens], 1)
    launches = np.concatenate([tokens + 0.2e-3, tokens + 5e-3])
    records["Executor.execute"] = np.stack([launches, launches + 0.7e-3], 1)
    (summary,) = summaries(records)
    assert (summary["drafts"], summary["steps"]) == (False, 500)
    assert summary["ms_each"] == pytest.approx(10)
    assert summary["calls"]["Executor.execute"] == pytest.approx({"a_step": 2, "median_us": 700})
    ((first, *_, last),) = summary["ways"]
    assert (first["mark"], first["us"]) == ("TokenSampler.finish end", pytest.approx(0, abs=1))
    assert (last["mark"], last["us"]) == ("TokenSampler.finish end", pytest.approx(10_000, abs=1))


def test_the_command_keeps_its_options_and_its_status(tmp_path):
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    program = "import sys; open(sys.argv[2], 'w').write(sys.argv[1]); sys.exit(3)"
    command = [sys.executable, "-c", program, "--json", str(other)]
    result = CliRunner().invoke(main, ["--json", str(own), *command])
    assert result.exit_code == 3, result.output
    assert other.read_text() == "--json"
    document = json.loads(own.read_text())
    assert document["stretches"] == []
    assert document["machine"]["cores"] > 0
