"""A drafter that restarts at the same address."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from addresses import free_address

from draftwire.contract.client_security import LOOPBACK, ClientSecurity
from draftwire_bench.processes import DRAFTWIRE, ServiceProcess, start_drafter


class Drafter:
    """A drafter process that can be killed and started again; the constructor starts it."""

    def __init__(
        self,
        head: Path,
        target: Path,
        log: Path,
        *options: str,
        host: str = "127.0.0.1",
        program: Sequence[str] = DRAFTWIRE,
    ) -> None:
        """`options` are options of `draftwire drafter`. `program` is a command that runs `draftwire`, able to listen on
        `host`. On other hosts than 127.0.0.1 the drafter runs with --insecure.
        """
        self.address = f"{host}:{free_address().rpartition(':')[2]}"
        self._head = head
        self._target = target
        self._log = log
        self._program = program
        self._options = options
        self._is_local = host == "127.0.0.1"
        self.start()

    @property
    def process(self) -> ServiceProcess:
        """Return the process that was started last."""
        return self._process

    def start(self, head: Path | None = None) -> None:
        """Start the drafter with `head`, by default with its last head, and wait until it is healthy."""
        self._head = head or self._head
        self._process = start_drafter(
            self._head,
            self._target,
            *("--listen", self.address, "--device", "cpu", *([] if self._is_local else ["--insecure"])),
            *self._options,
            log_path=self._log,
            security=LOOPBACK if self._is_local else ClientSecurity(insecure=True),
            program=self._program,
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
