"""The engine process: its start and end, from the client process and inside.

Python runs one thread of a process at a time, and gRPC's event loop takes nearly as long for a step's messages as a GPU
for the step. So the engine gets a separate process. This module does not import torch, so that the process starts
early.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from draftwire.contract.errors import ServerError
from draftwire.server.lazy_commands import importing
from draftwire.server.logs import start_logging
from draftwire.server.stop_signals import STOP_SIGNALS
from draftwire.server.tracing import exporting_traces
from verifier_service.host.channel import receive
from verifier_service.options import VerifierOptions

if TYPE_CHECKING:
    from verifier_service.host.access import EngineFacts

logger = logging.getLogger(__name__)

# Seconds within which the process must end after a stop or a closed socket. Freeing a GPU takes seconds.
EXIT_LIMIT_S = 30.0
# Seconds within which the engine must end its requests and its last step.
STOP_LIMIT_S = 10.0


def has_engine_process(options: VerifierOptions) -> bool:
    """Return whether the engine gets a separate process; default: if there is a GPU."""
    if options.engine_process is not None:
        return options.engine_process
    if options.device is not None:
        return options.device.startswith("cuda")
    from draftwire.model.devices import choose_device  # imports torch, which takes seconds

    return choose_device(None).type == "cuda"


@contextmanager
def starting_engine(options: VerifierOptions) -> Iterator[EngineProcess | None]:
    """Run the engine process, if the options want one, while the context lasts."""
    if not has_engine_process(options):
        yield None
        return
    process = EngineProcess(options)
    try:
        yield process
    finally:
        process.close()


class EngineProcess:
    """A process that loads the target and runs the engine. It ends when this process ends, in any way."""

    def __init__(self, options: VerifierOptions) -> None:
        """Start the process without waiting."""
        self.connection, engine_end = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=run_engine, args=(options, engine_end), name="engine")
        resource_tracker.ensure_running()  # starting it later would unblock the signals
        # Only this process handles signals to the process group.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            engine_end.close()

    def wait_until_ready(self) -> EngineFacts:
        """Wait until the target is loaded.

        Raises:
            DraftwireError: If the checkpoint, the device or the metrics' address is wrong, or the process has ended.
        """
        try:
            kind, content = receive(self.connection)
        except (EOFError, ConnectionError) as error:
            text = f"the engine's process ended with status {self.exit_status()} while it started; the log says why"
            raise ServerError(text) from error
        if kind == "refused":
            raise content
        facts: EngineFacts = content
        return facts

    def exit_status(self) -> int | None:
        """Return the exit status after the process has closed its socket: negative for a signal, None if it runs."""
        self._process.join(EXIT_LIMIT_S)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the end of the process, after its socket was closed."""
        self.connection.close()
        self._process.join(EXIT_LIMIT_S)
        if self._process.exitcode is None:
            logger.warning("killing the engine's process, which has not ended within %g s", EXIT_LIMIT_S)
            self._process.kill()
            self._process.join()


def run_engine(options: VerifierOptions, connection: socket.socket) -> None:
    """Run the engine process.

    It exits without the interpreter's shutdown, in which NCCL waits for all CUDA graphs with collectives. The graphs
    live as long as the process (PyTorch issue 115388).
    """
    status = 1
    try:
        if _serve(options, connection):
            status = 0
    except Exception:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # of closed streams
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _serve(options: VerifierOptions, connection: socket.socket) -> bool:
    """Run the engine; return False if it cannot be loaded."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.enable()
    start_logging(options.log_level, options.log_format)
    threading.Thread(target=_end_with, args=(connection,), name="parent-watch", daemon=True).start()
    # Both processes load torch at the same time.
    with importing():
        from verifier_service.host.server import serve_engine

    with exporting_traces("draftwire-verifier", options.otlp_endpoint, insecure=options.insecure):
        return serve_engine(options, connection)


def _end_with(connection: socket.socket) -> None:
    """End this process when the other process ends, after which the kernel closes the other end of the socket."""
    poll = select.poll()
    poll.register(connection, 0)  # hang-ups are always reported
    poll.poll()
    os._exit(1)
