"""A remote drafter: throughput with drafts on links of several delays and rates, compared to throughput without drafts.

    python -m draftwire_bench.far_drafter --json benchmarks/results/far-drafter.json

The drafter runs in a network namespace behind a shaped link (link.py: Linux, root, iproute2), the verifier outside the
namespace; the number of drafts adapts. The throughput of a TCP connection over each link is measured first, because it
may be below the link's rate: the host's cores may be slower, or TCP's buffers smaller than the bandwidth-delay product.
For each link, rounds without and with drafts alternate, after a warm-up round in which the verifier measures the link.
The ratio is that of the medians; the exit code is 1 if a ratio is below 0.97. The verifier's last expected gain is
printed next to the ratio.

By default the demo pair runs on the CPU. On two GPUs, with the shapes of a large model:

    python -m draftwire_bench.far_drafter --target benchmarks/shapes/llama-3.1-8b \\
        --head benchmarks/shapes/llama-3.1-8b-eagle3 --device cuda:0 --drafter-device cuda:1 \\
        --dtype bfloat16 --load-format dummy --concurrency 1,32 --rounds 2 --turns 4 --output-tokens 100 \\
        --speculative-config '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}'
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from draftwire.client import Client
from draftwire.client.request import Prompt
from draftwire.contract.client_security import ClientSecurity
from draftwire_bench.commands.options import Numbers
from draftwire_bench.demo_prompts import PROMPTS
from draftwire_bench.environment import DEMO, ROOT, describe
from draftwire_bench.link import Link, LinkQuality
from draftwire_bench.output import json_option, make_table, report_console, write_json
from draftwire_bench.processes import start_drafter, start_verifier
from draftwire_bench.serve.serve import LevelResult, ServeOptions, measure
from draftwire_bench.serve.workload import Level, Shape, random_prompts
from draftwire_bench.services import START_TIMEOUT_S

# Least throughput with drafts, relative to throughput without drafts.
LEAST_RATIO = 0.97
# Length of random prompts for a target without a tokenizer.
PROMPT_TOKENS = 64
# Jumbo frames, which are usual on links of 10 Gbit/s and more.
MTU = 9000


@click.command()
@click.option("--target", default=str(DEMO / "target"), help="By default the demo pair's.")
@click.option("--head", default=str(DEMO / "eagle3"), help="By default the demo pair's.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--drafter-device", help="By default --device.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--load-format", default="auto", show_default=True)
@click.option("--speculative-config", default="{}", show_default=True)
@click.option("--delay-ms", type=Numbers(float), default="0.2,1,5", show_default=True, help="One way.")
@click.option("--gbit-per-s", type=Numbers(float), default="1,10,25", show_default=True)
@click.option("--concurrency", type=Numbers(int), default="1,8", show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--output-tokens", default=400, show_default=True)
@click.option("--turns", default=1, show_default=True, help="Consecutive requests of each client.")
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(json_path: Path | None, **given: Any) -> None:
    """Measure and print."""
    console = report_console()
    shared = ["--dtype", given["dtype"], "--load-format", given["load_format"]]
    shared += ["--max-num-seqs", str(max(given["concurrency"])), "--log-level", "warning"]
    drafter_device = given["drafter_device"] or given["device"]
    rows: list[dict[str, Any]] = []
    models = {name: given[name].removeprefix(f"{ROOT}/") for name in ("target", "head")}
    document = describe() | {"options": given | models, "rows": rows}
    with (
        Link(MTU) as link,
        start_drafter(
            given["head"], given["target"], "--device", drafter_device, *shared,
            "--listen", f"{link.address}:50052", "--insecure",
            security=ClientSecurity(insecure=True), program=link.program, timeout_s=START_TIMEOUT_S,
        ) as drafter,
        start_verifier(
            given["target"], [drafter.address], "--device", given["device"], *shared, "--insecure", "--adaptive-k",
            "--speculative-config", given["speculative_config"], timeout_s=START_TIMEOUT_S,
        ) as verifier,
    ):  # fmt: skip
        for delay_ms, gbit_per_s in product(given["delay_ms"], given["gbit_per_s"]):
            link.set(LinkQuality(delay_s=delay_ms / 1e3, bytes_per_s=gbit_per_s * 1e9 / 8))
            reached = link.measure()
            for concurrency in given["concurrency"]:
                place = {"delay_ms": delay_ms, "gbit_per_s": gbit_per_s, "concurrency": concurrency}
                place |= {
                    "round_trip_ms": reached.round_trip_s * 1e3,
                    "reached_gbit_per_s": reached.bytes_per_s * 8 / 1e9,
                }
                rows.append(place | _measured(verifier.address, concurrency, given))
                console.print(json.dumps(rows[-1]), highlight=False, soft_wrap=True)
                write_json(json_path, document)  # after each row, because a long run may be interrupted
    _print(rows, console)
    sys.exit(min(row["ratio"] for row in rows) < LEAST_RATIO)


def _measured(address: str, concurrency: int, given: dict[str, Any]) -> dict[str, Any]:
    options = ServeOptions(
        levels=[Level(concurrency=concurrency)],
        shape=Shape(given["output_tokens"], given["temperature"], seed=0),
        num_requests=concurrency * given["turns"],
        allows_skipped=True,
    )
    results: list[LevelResult] = []
    for number in range(given["rounds"] + 1):
        _, both = measure(address, options, lambda info: _prompts(info.has_tokenizer, info.vocab_size))
        results += both if number else []
    without = [one.throughput.whole_run for one in results if not one.drafting]
    drafted = [one for one in results if one.drafting]
    tokens = [one.throughput.whole_run for one in drafted]
    steps = sum(one.acceptance.verify_steps for one in drafted)
    return {
        "without_tokens_per_s": statistics.median(without),
        "with_tokens_per_s": statistics.median(tokens),
        "ratio": statistics.median(tokens) / statistics.median(without),
        "rounds": [with_ / without_ for with_, without_ in zip(tokens, without, strict=True)],
        "drafts_per_step": sum(sum(one.acceptance.drafted) for one in drafted) / steps,
        "accepted_per_step": sum(sum(one.acceptance.accepted) for one in drafted) / steps,
        "plan": _plan(address),
    }


def _plan(address: str) -> dict[str, Any]:
    """Return the verifier's last `DraftPlan`: expected throughput with drafts, and its inputs."""
    with Client(address, ClientSecurity(insecure=True)) as client:
        (drafter,) = client.info().drafters
    return MessageToDict(drafter.plan, preserving_proto_field_name=True)


@cache
def _prompts(has_tokenizer: bool, vocab_size: int) -> Iterator[Prompt]:
    """Return one source for all rounds, so that no random prompt is repeated."""
    return cycle(PROMPTS) if has_tokenizer else random_prompts(PROMPT_TOKENS, vocab_size, seed=0)


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("delay, ms", "Gbit/s", "reached", "requests", "without", "with, tokens/s", "ratio", "drafts/step")
    table = make_table("with drafts and without", (*columns, "accepted", "expected"))
    for row in rows:
        table.add_row(
            f"{row['delay_ms']:g}",
            f"{row['gbit_per_s']:g}",
            f"{row['reached_gbit_per_s']:.1f}",
            str(row["concurrency"]),
            f"{row['without_tokens_per_s']:.0f}",
            f"{row['with_tokens_per_s']:.0f}",
            f"{row['ratio']:.3f}",
            f"{row['drafts_per_step']:.2f}",
            f"{row['accepted_per_step']:.2f}",
            f"{row['plan'].get('expected_gain', math.nan):.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
