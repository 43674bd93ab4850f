"""The command `draftwire`."""

from __future__ import annotations

import click

from draftwire.cli.lazy import LazyGroup, Source
from draftwire.version import VERSION

COMMANDS = {
    "generate": Source("draftwire.cli.generate", "generate", "Generate text from a prompt."),
    "demo": Source("draftwire.cli.demo", "demo", "Run the demo pair with drafting on and off."),
    "status": Source("draftwire.cli.status", "status", "Show a verifier and its drafters."),
    "health": Source("draftwire.cli.health", "health", "Ask whether a server serves."),
    "drafter": Source("drafter_service.cli", "drafter", "Serve drafts from an EAGLE head."),
    "verifier": Source("verifier_service.cli", "verifier", "Serve generation from a target model."),
    "bench": Source("draftwire.cli.bench", "bench", "Measure speed and acceptance."),
}


@click.group(cls=LazyGroup, sources=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="draftwire")
def main() -> None:
    """Speculative decoding served by two gRPC services."""
