"""The time of the target's pass, on the CPU with the demo pair's shape and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from draftwire_bench.forward import main

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SMALL = (
    *("--device", "cpu", "--target", str(DEMO / "target"), "--profiled", "", "--max-num-seqs", "2"),
    *("--batches", "1x1", "--prompts", "1x8"),
)


def test_each_batch_is_timed_on_each_number_of_devices(tmp_path):
    path = tmp_path / "out.json"
    sizes = ("--gpus", "1,2", "--batches", "1x1,2x5", "--context", "32", "--max-model-len", "64")
    result = CliRunner().invoke(main, [*SMALL, *sizes, "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["sizes"]
    assert list(found) == ["1", "2"]
    for measured in found.values():
        assert measured["start_s"] > 0
        assert (list(measured["batches"]), list(measured["prompts"])) == (["1x1", "2x5"], ["1x8"])
        for times in (*measured["batches"].values(), *measured["prompts"].values()):
            assert times["step_ms"] > 0
            assert times["alone_ms"] >= times["launch_ms"] > 0
    assert "start with 2" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--batches", "1x5,5"), "'5': allowed: sequences x rows, as in 1x5: at most 2 sequences of 512 rows"),
        (("--batches", "3x1"), "'3x1': allowed: sequences x rows"),
        (("--batches", "1x513"), "'1x513': allowed: sequences x rows"),
        (("--prompts", "2x400"), "'2x400': allowed: 512 rows in all"),
    ],
)
def test_a_batch_that_the_runner_cannot_take_is_named(arguments, text):
    result = CliRunner().invoke(main, [*SMALL, *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_a_process_without_a_result_fails_the_command():
    result = CliRunner().invoke(main, [*SMALL, "--target", str(DEMO / "missing")])
    assert result.exit_code == 1
    assert "the measurement ended with status 1 and without a result" in result.output
