"""The run log lists every result file with its figures, and the page that is checked in is current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwire_bench import run_log

MACHINE = {"cpu": "AMD EPYC", "cores": 32, "gpus": ["NVIDIA H200, 580.159.04", "NVIDIA H200, 580.159.04"]}


def write(directory: Path, name: str, **fields: Any) -> Path:
    path = directory / name
    path.write_text(json.dumps({"date": "2026-11-27T06:39:54+00:00", "commit": "68f0b3e", "machine": MACHINE} | fields))
    return path


def level(concurrency: int, drafting: bool, steady: float | None, whole_run: float = 90.4) -> dict[str, Any]:
    tokens_per_s = {"steady": steady, "whole_run": whole_run}
    return {"concurrency": concurrency, "request_rate": 20.0, "drafting": drafting, "tokens_per_s": tokens_per_s}


def test_a_row_has_date_commit_machine_and_file(tmp_path: Path) -> None:
    command = "draftwire bench serve --dtype bfloat16"
    path = write(tmp_path, "serve.json", command=command, levels=[level(8, True, 3810.98)])
    assert run_log.read_run(path).row() == (
        "| 2026-11-27 | 68f0b3e | 2 x NVIDIA H200, 32 cores | bench serve "
        "| tokens/s, drafts on 3811 at 8 | [serve.json](serve.json) |"
    )


@pytest.mark.parametrize(
    ("result", "figures"),
    [
        ({"levels": [level(1, False, 215.8), level(1, True, 512.2)]}, "tokens/s, drafts off 216 at 1; on 512 at 1"),
        ({"levels": [level(0, False, None)]}, "tokens/s, drafts off 90 at 20.0/s"),
        ({"requests": 16, "identical": 15, "dtype": "bfloat16"}, "15 of 16 outputs identical (bfloat16)"),
        ({"findings": [{"outcome": "served"}, {"outcome": "refused"}, {"outcome": "served"}]}, "2 served, 1 refused"),
        ({"batches": [{"sequences": 32, "rows": 160, "forward_ms": 6.388}]}, "pass, ms: 6.39 for 32 x 5"),
        (
            {"sizes": {"1": {"batches": {"1x5": {"step_ms": 4.654}}}, "2": {"batches": {"1x5": {"step_ms": 3.729}}}}},
            "pass, ms, on 1: 4.65 for 1 x 5; on 2: 3.73 for 1 x 5",
        ),
        (
            {"rows": [{"delay_ms": 0.2, "ratio": 1.52}, {"delay_ms": 1.0, "ratio": 0.9751}]},
            "with over without drafts: 0.975 to 1.52 at 2 places",
        ),
        (
            {"schema_ratios": {"off": [0.9, 0.85], "on": [0.8]}},
            "with a schema over without, drafts off 0.85 to 0.90, on 0.80 to 0.80",
        ),
        ({"rows": [{"median_us": 3.0}]}, ""),
    ],
)
def test_the_headline_sums_a_result_up(result: dict[str, Any], figures: str) -> None:
    assert run_log.headline(result) == figures


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("draftwire bench transport --sender-device cuda:0", "bench transport"),
        ("python -m draftwire_bench.far_drafter --rounds 2", "far_drafter"),
        ("python -m draftwire_bench.forward --batches 1x5", "forward"),
        ("python benchmarks/draftwire_bench/forward.py --skip-warm-start", "forward"),
        ("", ""),
    ],
)
def test_a_command_gives_the_benchmark_its_name(command: str, name: str) -> None:
    assert run_log.benchmark_name(command) == name


def test_an_old_file_without_machine_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "attention-h200.json").write_text(json.dumps({"device": "NVIDIA H200"}))
    run = run_log.read_run(tmp_path / "attention-h200.json")
    assert (run.date, run.commit, run.machine, run.benchmark) == ("", "", "NVIDIA H200", "attention-h200")


def test_newest_runs_come_first(tmp_path: Path) -> None:
    write(tmp_path, "old.json", date="2026-11-21T00:00:00+00:00")
    write(tmp_path, "new.json", date="2026-11-27T00:00:00+00:00")
    page = run_log.render(tmp_path)
    assert page.index("new.json") < page.index("old.json")


def test_check_fails_until_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "serve.json", levels=[level(1, True, 512.2)])
    assert run_log.main(["--check"], tmp_path) == 1
    assert "make run-log" in capsys.readouterr().err
    assert run_log.main([], tmp_path) == 0
    assert run_log.main(["--check"], tmp_path) == 0


def test_the_page_that_is_checked_in_is_current() -> None:
    assert run_log.main(["--check"]) == 0
