"""Step time of a target on one GPU and on several GPUs of a host, after a check of the output on several GPUs.

    python -m draftwire_bench.tensor_parallel --json benchmarks/results/tensor-parallel-h200-8b.json

Measures the 8B shape with random bfloat16 weights on 1 GPU and on 2, each in a new process: the time of the start, and
for each batch BxQ (B sequences with Q rows each after --context rows) the step with the verifier's runner, including
CUDA graphs and workers, back to back and single.

The checks run first, with the demo pair in float32 and both services: greedy output on 2 GPUs equals that on 1, a
verifier exits with status 0 on SIGTERM, and a verifier that loses a rank ends. The exit code is 1 if a check fails; the
file is written after each part. `--device cpu --target models/demo/target --batches 1x1,2x5` runs without GPUs.

The run takes about as long as five starts of a verifier with compilation; `--no-checks` and `--no-steps` skip one half.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from draftwire import Client
from draftwire.contract.errors import DraftwireError
from draftwire.contract.validation import parse_speculative_config
from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import choose_device
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire_bench.demo_prompts import PROMPTS
from draftwire_bench.environment import describe
from draftwire_bench.forward import BATCHES, SHAPE, decode_step, parse_batches
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier
from draftwire_bench.services import NO_DEADLINE, wait_for_drafters
from verifier_service.host.ranks import Workers
from verifier_service.host.target_start import start_target
from verifier_service.options import VerifierOptions
from verifier_service.target.runner import start_runner
from verifier_service.target.tensor_parallel import ALONE

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
MAX_NUM_SEQS = 64
NUM_DRAFTS = 4
MEASURED = "measured: "  # prefix of the line with a child process's result
# Timeouts of one size with compilation, of a service's start in the checks, and of its end.
MEASURE_TIMEOUT_S = 240.0
START_TIMEOUT_S = 200.0
END_TIMEOUT_S = 40.0


@click.command()
@click.option("--target", type=click.Path(path_type=Path), default=SHAPE, show_default=True)
@click.option("--device", default="cuda:0", show_default=True, help="First GPU.")
@click.option("--sizes", default="1,2", show_default=True, help="Numbers of GPUs.")
@click.option("--batches", default=BATCHES, show_default=True)
@click.option("--context", default=512, show_default=True, help="Rows per sequence before the step.")
@click.option("--checks/--no-checks", default=True, show_default=True, help="Compare the output first.")
@click.option("--steps/--no-steps", default=True, show_default=True, help="Time the steps.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the result.")
@click.option("--measure", type=int, hidden=True, help="Only this size, in this process.")
def main(
    target: Path,
    device: str,
    sizes: str,
    batches: str,
    context: int,
    checks: bool,
    steps: bool,
    json_path: Path | None,
    measure: int | None,
) -> None:
    """Check, measure and print."""
    if measure is not None:
        print(MEASURED + json.dumps(_measure(target, device, measure, batches, context)), flush=True)
        os._exit(0)  # see `Workers.close`
    console = Console(width=120)
    result: dict[str, Any] = {**describe(), "target": target.name, "context": context, "sizes": {}}
    failures: list[str] = []

    def keep() -> None:
        if json_path is not None:
            json_path.write_text(json.dumps(result, indent=1) + "\n")

    if checks:
        result["checks"] = _check(device, failures)
        console.print_json(data=result["checks"])
        keep()
    for size in [int(size) for size in sizes.split(",")] if steps else []:
        try:
            result["sizes"][size] = _measure_apart(target, device, size, batches, context)
        except (subprocess.SubprocessError, click.ClickException) as error:
            failures.append(f"{size} GPUs: {error}")
        keep()
    if result["sizes"]:
        _print(result["sizes"], console)
    if failures:
        raise click.ClickException("\n".join(failures))


def _measure_apart(target: Path, device: str, size: int, batches: str, context: int) -> dict[str, Any]:
    """Run `_measure` in a new process, so that the GPUs' memory is free."""
    command = [sys.executable, "-m", "draftwire_bench.tensor_parallel", "--measure", str(size), "--target", str(target)]
    command += ["--device", device, "--batches", batches, "--context", str(context)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=MEASURE_TIMEOUT_S)
    lines = [line for line in child.stdout.splitlines() if line.startswith(MEASURED)]
    if not lines:
        raise click.ClickException(f"the measurement ended with status {child.returncode} and without a result")
    measured: dict[str, Any] = json.loads(lines[-1].removeprefix(MEASURED))
    return measured


def _measure(target: Path, device_name: str, size: int, batches: str, context: int) -> dict[str, Any]:
    rows = NUM_DRAFTS + 1
    options = VerifierOptions(
        target=str(target),
        device=device_name,
        load_format="dummy",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=blocks_for(context + rows) * BLOCK_SIZE,
        kv_cache_tokens=MAX_NUM_SEQS * blocks_for(context + rows) * BLOCK_SIZE,
        speculative_config=json.dumps({"num_speculative_tokens": NUM_DRAFTS}),
        tensor_parallel_size=size,
    )
    config = parse_speculative_config(options.speculative_config)
    device = choose_device(device_name)
    began = time.monotonic()
    with Workers(options, device) if size > 1 else nullcontext() as workers:
        started, num_blocks = start_target(options, config, device, ALONE if workers is None else workers.rank)
        runner = start_runner(started, num_blocks, MAX_NUM_SEQS, NUM_DRAFTS, options.max_prefill_rows)
        run = runner.run if workers is None else workers.lead(runner.run)
        start_s = time.monotonic() - began

        def wait() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        timed = {}
        for count, own_rows in parse_batches(batches):
            step = decode_step(count, own_rows, context)
            many_ms = _time(lambda step=step: run(step), wait, repeats=20, rounds=7)  # type: ignore[misc]
            alone_ms = _time(lambda step=step: run(step), wait, repeats=1, rounds=30)  # type: ignore[misc]
            timed[f"{count}x{own_rows}"] = {"step_ms": many_ms, "alone_ms": alone_ms}
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {"start_s": start_s, "peak_gib_of_rank_0": memory, "batches": timed}


def _time(run: Callable[[], object], wait: Callable[[], None], repeats: int, rounds: int) -> float:
    """Return the milliseconds of a run, of `repeats` back to back; the median of `rounds`."""
    times = []
    for _ in range(rounds + 3):
        wait()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        times.append((time.perf_counter() - began) * 1e3 / repeats)
    return statistics.median(times[3:])


def _check(device: str, failures: list[str]) -> dict[str, Any]:
    """Check the services on 1 GPU and on 2; append failed checks to `failures`."""
    checks: dict[str, Any] = {"prompts": len(PROMPTS)}
    outputs: dict[int, list[tuple[int, ...]]] = {}
    with _drafter(device) as drafter:
        for size in (1, 2):
            try:
                with _verifier(device, size, drafter.address) as verifier:
                    outputs[size], checks[f"accepted_drafts_on_{size}"] = _complete(verifier)
                    began = time.monotonic()
                    checks[f"exit_status_of_{size}"] = verifier.stop(END_TIMEOUT_S)
                    checks[f"end_of_{size}_s"] = time.monotonic() - began
                if checks[f"exit_status_of_{size}"] != 0:
                    failures.append(f"a verifier on {size} GPUs did not exit with status 0 on SIGTERM")
            except DraftwireError as error:
                failures.append(f"the services on {size} GPUs: {error}")
        try:
            checks["end_after_a_lost_rank_s"] = _lose_rank(device, drafter.address)
        except (DraftwireError, subprocess.TimeoutExpired) as error:
            failures.append(f"a verifier on 2 GPUs that lost a rank: {error}")
    if len(outputs) == 2:
        checks["identical_outputs"] = sum(one == other for one, other in zip(outputs[1], outputs[2], strict=True))
        if checks["identical_outputs"] < len(PROMPTS):
            failures.append("greedy output on 2 GPUs differs from that on 1")
    return checks


def _drafter(device: str) -> ServiceProcess:
    options = ("--device", device, "--dtype", "float32", "--kv-cache-tokens", "16384", "--max-num-seqs", "8")
    return start_drafter(DEMO / "eagle3", DEMO / "target", *options, timeout_s=START_TIMEOUT_S)


def _verifier(device: str, size: int, drafter: str) -> ServiceProcess:
    options = ["--device", device, "--dtype", "float32", "--kv-cache-tokens", "16384", "--max-num-seqs", "8"]
    options += ["--tensor-parallel-size", str(size), "--no-adaptive-k", *NO_DEADLINE]
    return start_verifier(DEMO / "target", [drafter], *options, timeout_s=START_TIMEOUT_S)


def _complete(verifier: ServiceProcess) -> tuple[list[tuple[int, ...]], int]:
    """Complete all prompts concurrently; return their tokens and the number of accepted drafts."""
    with Client(verifier.address) as client, ThreadPoolExecutor() as pool:
        wait_for_drafters(client)
        asked = [pool.submit(client.complete, prompt, temperature=0.0, max_tokens=96) for prompt in PROMPTS]
        completions = [one.result(END_TIMEOUT_S) for one in asked]
    return [one.token_ids for one in completions], sum(sum(one.statistics.accepted) for one in completions)


def _lose_rank(device: str, drafter: str) -> float:
    """Kill the second rank of a busy verifier; return the seconds until the verifier ends."""
    with _verifier(device, 2, drafter) as verifier, Client(verifier.address) as client:
        rank = _second_rank(verifier.pid)
        output = client.generate(PROMPTS[0], temperature=0.0, max_tokens=1000, ignore_eos=True)
        next(output)
        began = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        verifier.wait(END_TIMEOUT_S)
        return time.monotonic() - began


def _second_rank(verifier: int) -> int:
    """Return the second rank's process id: the last spawned descendant of the verifier's process."""
    spawned: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if b"spawn_main" in (path / "cmdline").read_bytes():
                spawned[int((path / "stat").read_text().rpartition(")")[2].split()[1])] = int(path.name)
    last = verifier
    while last in spawned:
        last = spawned[last]
    if last == verifier:
        raise click.ClickException("the verifier has no second rank")
    return last


def _print(sizes: dict[int, dict[str, Any]], console: Console) -> None:
    table = Table(title="milliseconds per step, back to back (single)")
    table.add_column("sequences x rows", justify="right")
    for size in sizes:
        table.add_column(f"{size} GPU" + "s" * (size > 1), justify="right")
    for batch in next(iter(sizes.values()))["batches"]:
        timed = [measured["batches"][batch] for measured in sizes.values()]
        table.add_row(batch, *(f"{one['step_ms']:.2f} ({one['alone_ms']:.2f})" for one in timed))
    console.print(table)
    for size, measured in sizes.items():
        console.print(f"start with {size}: {measured['start_s']:.1f} s")


if __name__ == "__main__":
    main()
