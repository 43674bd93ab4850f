"""The command `draftwire`."""

from __future__ import annotations

import click

from draftwire.contract.version import VERSION
from draftwire.server.lazy_commands import LazyGroup, Source

COMMANDS = {
    "generate": Source("draftwire_cli.generate", "generate", "Generate text from a prompt."),
    "demo": Source("draftwire_cli.demo", "demo", "Run the demo pair with drafting on and off."),
    "demo-gateway": Source("draftwire_cli.demo_gateway", "demo_gateway", "Run the demo pair behind an OpenAI gateway."),
    "status": Source("draftwire_cli.status", "status", "Show a verifier and its drafters."),
    "health": Source("draftwire_cli.health", "health", "Check whether a server serves."),
    "drafter": Source("drafter_service.cli", "drafter", "Serve drafts from an EAGLE head."),
    "verifier": Source("verifier_service.cli", "verifier", "Serve generation from a target model."),
    "bench": Source("draftwire_cli.bench", "bench", "Measure speed and acceptance."),
}


@click.group(cls=LazyGroup, sources=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="draftwire")
def main() -> None:
    """Speculative decoding served by two gRPC services."""
