"""The engine's process, as the one that talks to clients starts, awaits and ends it.

Python runs one thread of a process at a time, and gRPC's event loop takes nearly as long for a step's messages as a GPU
for the step: in one process the engine's thread would wait for it. This module is imported without torch, so that the
process can be started before anything else.
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

# How long it may take to end once it was told to, or its socket is closed. Freeing a GPU takes seconds.
EXIT_LIMIT_S = 30.0
# How long the engine may take to end its requests and then itself, that is for its last step.
STOP_LIMIT_S = 10.0


def has_engine_process(options: VerifierOptions) -> bool:
    """Return whether the engine gets a process of its own: by default where a GPU computes, which leaves Python to
    others."""
    if options.engine_process is not None:
        return options.engine_process
    if options.device is not None:
        return options.device.startswith("cuda")
    from draftwire.model.devices import choose_device  # imports torch, which takes seconds

    return choose_device(None).type == "cuda"


@contextmanager
def starting_engine(options: VerifierOptions) -> Iterator[EngineProcess | None]:
    """Start the engine's process, if there is to be one, which is ended at the end."""
    if not has_engine_process(options):
        yield None
        return
    process = EngineProcess(options)
    try:
        yield process
    finally:
        process.close()


class EngineProcess:
    """A process that loads the target and runs the engine. It ends with this one, however this one ends."""

    def __init__(self, options: VerifierOptions) -> None:
        """Starts it, without waiting for anything."""
        self.connection, engine_end = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=run_engine, args=(options, engine_end), name="engine")
        resource_tracker.ensure_running()  # its start would let the signals through again
        # A signal to a whole group of processes is for this one alone to answer, from the very beginning.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            engine_end.close()

    def wait_until_ready(self) -> EngineFacts:
        """Wait until the target is loaded.

        Raises
        ------
        DraftwireError
            What is wrong with the checkpoint, the device or the address of the metrics; or that the process has ended.
        """
        try:
            kind, told = receive(self.connection)
        except (EOFError, ConnectionError) as error:
            text = f"the engine's process ended with status {self.exit_status()} while it started; the log says why"
            raise ServerError(text) from error
        if kind == "refused":
            raise told
        facts: EngineFacts = told
        return facts

    def exit_status(self) -> int | None:
        """Return its exit status, negative for a signal, when it has closed its socket; None if it has not ended by
        then."""
        self._process.join(EXIT_LIMIT_S)
        return self._process.exitcode

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Wait until it has ended, which the end of its socket makes it do."""
        self.connection.close()
        self._process.join(EXIT_LIMIT_S)
        if self._process.exitcode is None:
            logger.warning("the engine's process has not ended in %g s and is killed", EXIT_LIMIT_S)
            self._process.kill()
            self._process.join()


def run_engine(options: VerifierOptions, connection: socket.socket) -> None:
    """The engine's process.

    It ends without the interpreter's own end: there NCCL waits until every CUDA graph with a collective in it is gone,
    and those stay for as long as the process (PyTorch issue 115388).
    """
    status = 1
    try:
        if _serve(options, connection):
            status = 0
    except Exception:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # of streams that are closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _serve(options: VerifierOptions, connection: socket.socket) -> bool:
    """False when the engine cannot be loaded."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.enable()
    start_logging(options.log_level, options.log_format)
    threading.Thread(target=_end_with, args=(connection,), name="parent-watch", daemon=True).start()
    # Loading torch takes seconds, in which the other process loads it too.
    with importing():
        from verifier_service.host.server import serve_engine

    with exporting_traces("draftwire-verifier", options.otlp_endpoint, insecure=options.insecure):
        return serve_engine(options, connection)


def _end_with(connection: socket.socket) -> None:
    """End this process when the other end of the socket is closed, which the kernel does however that process ends."""
    poll = select.poll()
    poll.register(connection, 0)  # hang-ups are told unasked
    poll.poll()
    os._exit(1)
