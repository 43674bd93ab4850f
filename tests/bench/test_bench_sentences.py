"""Sentences in the report of `draftwire bench serve`, and its report after Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_verifier import FakeVerifier, served

from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.serve.load import ClientLoad
from draftwire_bench.serve.report import clients_text, work_text
from draftwire_cli.main import main


def test_skipped_work_has_a_consequence_and_its_causes() -> None:
    counters = pb.EngineCounters()
    counters.fallbacks.add(cause=pb.FALLBACK_CAUSE_LAST_TOKEN, tokens=8)
    counters.fallbacks.add(cause=pb.FALLBACK_CAUSE_PACE, tokens=900)
    assert work_text("4 on", ["265 rows were verified instead of 1198"], counters) == (
        "4 on: 265 rows were verified instead of 1198. So this is not the speed with a fixed number of drafts in every "
        "step: do not compare it to runs that do all of the work. Tokens without drafts: 900 "
        "because pacing has switched drafting off: decoding without drafts is faster, or is being measured; 8 because "
        "the output had room for only one more token. A verifier with --no-adaptive-k always requests all drafts."
    )


def test_without_causes_none_are_described() -> None:
    text = work_text("4 off", ["1 output tokens instead of 2"], pb.EngineCounters())
    assert text.endswith("do not compare it to runs that do all of the work.")


def test_busy_clients_are_named_with_what_to_do() -> None:
    idle, busy = ClientLoad(0.2, 0.001), ClientLoad(0.8, 0.007)
    assert clients_text([("1 on", idle)]) == (
        "The client processes did not limit the result (busiest process 20 % of a core, event loop 1.0 ms late at p99)."
    )
    assert clients_text([("1 on", idle), ("64 off", busy), ("64 on", busy), ("64 on", busy)]) == (
        "The client processes may have limited the result at 64 off, 64 on (busiest process 80 % of a core, event loop "
        "7.0 ms late at p99). Measure again with more --client-processes, or from another machine."
    )


@pytest.mark.full
def test_ctrl_c_reports_the_levels_measured_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    result = interrupted_run(monkeypatch, 2, "--json", str(path))
    assert result.exit_code == 130
    assert "interrupted: 1 of 2 runs were measured" in result.output
    assert [level["drafting"] for level in json.loads(path.read_text())["levels"]] == [False]


@pytest.mark.full
def test_ctrl_c_before_the_first_level_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = interrupted_run(monkeypatch, 1)
    assert result.exit_code == 130
    assert "interrupted: 0 of 2 runs were measured" in result.output


def interrupted_run(monkeypatch: pytest.MonkeyPatch, level: int, *arguments: str) -> Result:
    """Run two levels and send Ctrl-C when the level of this number is announced."""
    from rich.status import Status

    announced = []
    update = Status.update

    def interrupt(status: Status, text: str) -> None:
        announced.append(text)
        if len(announced) == level:
            raise KeyboardInterrupt
        update(status, text)

    monkeypatch.setattr(Status, "update", interrupt)
    sizes = ("--concurrency", "2", "--prompt-tokens", "5", "--output-tokens", "9", "--client-processes", "1")
    with served(FakeVerifier()) as address:
        return CliRunner().invoke(main, ["bench", "serve", "--server", address, *sizes, *arguments])
