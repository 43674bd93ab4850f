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
    help="Name of the target in metrics and responses. Default: the name of --target.",
)
@click.option("--drafters", default="", metavar="HOST:PORT,...", help="Drafters to use; none serves without drafts.")
@click.option("--listen", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="Port 0: any port.")
@click.option(
    "--speculative-config",
    default="{}",
    show_default=True,
    metavar="JSON|FILE",
    help="Speculation settings, with vLLM's main keys; see the README.",
)
@click.option("--max-num-seqs", default=64, show_default=True, type=click.IntRange(1, 4096), help="Requests at once.")
@click.option(
    "--max-queue",
    default=1024,
    show_default=True,
    type=click.IntRange(0),
    help="Maximum number of waiting requests.",
)
@click.option(
    "--scheduling-policy",
    default="fcfs",
    show_default=True,
    type=click.Choice(["fcfs", "priority"]),
    help="Order of admission: by arrival, or by the requests' priorities and then by arrival.",
)
@click.option("--max-model-len", type=click.IntRange(2), help="Positions of a request. Default: the target's limit.")
@click.option("--max-prefill-rows", default=512, show_default=True, type=click.IntRange(1), help="Prompt rows a step.")
@click.option(
    "--kv-cache-tokens",
    type=click.IntRange(1),
    help="Cache positions of all requests. Default: as many as the GPU's memory allows; on a CPU 1 GiB with features, "
    "but at least one request.",
)
@click.option(
    "--gpu-memory-utilization",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the GPU's memory for this process: weights, activations, graphs, features and cache.",
)
@click.option(
    "--tensor-parallel-size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="GPUs of this host that the target is split over, from --device on, with one process each.",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=True,
    show_default=True,
    help="Compute common prefixes of prompts once. Response times then reveal the prefixes of other requests.",
)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Launch a step before the host knows the previous step's tokens. "
    "Default: on with a GPU, unless the target is split.",
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
    help="Maximum time that a step waits for drafts; off waits until the drafter answers or is lost.",
)
@click.option(
    "--adaptive-k/--no-adaptive-k",
    default=None,
    help="Request and verify fewer drafts, down to none, where that is faster; else always num_speculative_tokens. "
    "Default: adaptive, except with --draft-deadline-ms off and with synthetic acceptance.",
)
@click.option(
    "--fuse-features/--no-fuse-features",
    default=True,
    show_default=True,
    help="Fuse features before they are sent: a third of the bytes for EAGLE-3.",
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
    help="Let clients follow the contents of the prefix cache, tokens included: for gateways that route by prefixes.",
)
@click.option("--vllm-metrics", is_flag=True, help="Also serve the metrics that vLLM has under vLLM's names.")
@click.option("--token-file", type=FILE, help="File of accepted bearer tokens, one per line.")
@click.option("--drafter-tls-ca", type=FILE, help="Trusted authorities of drafters, PEM; turns TLS to drafters on.")
@click.option("--drafter-tls-cert", type=FILE, help="Client certificate towards drafters, PEM.")
@click.option("--drafter-tls-key", type=FILE, help="Private key of that certificate, PEM.")
@click.option(
    "--compile-cache",
    envvar="TORCHINDUCTOR_CACHE_DIR",
    metavar="DIR",
    help="Directory of compiled code. Default: $TORCHINDUCTOR_CACHE_DIR, else ~/.cache/draftwire/compile.",
)
@service_options
@server_security_options
def verifier(**given: Any) -> None:
    """Serve generation from a target model with exact speculative decoding."""
    if is_first_process():
        end_at_signals()  # during the start
    options = VerifierOptions(**given)
    start_logging(options.log_level, options.log_format)
    check_ports(listen=options.listen, metrics_listen=options.metrics_listen, health_listen=options.health_listen)
    with starting_engine(options) as engine_process:
        # Loading torch takes seconds; neither --help nor the engine's process waits for it.
        with importing():
            from verifier_service.main import run

            if engine_process is None:
                import verifier_service.host.start  # noqa: F401  # `run` imports it

        with exporting_traces("draftwire-verifier", options.otlp_endpoint, insecure=options.insecure):
            run(options, engine_process)
