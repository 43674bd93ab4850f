"""Writes the run log: a table with one row per result file in benchmarks/results, newest first.

    python -m draftwire_bench.run_log [--check]

Writes benchmarks/results/README.md. --check only exits with status 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
HEADER = """# Results

Written by `make run-log` from the files of this folder. Each file has its whole command, machine and versions.
Output tokens/s are those of the steady state.

| date | commit | machine | benchmark | result | file |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Run:
    """One result file, as a row of the log."""

    date: str
    commit: str
    machine: str
    benchmark: str
    result: str
    file: str

    def row(self) -> str:
        """Return the run as a row of a Markdown table."""
        cells = (self.date, self.commit, self.machine, self.benchmark, self.result, f"[{self.file}]({self.file})")
        return "| " + " | ".join(cells) + " |"


def read_run(path: Path) -> Run:
    """Return the row of one result file; fields that an older file lacks are empty."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Run(
        date=str(result.get("date", ""))[:10],
        commit=str(result.get("commit") or ""),
        machine=describe_machine(result),
        benchmark=benchmark_name(str(result.get("command", ""))) or path.stem,
        result=headline(result),
        file=path.name,
    )


def describe_machine(result: Mapping[str, Any]) -> str:
    """Return the machine without driver versions, such as "2 x NVIDIA H200, 32 cores"."""
    machine = result.get("machine")
    if not machine:
        return str(result.get("device", ""))
    gpus = Counter(gpu.split(",")[0] for gpu in machine["gpus"])
    named = [f"{count} x {name}" for name, count in gpus.items()] or [machine["cpu"]]
    return ", ".join([*named, f"{machine['cores']} cores"])


def benchmark_name(command: str) -> str:
    """Return the benchmark's name in a command, such as "bench serve" or "far_drafter"; empty without one."""
    words = command.split()
    if words[:2] == ["draftwire", "bench"]:
        return " ".join(words[1:3])
    return next(filter(None, map(_module, words)), "")


def headline(result: Mapping[str, Any]) -> str:
    """Return the main figures of a result; empty for results that are tables."""
    if "levels" in result:
        return _serving(result["levels"])
    if "identical" in result:
        return f"{result['identical']} of {result['requests']} outputs identical ({result['dtype']})"
    if "gateway_share" in result:
        return f"through the gateway: {result['gateway_share']:.3f} of the direct throughput"
    if "schema_ratios" in result:
        shares = (f"{name} {min(own):.2f} to {max(own):.2f}" for name, own in result["schema_ratios"].items())
        return f"with a schema over without, drafts {', '.join(shares)}"
    if "modes" in result:
        return _draft_times(result["modes"])
    if "findings" in result:
        outcomes = Counter(finding["outcome"] for finding in result["findings"])
        return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    if "batches" in result:
        return "pass, ms: " + ", ".join(_pass_time(batch) for batch in result["batches"])
    if result.get("sizes"):
        return "pass, ms, " + "; ".join(_split_pass(size, measured) for size, measured in result["sizes"].items())
    ratios = [row["ratio"] for row in result.get("rows", ()) if "ratio" in row and "delay_ms" in row]
    if ratios:
        return f"with over without drafts: {min(ratios):.3f} to {max(ratios):.2f} at {len(ratios)} places"
    return ""


def _module(word: str) -> str:
    # `python -m draftwire_bench.forward`, or `python benchmarks/forward.py` in older files.
    if word.endswith(".py"):
        return Path(word).stem
    return word.rpartition(".")[2] if word.startswith(("benchmarks.", "draftwire_bench.")) else ""


def _serving(levels: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for label, drafting in (("off", False), ("on", True)):
        chosen = [level for level in levels if level["drafting"] is drafting]
        speeds = (f"{_speed(level):.0f} at {_load(level)}" for level in chosen)
        if chosen:
            parts.append(f"{label} {', '.join(speeds)}")
    return "tokens/s, drafts " + "; ".join(parts)


def _speed(level: Mapping[str, Any]) -> float:
    speed: float = level["tokens_per_s"]["steady"] or level["tokens_per_s"]["whole_run"]
    return speed


def _load(level: Mapping[str, Any]) -> str:
    return str(level["concurrency"] or f"{level['request_rate']}/s")


def _pass_time(batch: Mapping[str, Any]) -> str:
    return f"{batch['forward_ms']:.2f} for {batch['sequences']} x {batch['rows'] // batch['sequences']}"


def _split_pass(num_gpus: str, measured: Mapping[str, Any]) -> str:
    times = (f"{timed['step_ms']:.2f} for {batch.replace('x', ' x ')}" for batch, timed in measured["batches"].items())
    return f"on {num_gpus}: {', '.join(times)}"


def _draft_times(modes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    mode = "gumbel, dense" if "gumbel, dense" in modes else next(iter(modes))
    times = (f"{row['replay_ms']:.2f} for {row['batch']}" for row in modes[mode])
    return f"draft step ({mode}), ms: {', '.join(times)}"


def render(directory: Path) -> str:
    """Return the page for the result files of a directory."""
    runs = [read_run(path) for path in directory.glob("*.json")]
    runs.sort(key=lambda run: (run.date, run.file), reverse=True)
    return HEADER + "".join(run.row() + "\n" for run in runs)


def main(arguments: list[str] | None = None, directory: Path = RESULTS) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description="Write benchmarks/results/README.md from the result files.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = parser.parse_args(arguments)
    page, text = directory / "README.md", render(directory)
    if not options.check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page} is out of date: run `make run-log`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
