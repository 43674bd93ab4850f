"""Bytes between verifier and drafter per accepted draft, by carrier and method.

    python -m draftwire_bench.wire_bytes --json benchmarks/results/wire-bytes.json

By default the demo pair runs on the CPU. On two GPUs, with the shapes of a large model, whose random weights need
synthetic acceptance:

    python -m draftwire_bench.wire_bytes --target benchmarks/shapes/llama-3.1-8b \\
        --head benchmarks/shapes/llama-3.1-8b-eagle3 --verifier-device cuda:0 --drafter-device cuda:1 \\
        --dtype bfloat16 --load-format dummy --synthetic-acceptance-length 3.0 --carriers cuda_ipc,shm,bytes

Both services are started for each row. Bytes are those of the verifier's `draftwire_wire_bytes_total` in both
directions, including tensors in shared memory, without HTTP/2 framing. Features of prompts are counted separately,
because their share per accepted draft depends on the outputs' lengths.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from draftwire.client.request import Prompt
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.demo_prompts import PROMPTS
from draftwire_bench.environment import describe
from draftwire_bench.serve.serve import ServeOptions, measure
from draftwire_bench.serve.workload import Level, Shape, endless, random_prompts
from draftwire_bench.services import PairOptions, running_pair

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
CARRIERS = ("cuda_ipc", "shm", "bytes")
GUMBEL = {"draft_sample_method": "gumbel"}
# Draft sampling, draft logits and verification methods by name.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "gumbel": GUMBEL,
    "gumbel, top 64": GUMBEL | {"draft_logits": {"top_n": 64}},
    "gumbel, all logits": GUMBEL | {"draft_logits": "dense"},
    "block": GUMBEL | {"rejection_sample_method": "block"},
    "block, top 64": GUMBEL | {"draft_logits": {"top_n": 64}, "rejection_sample_method": "block"},
    "block, all logits": GUMBEL | {"draft_logits": "dense", "rejection_sample_method": "block"},
    "coupled": GUMBEL | {"rejection_sample_method": "coupled"},
}
# Length of random prompts for a target without a tokenizer.
PROMPT_TOKENS = 64


@click.command()
@click.option("--target", default=str(DEMO / "target"), help="By default the demo pair's.")
@click.option("--head", default=str(DEMO / "eagle3"), help="By default the demo pair's.")
@click.option("--verifier-device", default="cpu", show_default=True)
@click.option("--drafter-device", default="cpu", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--load-format", default="auto", show_default=True)
@click.option("--synthetic-acceptance-length", type=float, help="Accept this many drafts on average.")
@click.option("--carriers", default="shm,bytes", show_default=True)
@click.option("--concurrency", default=8, show_default=True)
@click.option("--num-requests", default=32, show_default=True)
@click.option("--output-tokens", default=100, show_default=True)
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
def main(json_path: Path | None, **given: Any) -> None:
    """Measure and print."""
    carriers = given["carriers"].split(",")
    if unknown := set(carriers).difference(CARRIERS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: allowed: {', '.join(CARRIERS)}", param_hint="carriers")
    console = Console()
    rows = []
    for carrier, (name, config), is_fused in product(carriers, _configs(given), (True, False)):
        if is_fused or name == "greedy":  # features do not depend on the method
            row = {"method": name, "features": "fused" if is_fused else "raw", "carrier": carrier}
            rows.append(row | _measured(config, carrier, given, is_fused=is_fused))
            console.print(json.dumps(rows[-1]), highlight=False, soft_wrap=True)
    _print(rows, console)
    if json_path is not None:
        models = {name: given[name].removeprefix(f"{ROOT}/") for name in ("target", "head")}
        document = describe() | {"options": given | models, "rows": rows}
        json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _configs(given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    length = given["synthetic_acceptance_length"]
    if length is None:
        return [(name, dict(config)) for name, config in METHODS.items()]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    return [
        (name, dict(config) | synthetic) for name, config in METHODS.items() if "rejection_sample_method" not in config
    ]


def _measured(config: dict[str, Any], carrier: str, given: dict[str, Any], *, is_fused: bool) -> dict[str, Any]:
    metrics = f"127.0.0.1:{_free_port()}"
    pair = PairOptions(
        given["target"],
        given["head"],
        given["verifier_device"],
        given["drafter_device"],
        given["dtype"],
        given["load_format"],
        [
            *("--metrics-listen", metrics, "--carriers", carrier, "--no-prefix-caching", "--no-adaptive-k"),
            "--fuse-features" if is_fused else "--no-fuse-features",
        ],
    ).with_room_for(given["concurrency"])
    options = ServeOptions(
        levels=[Level(concurrency=given["concurrency"])],
        shape=Shape(given["output_tokens"], given["temperature"], seed=0),
        drafting=(True,),
        num_requests=given["num_requests"],
        warmup_tokens=0,
    )
    with running_pair(pair, json.dumps(config)) as address:
        info, (result,) = measure(address, options, _prompts)
        sent = _wire_bytes(metrics)
    carriers = {one for (one, content), value in sent.items() if content == "features" and value > 0}
    expected = {"grpc"} if carrier == "bytes" else {carrier}
    if carriers != expected:
        raise click.ClickException(f"features were sent by {', '.join(sorted(carriers))}, not by {carrier}")
    accepted, row_bytes = sum(result.acceptance.accepted), info.drafters[0].feature_row_bytes
    by_content = {name: _sum(sent, name) for name in ("features", "logits", "message")}
    prompts = result.counters.prompt_rows * row_bytes
    return {
        "row_bytes": row_bytes,
        "acceptance_length": result.acceptance.length,
        "accepted": accepted,
        "bytes": by_content | {"features of prompts": prompts, "fusion": _sum(sent, "fusion")},
        "per_accepted": {
            "features": (by_content["features"] - prompts) / accepted,
            "features of prompts": prompts / accepted,
            "logits": by_content["logits"] / accepted,
            "rest of messages": by_content["message"] / accepted,
        },
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _prompts(info: pb.GetVerifierInfoResponse) -> Iterator[Prompt]:
    return endless(PROMPTS) if info.has_tokenizer else random_prompts(PROMPT_TOKENS, info.vocab_size, seed=0)


def _wire_bytes(metrics: str) -> dict[tuple[str, str], float]:
    """Return the bytes in both directions by (carrier, content)."""
    with urlopen(f"http://{metrics}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            if sample.name == "draftwire_wire_bytes_total":
                found[sample.labels["carrier"], sample.labels["content"]] += sample.value
    return found


def _sum(sent: Mapping[tuple[str, str], float], content: str) -> float:
    return sum(value for (_, name), value in sent.items() if name == content)


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("method", "carrier", "length", "features", "prompts'", "logits", "rest")
    table.title = "Bytes per accepted draft"
    for row in rows:
        sent = row["per_accepted"]
        table.add_row(
            row["method"] if row["features"] == "fused" else f"{row['method']}, raw features",
            row["carrier"],
            f"{row['acceptance_length']:.2f}",
            *(f"{sent[part]:.0f}" for part in ("features", "features of prompts", "logits", "rest of messages")),
        )
    console.print(table)


if __name__ == "__main__":
    main()
