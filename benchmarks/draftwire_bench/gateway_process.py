"""The gateway smg as a child process in front of verifiers, for demo, tests and benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack

from draftwire.contract.errors import ServerError
from draftwire_bench.processes import START_TIMEOUT_S, ChildProcess

STOP_TIMEOUT_S = 20.0
POLL_S = 0.25
HTTP_TIMEOUT_S = 10.0
# Routes by the verifiers' cache events, and detects a failed verifier within seconds.
ARGUMENTS = ("--policy", "cache_aware", "--health-check-interval-secs", "1", "--load-monitor-interval", "1")


class GatewayProcess(ChildProcess):
    """A running gateway.

    Attributes:
        url: URL of the HTTP service, such as `http://127.0.0.1:30000`.
        metrics_url: URL of the Prometheus metrics.
    """

    def __init__(self, verifiers: Sequence[str], *extra: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start smg in front of verifiers and wait until it may route to all of them.

        Args:
            verifiers: HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT of each.
            extra: Further arguments of smg, which override the others.
            timeout_s: Seconds until smg must be ready.

        Raises:
            ServerError: If smg is not installed, exits, or is not ready in time.
        """
        if importlib.util.find_spec("smg") is None:
            raise ServerError("the gateway smg is not installed; pip install 'draftwire[gateway]'")
        port, metrics_port = _free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        urls = [address if "://" in address else f"grpc://{address}" for address in verifiers]
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        arguments = ["--worker-urls", *urls, *listen, *metrics, *ARGUMENTS, *extra]
        super().__init__(
            "gateway",
            [sys.executable, "-m", "smg", "launch", *arguments],
            env={**os.environ, "NO_COLOR": "1"},
            cwd=tempfile.gettempdir(),  # where smg finds no directory with the model's name
        )
        self._num_verifiers = len(verifiers)
        with self.starting():
            self.wait_until(self._is_ready, time.monotonic() + timeout_s, POLL_S)

    @property
    def api_url(self) -> str:
        """Return the base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def model(self) -> str:
        """Return the served name of the verifiers' target."""
        return str(json.loads(_get(f"{self.api_url}/models"))["data"][0]["id"])

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return _get(self.metrics_url)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Terminate smg, kill it after `timeout_s` seconds, and return the exit status."""
        return super().stop(timeout_s)

    def _is_ready(self) -> bool:
        """Return whether smg counts all verifiers as healthy. smg answers 503 until it has the tokenizer."""
        try:
            return bool(json.loads(_get(f"{self.url}/readiness"))["healthy_workers"] == self._num_verifiers)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def _free_ports(count: int) -> list[int]:
    """Return free ports of this host."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
