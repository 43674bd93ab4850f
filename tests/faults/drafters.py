"""A drafter that is found at the same address again after it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from addresses import free_address

from draftwire.contract.client_security import LOOPBACK, ClientSecurity
from draftwire_bench.processes import DRAFTWIRE, ServiceProcess, start_drafter


class Drafter:
    """Runs from `start` to `kill`, again and again."""

    def __init__(
        self,
        head: Path,
        target: Path,
        log: Path,
        *options: str,
        host: str = "127.0.0.1",
        program: Sequence[str] = DRAFTWIRE,
    ) -> None:
        """`options` are those of `draftwire drafter`; `program` runs `draftwire` where it can listen on `host`. Another
        host than loopback speaks plain text too.
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
        """The one that was started last."""
        return self._process

    def start(self, head: Path | None = None) -> None:
        """Starts it, with another head from now on if one is given; it is healthy when this returns."""
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
        """Ends it as a crash would."""
        self._process.kill()
