"""The command `draftwire bench serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from draftwire.client.request import Prompt
from draftwire.server.cli_options import client_security, client_security_options
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.commands.options import Numbers, pair_from, pair_options
from draftwire_bench.environment import describe, read_shape
from draftwire_bench.output import json_option, report_console, write_json
from draftwire_bench.serve.report import print_report, report
from draftwire_bench.serve.serve import MeasurementInterrupted, ServeOptions, measure
from draftwire_bench.serve.workload import Level, Shape, parse_sampling, random_prompts, read_prompts
from draftwire_bench.services import running_pair


@click.command()
@click.option("--server", metavar="HOST:PORT", help="Measure a running verifier.")
@client_security_options
@pair_options
@click.option(
    "--speculative-config", default="{}", show_default=True, metavar="JSON|FILE", help="Option of the started verifier."
)
@click.option(
    "--concurrency",
    type=Numbers(int),
    metavar="N,N,...",
    help="Concurrent requests of each level.  [default: 1,4,8,16,32,64]",
)
@click.option("--request-rate", type=Numbers(float), metavar="R,R,...", help="Instead, requests per second.")
@click.option(
    "--drafting", default="both", show_default=True, type=click.Choice(["both", "on", "off"]), help="In each level."
)
@click.option("--num-requests", type=click.IntRange(1), help="Per level.  [default: 2 x concurrency or 30 s]")
@click.option("--prompt-tokens", default=256, show_default=True, type=click.IntRange(1), help="Random tokens each.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Instead, JSON lines with `text` or `token_ids`.")
@click.option("--output-tokens", default=400, show_default=True, type=click.IntRange(1), help="Per request.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="Of all requests.")
@click.option(
    "--sampling-params",
    default="{}",
    show_default=True,
    metavar="JSON|FILE",
    help="""Further sampling parameters, such as '{"top_k": 50}'.""",
)
@click.option(
    "--num-speculative-tokens",
    type=Numbers(int, least=0),
    metavar="K,K,...",
    help="Drafts per step with drafting on, alternating over requests.  [default: the server's]",
)
@click.option("--seed", default=0, show_default=True, help="Seed of prompts, arrivals and requests.")
@click.option("--warmup-tokens", default=16, show_default=True, type=click.IntRange(0), help="Output before a level.")
@click.option(
    "--client-processes", type=click.IntRange(1), help="Default: one per 16 requests, at most half of the cores."
)
@click.option(
    "--fewer-drafts",
    is_flag=True,
    help="Allow fewer drafts with synthetic acceptance, such as by --adaptive-k.",
)
@json_option
def serve(json_path: Path | None, speculative_config: str, **given: Any) -> None:
    """Measure throughput and latency, with drafting off and on.

    Measures a running verifier (--server), or starts both services (--target and --head). With synthetic acceptance the
    command fails if any work was skipped, unless --fewer-drafts is set. Ctrl-C prints and writes the levels measured so
    far.
    """
    console, security = report_console(), client_security(given)
    options = _options(given)
    interrupted = None
    try:
        with _served(given, options, speculative_config, console) as (address, shapes), console.status("") as status:
            info, results = measure(address, options, _prompts(given), status.update, security)
    except MeasurementInterrupted as error:
        interrupted, info, results = error, error.info, error.results
        count = len(options.levels) * len(options.drafting)
        console.print(f"\ninterrupted: {len(results)} of {count} runs were measured")
        if not results:
            raise
    print_report(info, results, console)
    write_json(json_path, describe() | shapes | report(info, options, results))
    if interrupted is not None:
        raise interrupted


def _options(given: dict[str, Any]) -> ServeOptions:
    if given["concurrency"] and given["request_rate"]:
        raise click.UsageError("needs at most one of --concurrency and --request-rate")
    levels = [Level(request_rate=rate) for rate in given["request_rate"] or ()]
    if not levels:
        levels = [Level(concurrency=count) for count in given["concurrency"] or (1, 4, 8, 16, 32, 64)]
    sampling = parse_sampling(given["sampling_params"])
    return ServeOptions(
        levels=levels,
        drafting={"both": (False, True), "on": (True,), "off": (False,)}[given["drafting"]],
        shape=Shape(
            *(given["output_tokens"], given["temperature"], given["seed"], sampling),
            num_speculative_tokens=given["num_speculative_tokens"] or (None,),
        ),
        num_requests=given["num_requests"],
        warmup_tokens=given["warmup_tokens"],
        client_processes=given["client_processes"],
        allows_skipped=given["fewer_drafts"],
    )


def _prompts(given: dict[str, Any]) -> Callable[[pb.GetVerifierInfoResponse], Iterator[Prompt]]:
    path, length, seed = given["prompts"], given["prompt_tokens"], given["seed"]
    if path is not None:
        prompts = read_prompts(path)
        return lambda _: cycle(prompts)
    return lambda info: random_prompts(length, info.vocab_size, seed)


@contextmanager
def _served(
    given: dict[str, Any], options: ServeOptions, speculative_config: str, console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the verifier's address, and the shapes of its models if known."""
    if given["server"] is not None:
        if given["target"] or given["head"]:
            raise click.UsageError("needs either --server or --target and --head")
        yield given["server"], {}
        return
    pair = pair_from(given)
    most = max(level.concurrency or level.default_requests for level in options.levels)
    pair = pair.with_room_for(most)
    shapes = {"shapes": {"target": read_shape(pair.target), "head": read_shape(pair.head)}}
    status = console.status("starting both services")
    status.start()
    try:
        with running_pair(pair, speculative_config) as address:
            status.stop()
            yield address, shapes
    finally:
        status.stop()
