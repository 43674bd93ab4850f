"""Compile a grammar in a separate process, which can be killed if a grammar takes too long.

llguidance limits the resources of a compilation, but not everywhere: an integer that is a multiple of 9999991 takes
minutes. A thread cannot be killed, so each grammar is first compiled here, with single bytes as tokens. The limit is
CPU time, because on a busy host a quick grammar may take seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import llguidance

from draftwire.server.stop_signals import STOP_SIGNALS

START_LIMIT_S = 60.0
# Maximum seconds of waiting for each second of CPU time.
PATIENCE = 4
MEMORY_LIMIT = 2 * 2**30
NICENESS = 10
LONGEST_ERROR = 400


def limits() -> llguidance.LLParserLimits:
    """Return the limits of a grammar: states of its lexer, each of 1 to 2 KB, and work per mask."""
    return llguidance.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


def grammar_error(tokenizer: llguidance.LLTokenizer, grammar: str) -> tuple[llguidance.LLMatcher, str]:
    """Return a new matcher of a grammar, and the grammar's error, empty for a valid grammar."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits(), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            return matcher, f"no text follows it ({_in_one_line(matcher.get_error())})"
    return matcher, _in_one_line(matcher.get_error())


def _in_one_line(error: str) -> str:
    """Return an error of llguidance in one line, without the dump of the parser's state."""
    return " ".join(error.split("<state>", 1)[0].split())[:LONGEST_ERROR]


class Trial:
    """The process, started at the first use. Used by one thread."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._is_killed = False
        self._lock = threading.Lock()  # prevents `kill` during the process's start

    def error_of(self, grammar: str, limit_s: float) -> str:
        """Compile a grammar; return its error, empty for a valid grammar.

        Raises:
            TimeoutError: If the compilation takes more than `limit_s` seconds of CPU time, or `PATIENCE` times as long.
        """
        if self._process is not None and not self._process.is_alive():
            self.close()  # it ended between two grammars, of which none is the cause
        try:
            connection = self._start() if self._connection is None else self._connection
            connection.send((grammar, limit_s))
            if not connection.poll(PATIENCE * limit_s):
                self.close()
                raise TimeoutError
            error: str = connection.recv()
        except TimeoutError:
            raise
        except (EOFError, OSError):
            if self.close() == -signal.SIGPROF:
                raise TimeoutError from None
            return f"it takes more than {MEMORY_LIMIT // 2**20} MiB to compile"
        return error

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        process = context.Process(target=_serve, args=(other,), name="grammar-trial", daemon=True)
        with self._lock:
            process.start()
            self._process = process
            if self._is_killed:
                process.kill()
        other.close()
        if not self._connection.poll(START_LIMIT_S):
            self.close()
            raise TimeoutError
        self._connection.recv()
        return self._connection

    def kill(self) -> None:
        """Kill the process and prevent later starts; thread-safe."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> int | None:
        """Kill the process and wait for its end; return its exit status, None without a process."""
        status = None
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.kill()  # no effect on a process that has ended
            self._process.join()
            status = self._process.exitcode
        with self._lock:
            self._connection = self._process = None
        return status


def _serve(connection: Connection) -> None:
    """Compile the grammars that arrive, until the other end is closed."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    tokenizer = llguidance.LLTokenizer("byte")
    with suppress(EOFError, OSError):
        connection.send("")
        while True:
            grammar, limit_s = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # then SIGPROF ends this process
            error = grammar_error(tokenizer, grammar)[1]
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(error)
