"""The command `draftwire bench` and its parts."""

from __future__ import annotations

import click

from draftwire.cli.lazy import LazyGroup, Source

BENCHMARKS = {
    "serve": Source("draftwire.cli.bench_serve", "serve", "Throughput and latency, with drafting off and on."),
    "acceptance": Source(
        "draftwire.cli.bench_acceptance", "acceptance", "Acceptance with every method, beside its closed forms."
    ),
    "transport": Source(
        "draftwire.cli.bench_transport", "transport", "Every carrier of tensors between two processes of this host."
    ),
    "kernels": Source("draftwire.cli.bench_kernels", "kernels", "The sampling kernels, beside what their bytes need."),
}


@click.group(cls=LazyGroup, sources=BENCHMARKS)
def bench() -> None:
    """Measure speed, acceptance, carriers and kernels."""
