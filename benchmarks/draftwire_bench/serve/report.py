"""The report of `draftwire bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from draftwire.client.missing_drafts import cause_text, counted
from draftwire.contract.validation import speculative_config_to_mapping
from draftwire.server.memory_table import memory_mapping, memory_table
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.output import make_table
from draftwire_bench.serve.load import ClientLoad
from draftwire_bench.serve.metrics import PHASES, Percentiles, step_seconds
from draftwire_bench.serve.serve import LevelResult, ServeOptions


def report(info: pb.GetVerifierInfoResponse, options: ServeOptions, results: Sequence[LevelResult]) -> dict[str, Any]:
    """Return the report as JSON-compatible values, without the environment."""
    return {
        "benchmark": "serve",
        "server": describe_server(info),
        "memory_bytes": memory_mapping(info),
        "workload": {
            "output_tokens": options.shape.output_tokens,
            "temperature": options.shape.temperature,
            "sampling_params": dict(options.shape.sampling),
            "num_speculative_tokens": list(options.shape.num_speculative_tokens),
            "seed": options.shape.seed,
            "warmup_tokens": options.warmup_tokens,
        },
        "levels": [describe_level(result) for result in results],
        "speed_up": [{"level": str(on.level), "on_over_off": ratio} for on, ratio in speed_ups(results)],
    }


def describe_server(info: pb.GetVerifierInfoResponse) -> dict[str, Any]:
    """Return the description of the measured verifier."""
    return {
        "version": info.version,
        "target": info.target,
        "vocab_size": info.vocab_size,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "device": info.device,
        "dtype": info.dtype,
        "speculative_config": speculative_config_to_mapping(info.speculative_config),
        "drafters": [
            {"head_fingerprint": drafter.head_fingerprint, "feature_row_bytes": drafter.feature_row_bytes}
            for drafter in info.drafters
        ],
    }


def describe_level(result: LevelResult) -> dict[str, Any]:
    """Return a level's figures for a result file."""
    return {
        "concurrency": result.level.concurrency,
        "request_rate": result.level.request_rate,
        "drafting": result.drafting,
        "requests": result.requests,
        "tokens_per_s": asdict(result.throughput),
        "requests_per_s": result.requests_per_s,
        "latency_s": asdict(result.latencies),
        "acceptance": {
            **asdict(result.acceptance),
            "length": result.acceptance.length,
            "rates": result.acceptance.rates,
        },
        "whole_run": _counters(result.counters),
        "steady": None if result.steady_counters is None else _counters(result.steady_counters),
        "bytes_per_accepted_token": result.bytes_per_accepted_token,
        "clients": [{**asdict(load), "saturated": load.is_saturated} for load in result.clients],
        "work_skipped_or_repeated": list(result.problems),
    }


def _carrier_name(carrier: int) -> str:
    from draftwire.transport.carriers import carrier_name  # imports torch, which takes seconds

    return carrier_name(carrier)


def _counters(counters: pb.EngineCounters) -> dict[str, Any]:
    return {
        "steps": counters.steps,
        "prompt_rows": counters.prompt_rows,
        "verify_steps": counters.verify_steps,
        "verify_rows": counters.verify_rows,
        "ms_per_step": {phase: 1000 * seconds for phase, seconds in step_seconds(counters).items()},
        "traffic": {
            _carrier_name(traffic.carrier): {
                "steps": traffic.steps,
                "feature_rows": traffic.feature_rows,
                "feature_bytes": traffic.feature_bytes,
                "logits_bytes": traffic.logits_bytes,
            }
            for traffic in counters.traffic
        },
    }


def speed_ups(results: Sequence[LevelResult]) -> list[tuple[LevelResult, float]]:
    """Return each result with drafting on, and its throughput relative to the same level with drafting off."""
    off = {result.level: result for result in results if not result.drafting}
    return [(on, on.tokens_per_s / off[on.level].tokens_per_s) for on in results if on.drafting and on.level in off]


def print_report(info: pb.GetVerifierInfoResponse, results: Sequence[LevelResult], console: Console) -> None:
    """Print the tables with their remarks."""
    measured = (_speed_table(info, results), _latency_table(results), _step_table(results))
    for table in (*measured, memory_table(info, SIMPLE)):
        console.print(table)
    if info.speculative_config.synthetic_acceptance_length or info.speculative_config.synthetic_acceptance_rates:
        console.print("acceptance is synthetic: the output does not follow the target; no work was skipped or repeated")
    for result in results:
        if result.problems:
            console.print(work_text(_name(result), result.problems, result.counters))
    console.print(clients_text([(_name(result), load) for result in results for load in result.clients]))


def work_text(name: str, problems: Sequence[str], counters: pb.EngineCounters) -> str:
    """Describe the skipped or repeated work of a level, the consequence for the figures, and why drafts are missing."""
    text = (
        f"{name}: {'; '.join(problems)}. So this is not the speed with a fixed number of drafts in every step: "
        "do not compare it to runs that do all of the work."
    )
    missing = sorted(counted(counters.fallbacks).items(), key=lambda pair: -pair[1])
    if not missing:
        return text
    causes = "; ".join(f"{tokens} because {cause_text(cause)}" for cause, tokens in missing)
    text += f" Tokens without drafts: {causes}."
    if pb.FALLBACK_CAUSE_PACE in dict(missing):
        text += " A verifier with --no-adaptive-k always requests all drafts."
    return text


def _name(result: LevelResult) -> str:
    return f"{result.level} {'on' if result.drafting else 'off'}"


def _table(title: str, columns: Sequence[str]) -> Table:
    return make_table(title, ("requests, drafts", *columns))


def _speed_table(info: pb.GetVerifierInfoResponse, results: Sequence[LevelResult]) -> Table:
    title = f"{info.target} on {info.device} in {info.dtype}: output tokens/s; acceptance rate per position"
    table = _table(title, ("steady state", "whole run", "on / off", "requests/s", "acceptance length", "per position"))
    ratios = {id(on): ratio for on, ratio in speed_ups(results)}
    for result in results:
        steady, length = result.throughput.steady, result.acceptance.length
        table.add_row(
            _name(result),
            "-" if steady is None else f"{steady:.1f}",
            f"{result.throughput.whole_run:.1f}",
            f"{ratios[id(result)]:.2f}" if id(result) in ratios else "",
            f"{result.requests_per_s:.2f}",
            f"{length:.2f}" if result.drafting and length else "",
            " ".join(f"{rate:.2f}" for rate in result.acceptance.rates) if result.drafting else "",
        )
    return table


def _latency_table(results: Sequence[LevelResult]) -> Table:
    columns = ("first token", "between messages", "per output token")
    table = _table("Latencies, ms: p50, p90, p99", columns)
    for result in results:
        seen = result.latencies
        values = (seen.first_token, seen.inter_token, seen.per_output_token)
        table.add_row(_name(result), *(_milliseconds(value) for value in values))
    return table


def _milliseconds(value: Percentiles | None) -> str:
    if value is None:
        return "-"
    return " ".join(f"{1000 * seconds:.1f}" for seconds in (value.p50, value.p90, value.p99))


def _step_table(results: Sequence[LevelResult]) -> Table:
    title = "An engine step, mean ms by phase, in the steady state if any; bytes to and from the drafters"
    table = _table(title, (*PHASES, "sum", "steps", "rows / step", "bytes / accepted", "carrier"))
    for result in results:
        counters = result.steady_counters or result.counters
        seconds = step_seconds(counters)
        sent = result.bytes_per_accepted_token
        table.add_row(
            _name(result),
            *(f"{1000 * seconds[phase]:.2f}" for phase in PHASES),
            f"{1000 * sum(seconds.values()):.2f}",
            str(counters.steps),
            f"{(counters.verify_rows + counters.prompt_rows) / max(counters.steps, 1):.1f}",
            "" if sent is None else f"{sent:.0f}",
            " ".join(_carrier_name(traffic.carrier) for traffic in counters.traffic),
        )
    return table


def clients_text(loads: Sequence[tuple[str, ClientLoad]]) -> str:
    """Return a sentence on whether the client processes may have limited the result; `loads` are (level, load)."""
    busiest = max(load.cpu_share for _, load in loads)
    latest = max(load.lag_p99_s for _, load in loads)
    figures = f"busiest process {100 * busiest:.0f} % of a core, event loop {1000 * latest:.1f} ms late at p99"
    levels = list(dict.fromkeys(name for name, load in loads if load.is_saturated))
    if not levels:
        return f"The client processes did not limit the result ({figures})."
    return (
        f"The client processes may have limited the result at {', '.join(levels)} ({figures}). "
        "Measure again with more --client-processes, or from another machine."
    )
