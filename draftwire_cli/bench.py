"""The command `draftwire bench` and its subcommands."""

from __future__ import annotations

import click

from draftwire.server.lazy_commands import LazyGroup, Source

BENCHMARKS = {
    "serve": Source("draftwire_bench.commands.serve", "serve", "Throughput and latency, with drafting off and on."),
    "acceptance": Source(
        "draftwire_bench.commands.acceptance", "acceptance", "Acceptance of every method, compared to closed forms."
    ),
    "transport": Source(
        "draftwire_bench.commands.transport", "transport", "All tensor carriers between two processes of a host."
    ),
    "kernels": Source(
        "draftwire_bench.commands.kernels", "kernels", "The sampling kernels, compared to the memory bandwidth."
    ),
}


@click.group(cls=LazyGroup, sources=BENCHMARKS)
def bench() -> None:
    """Measure speed, acceptance, carriers and kernels."""
