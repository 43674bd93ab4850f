"""The command `draftwire verifier`."""

from __future__ import annotations

from typing import Any

import click

from draftwire.cli.options import service_options, start_logging
from verifier_service.options import VerifierOptions


@click.command()
@click.option("--target", required=True, metavar="DIR|ID", help="Target: a directory, or a hub id organisation/model.")
@click.option("--drafters", default="", metavar="HOST:PORT,...", help="Drafters to use; none serves without drafts.")
@click.option("--listen", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="Port 0: a free one.")
@click.option(
    "--speculative-config",
    default="{}",
    show_default=True,
    metavar="JSON|FILE",
    help="vLLM's main keys and ours; see the README.",
)
@click.option("--max-num-seqs", default=64, show_default=True, type=click.IntRange(1, 4096), help="Requests at once.")
@click.option("--max-queue", default=1024, show_default=True, type=click.IntRange(0), help="Requests that may wait.")
@click.option("--max-model-len", type=click.IntRange(2), help="Positions of a request. Default: what the target has.")
@click.option("--max-prefill-rows", default=512, show_default=True, type=click.IntRange(1), help="Prompt rows a step.")
@click.option(
    "--kv-cache-tokens", type=click.IntRange(1), help="Positions of all requests. Default: what memory allows."
)
@click.option(
    "--draft-deadline-ms",
    default="500",
    show_default=True,
    metavar="MS|off",
    help="How long a step waits for drafts; off: until the drafter answers or is lost.",
)
@service_options
def verifier(log_level: str, **options: Any) -> None:
    """Serve generation from a target model, with drafts verified exactly."""
    start_logging(log_level)
    # Loading torch takes seconds; --help does not wait for it.
    from verifier_service.main import run

    run(VerifierOptions(**options))
