"""Services as child processes, for the demo and the system tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.contract.client_security import LOOPBACK, ClientSecurity, open_channel
from draftwire.contract.errors import ServerError
from draftwire.server.parent_watch import PARENT_PIPE, STOP_TIMEOUT_S

START_TIMEOUT_S = 120.0
POLL_S = 0.02
LOG_CHARS = 3000  # of a log's beginning and end in an error
DRAFTWIRE = (sys.executable, "-m", "draftwire_cli")

_LISTENING = re.compile(r"^listening on (\S+:\d+)$", re.MULTILINE)


class ServiceProcess:
    """A running service, whose output goes to a log file; as a context manager, stops the service on exit.

    Attributes:
        address: HOST:PORT that the service listens on.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path | None = None,
        timeout_s: float = START_TIMEOUT_S,
        security: ClientSecurity = LOOPBACK,
        program: Sequence[str] = DRAFTWIRE,
    ) -> None:
        """Start `draftwire ARGUMENTS` and wait until the service is healthy.

        Args:
            arguments: Arguments of the command line, beginning with the command's name.
            log_path: File to append the output to; by default a temporary file, which `stop` removes.
            timeout_s: Seconds until the service must be healthy.
            security: Security settings for the health check.
            program: Command that runs `draftwire`, such as one that enters a network namespace first.

        Raises:
            ServerError: With the log, if the process ends or is not healthy in time.
        """
        self.name = arguments[0]
        self._own_log = log_path is None
        self._kept_log: str | None = None
        if log_path is None:
            descriptor, name = tempfile.mkstemp(prefix=f"draftwire-{self.name}-", suffix=".log")
            os.close(descriptor)
            log_path = Path(name)
        self.log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_PIPE: "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a terminal sends Ctrl-C only to the parent, which stops its children
            )
        try:
            deadline = time.monotonic() + timeout_s
            self.address = self._wait_for_address(deadline)
            self._wait_for_health(deadline, security)
        except BaseException:
            self.kill()
            self._remove_log()
            raise

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def log_text(self) -> str:
        """Return the process' output so far."""
        if self._kept_log is not None:
            return self._kept_log
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP and SIGCONT to suspend the service."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self.wait()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Terminate the process, kill it after `timeout_s` seconds, and return the exit status."""
        self._process.terminate()
        try:
            status = self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self.wait()
        self._remove_log()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _remove_log(self) -> None:
        if self._own_log and self._kept_log is None:
            self._kept_log = self.log_text()
            self.log_path.unlink()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the process to end (subprocess.TimeoutExpired after `timeout_s`), and return the exit status."""
        status = self._process.wait(timeout_s)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status

    def _wait_for_address(self, deadline: float) -> str:
        while True:
            ended = not self.running
            match = _LISTENING.search(self.log_text())
            if match:
                return match.group(1)
            self._check_start(ended, deadline)
            time.sleep(POLL_S)

    def _wait_for_health(self, deadline: float, security: ClientSecurity) -> None:
        with open_channel(self.address, security, ()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                ended = not self.running
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                self._check_start(ended, deadline)
                time.sleep(POLL_S)

    def check_running(self, grace_s: float = 1.0) -> None:
        """Raise ServerError with status and log if the process ends within `grace_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(grace_s)
            raise self._failure(f"ended with status {self.returncode}")

    def _check_start(self, ended: bool, deadline: float) -> None:
        if ended:
            raise self._failure(f"ended with status {self.returncode}")
        if time.monotonic() >= deadline:
            raise self._failure("was not ready in time")

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"the {self.name} {what}; its log:\n{both_ends(self.log_text().strip())}")


def both_ends(log: str) -> str:
    """Return a log; a long one without its middle, because the first error is at the start."""
    if len(log) <= 2 * LOG_CHARS:
        return log
    return f"{log[:LOG_CHARS]}\n[{len(log) - 2 * LOG_CHARS} characters]\n{log[-LOG_CHARS:]}"


def start_drafter(
    head: str | Path,
    target: str | Path,
    *extra: str,
    log_path: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    security: ClientSecurity = LOOPBACK,
    program: Sequence[str] = DRAFTWIRE,
) -> ServiceProcess:
    """Start a drafter on a free local port; `extra` arguments override others, such as `--listen`."""
    arguments = ["drafter", "--head", str(head), "--target", str(target), "--listen", "127.0.0.1:0", *extra]
    return ServiceProcess(arguments, log_path, timeout_s, security, program)


def start_verifier(
    target: str | Path,
    drafters: Sequence[str],
    *extra: str,
    log_path: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    security: ClientSecurity = LOOPBACK,
) -> ServiceProcess:
    """Start a verifier with `drafters` on a free local port; `extra` arguments override others."""
    pool = ["--drafters", ",".join(drafters)] if drafters else []
    arguments = ["verifier", "--target", str(target), *pool, "--listen", "127.0.0.1:0", *extra]
    return ServiceProcess(arguments, log_path, timeout_s, security)
