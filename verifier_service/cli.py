"""The command `draftwire verifier`."""

from __future__ import annotations

from typing import Any

import click

from draftwire.server.cli_options import FILE, server_security_options, service_options
from draftwire.server.lazy_commands import importing
from draftwire.server.logs import start_logging
from draftwire.server.ports import check_ports
from draftwire.server.stop_signals import end_at_signals, is_first_process
from draftwire.server.tracing import exporting_traces
from verifier_service.host.process import starting_engine
from verifier_service.options import VerifierOptions


@click.command()
@click.option("--target", required=True, metavar="DIR|ID", help="Target: a directory, or a hub id organisation/model.")
@click.option(
    "--served-model-name",
    metavar="NAME",
    help="Name of the target in metrics and responses. Default: that of --target.",
)
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
@click.option(
    "--max-queue",
    default=1024,
    show_default=True,
    type=click.IntRange(0),
    help="Most requests that wait beyond those that run.",
)
@click.option(
    "--scheduling-policy",
    default="fcfs",
    show_default=True,
    type=click.Choice(["fcfs", "priority"]),
    help="Order of admission: by arrival, or by the requests' priorities and then by arrival.",
)
@click.option("--max-model-len", type=click.IntRange(2), help="Positions of a request. Default: what the target has.")
@click.option("--max-prefill-rows", default=512, show_default=True, type=click.IntRange(1), help="Prompt rows a step.")
@click.option(
    "--kv-cache-tokens",
    type=click.IntRange(1),
    help="Positions of all requests. Default: what the GPU's memory allows; on a CPU what fits into 1 GiB, features "
    "included, but one request at least.",
)
@click.option(
    "--gpu-memory-utilization",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of a GPU's memory for its process: weights, activations, graphs, features and cache.",
)
@click.option(
    "--tensor-parallel-size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="GPUs of this host that share the target, from --device on, one process each.",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=True,
    show_default=True,
    help="Compute equal beginnings of prompts once. Response times then reveal equal beginnings of other requests.",
)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Launch a step before the tokens of the one before it are known on the host. "
    "Default: on a GPU, where the target is not split.",
)
@click.option(
    "--engine-process/--no-engine-process",
    default=None,
    help="Run the target in a separate process. Default: on with a GPU.",
)
@click.option(
    "--draft-deadline-ms",
    default="500",
    show_default=True,
    metavar="MS|off",
    help="How long a step waits for drafts; off: until the drafter answers or is lost.",
)
@click.option(
    "--adaptive-k/--no-adaptive-k",
    default=None,
    help="Ask for fewer drafts, down to none, and verify fewer of those that come, where that is faster; "
    "else always num_speculative_tokens. "
    "Default: adaptive, but not with --draft-deadline-ms off or synthetic acceptance.",
)
@click.option(
    "--fuse-features/--no-fuse-features",
    default=True,
    show_default=True,
    help="Apply a head's fusion before features are sent: a third of the bytes for EAGLE-3.",
)
@click.option(
    "--drain-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that running requests have when this verifier is stopped.",
)
@click.option(
    "--generation-config",
    default="auto",
    show_default=True,
    metavar="auto|none|DIR",
    help="Defaults of sampling parameters: generation_config.json of the target, none, or the file in DIR.",
)
@click.option(
    "--kv-events",
    is_flag=True,
    help="Let clients follow what the prefix cache holds, tokens included: for gateways that route by prefixes.",
)
@click.option("--vllm-metrics", is_flag=True, help="Serve metrics that vLLM has under vLLM's names too.")
@click.option("--token-file", type=FILE, help="File of accepted bearer tokens, one a line.")
@click.option("--drafter-tls-ca", type=FILE, help="Authorities trusted for drafters, PEM; connects to them with TLS.")
@click.option("--drafter-tls-cert", type=FILE, help="Certificate shown to drafters, PEM.")
@click.option("--drafter-tls-key", type=FILE, help="Its private key, PEM.")
@click.option(
    "--compile-cache",
    envvar="TORCHINDUCTOR_CACHE_DIR",
    metavar="DIR",
    help="Where compiled code is kept. Default: $TORCHINDUCTOR_CACHE_DIR, else ~/.cache/draftwire/compile.",
)
@service_options
@server_security_options
def verifier(**given: Any) -> None:
    """Serve generation from a target model, with drafts verified exactly."""
    if is_first_process():
        end_at_signals()  # while it starts
    options = VerifierOptions(**given)
    start_logging(options.log_level, options.log_format)
    check_ports(listen=options.listen, metrics_listen=options.metrics_listen, health_listen=options.health_listen)
    with starting_engine(options) as engine_process:
        # Loading torch takes seconds; --help does not wait for it, nor does the engine's process.
        with importing():
            from verifier_service.main import run

            if engine_process is None:
                import verifier_service.host.start  # noqa: F401  # what `run` imports then

        with exporting_traces("draftwire-verifier", options.otlp_endpoint, insecure=options.insecure):
            run(options, engine_process)
