"""The command `draftwire drafter`."""

from __future__ import annotations

from typing import Any

import click

from drafter_service.options import MAX_SPECULATIVE_TOKENS, DrafterOptions
from draftwire.server.cli_options import server_security_options, service_options
from draftwire.server.lazy_commands import importing
from draftwire.server.logs import start_logging
from draftwire.server.stop_signals import end_at_signals, is_first_process
from draftwire.server.tracing import exporting_traces


@click.command()
@click.option("--head", required=True, metavar="DIR|ID", help="Head: a directory, or a hub id organisation/model.")
@click.option("--target", required=True, metavar="DIR|ID", help="Target of the head: a directory or hub id.")
@click.option("--listen", default="127.0.0.1:50052", show_default=True, metavar="HOST:PORT", help="Port 0: any port.")
@click.option("--max-num-seqs", default=256, show_default=True, help="Sequences open at once, over all verifiers.")
@click.option("--max-model-len", type=int, help="Positions of a sequence. Default: the limit of head and target.")
@click.option(
    "--kv-cache-tokens",
    type=int,
    help="Cache positions of all sequences. Default: as many as they may need and memory allows; on a CPU at most "
    "65536.",
)
@click.option(
    "--gpu-memory-utilization",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the GPU's memory for this process: weights, activations, graphs, draft logits and cache.",
)
@click.option(
    "--max-num-speculative-tokens",
    default=MAX_SPECULATIVE_TOKENS,
    show_default=True,
    help="Draft tokens of a sequence in one step.",
)
@click.option(
    "--quantization",
    type=click.Choice(["fp8"]),
    help="Compute most products of the head in 8 bits: faster drafts, the same exact output.",
)
@click.option("--max-sessions", default=64, show_default=True, help="Verifiers connected at once.")
@click.option("--max-batch-rows", default=2048, show_default=True, help="Rows of one forward pass.")
@click.option(
    "--drain-timeout",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that verifiers have to move their sequences when this drafter is stopped.",
)
@service_options
@server_security_options
def drafter(log_level: str, log_format: str, otlp_endpoint: str | None, **options: Any) -> None:
    """Serve drafts of a head to verifiers."""
    if is_first_process():
        end_at_signals()  # during the start
    start_logging(log_level, log_format)
    # Loading torch takes seconds; --help does not wait for it.
    with importing():
        from drafter_service.main import run

    with exporting_traces("draftwire-drafter", otlp_endpoint, insecure=options["insecure"]):
        run(DrafterOptions(**options))
