"""Services as child processes, for the demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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


class ChildProcess:
    """A running process, whose output goes to a log file; as a context manager, stops the process on exit."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path | None = None, **options: Any) -> None:
        """Start a command.

        Args:
            name: What runs, for error messages and the log file's name.
            command: Program and arguments.
            log_path: File to append the output to; by default a temporary file, which `stop` removes.
            options: Further options of `subprocess.Popen`.
        """
        self.name = name
        self._own_log = log_path is None
        self._kept_log: str | None = None
        if log_path is None:
            descriptor, path = tempfile.mkstemp(prefix=f"draftwire-{name}-", suffix=".log")
            os.close(descriptor)
            log_path = Path(path)
        self.log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal sends Ctrl-C only to the parent, which stops its children
                **options,
            )

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

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Kill the process and remove its log if the start, which is the context, fails."""
        try:
            yield
        except BaseException:
            self.kill()
            self._remove_log()
            raise

    def wait_until(self, is_ready: Callable[[], bool], deadline: float, poll_s: float = POLL_S) -> None:
        """Wait until `is_ready`.

        Raises:
            ServerError: With the log, if the process ends or is not ready at the `deadline` (monotonic seconds).
        """
        while True:
            ended = not self.running  # before the last look, so that a process that was ready is not a failure
            if is_ready():
                return
            if ended:
                raise self._failure(f"ended with status {self.returncode}")
            if time.monotonic() >= deadline:
                raise self._failure("was not ready in time")
            time.sleep(poll_s)

    def check_running(self, grace_s: float = 1.0) -> None:
        """Raise ServerError with status and log if the process ends within `grace_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(grace_s)
            raise self._failure(f"ended with status {self.returncode}")

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"the {self.name} {what}; its log:\n{both_ends(self.log_text().strip())}")


class ServiceProcess(ChildProcess):
    """A running service.

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
        environment = {**os.environ, PARENT_PIPE: "1", "PYTHONUNBUFFERED": "1"}
        super().__init__(arguments[0], [*program, *arguments], log_path, env=environment)
        self.address = ""
        deadline = time.monotonic() + timeout_s
        with self.starting():
            self.wait_until(self._has_address, deadline)
            with open_channel(self.address, security, ()) as channel:
                self.wait_until(partial(_is_serving, health_pb2_grpc.HealthStub(channel)), deadline)

    def _has_address(self) -> bool:
        match = _LISTENING.search(self.log_text())
        self.address = match.group(1) if match else ""
        return match is not None


def _is_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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
