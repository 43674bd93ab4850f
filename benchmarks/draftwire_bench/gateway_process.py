"""The gateway smg as a child process in front of verifiers, for demo, tests and benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from draftwire.contract.errors import ServerError
from draftwire_bench.processes import both_ends

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.25
HTTP_TIMEOUT_S = 10.0
# Routes by the verifiers' cache events, and detects a failed verifier within seconds.
ARGUMENTS = ("--policy", "cache_aware", "--health-check-interval-secs", "1", "--load-monitor-interval", "1")


class GatewayProcess:
    """A running gateway; as a context manager, stops the gateway on exit.

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
        descriptor, name = tempfile.mkstemp(prefix="draftwire-gateway-", suffix=".log")
        self._log_path = Path(name)
        urls = [address if "://" in address else f"grpc://{address}" for address in verifiers]
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        arguments = ["--worker-urls", *urls, *listen, *metrics, *ARGUMENTS, *extra]
        with os.fdopen(descriptor, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "smg", "launch", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal sends Ctrl-C only to the parent, which stops its children
                env={**os.environ, "NO_COLOR": "1"},
                cwd=tempfile.gettempdir(),  # where smg finds no directory with the model's name
            )
        try:
            self._wait(len(verifiers), time.monotonic() + timeout_s)
        except BaseException:
            self.stop()
            raise

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

    def log_text(self) -> str:
        """Return smg's output so far."""
        return self._log_path.read_text(errors="replace")

    def stop(self) -> None:
        """Terminate smg, and kill it after STOP_TIMEOUT_S seconds."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self, num_verifiers: int, deadline: float) -> None:
        while True:
            try:
                # smg answers 503 here until it has the tokenizer too.
                if json.loads(_get(f"{self.url}/readiness"))["healthy_workers"] == num_verifiers:
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            ended = self._process.poll() is not None
            if ended or time.monotonic() >= deadline:
                what = f"ended with status {self._process.returncode}" if ended else "was not ready in time"
                raise ServerError(f"the gateway {what}; its log:\n{both_ends(self.log_text().strip())}")
            time.sleep(POLL_S)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def _free_ports(count: int) -> list[int]:
    """Return free ports of this host."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
