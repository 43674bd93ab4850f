"""Runs a draft engine in its own thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.answer import Answer, Load
from drafter_service.engine.engine import DraftEngine
from drafter_service.engine.engine_times import EngineTimes, Phase
from drafter_service.engine.session import Session
from drafter_service.engine.step import AnnouncedStep, Step
from draftwire.model.devices import awake_s, check_context, make_current
from draftwire.transport.mailbox import Mailbox

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineFailureError(Exception):
    """The engine ended a session because of an internal error."""


@dataclass(frozen=True)
class EngineState:
    """Load, queue and counters of an engine, for its metrics."""

    load: Load
    waiting_rows: int  # rows of waiting steps
    evictions: int  # sequences evicted for another session
    taken_ahead: int  # early batches that a Commit took
    wasted_ahead: int  # early batches that were dropped
    idle_s: float  # seconds of the engine's thread without a step


class EngineThread:
    """Takes commands from any thread and runs them between two batches of the engine, in order."""

    def __init__(self, engine: DraftEngine, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called on the engine's thread after a fatal failure of the engine."""
        self.engine = engine
        self._on_failure = on_failure
        self._failure: EngineFailureError | None = None
        self.times = EngineTimes()
        self._commands: Mailbox[Callable[[], None] | None] = Mailbox(awake_s(engine.device), self._poll_early)
        self._later: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current batch."""
        self._commands.put(None)
        self._thread.join()

    @property
    def load(self) -> Load:
        """Return the engine's load."""
        return self.engine.load

    @property
    def state(self) -> EngineState:
        """Return the state for the metrics; thread-safe."""
        engine, early = self.engine, self.engine.early
        return EngineState(
            engine.load,
            engine.waiting_rows,
            engine.num_evictions,
            early.num_taken,
            early.num_wasted,
            self.times.read()[Phase.IDLE],
        )

    def open_session(self, terms: SessionTerms, deliver: Callable[[Answer | Exception], None]) -> Future[Session]:
        """Open a session; `deliver` is called on the engine's thread."""
        opened: Future[Session] = Future()
        self._commands.put(partial(self._open_session, terms, deliver, opened))
        return opened

    def close_session(self, session: Session) -> None:
        """Drop a session with its sequences."""
        self._commands.put(partial(self.engine.close_session, session))

    def drain(self) -> None:
        """Open no further sequences."""
        self._commands.put(self.engine.drain)

    def post(self, command: Callable[[], None]) -> None:
        """Call `command` on the engine's thread, in order."""
        self._commands.put(command)

    def watch(self, fd: int, read: Callable[[], Sequence[Callable[[], None]] | None]) -> None:
        """Call the commands that `read` returns when `fd` is readable; on the engine's thread."""
        self._commands.watch(fd, read)

    def unwatch(self, fd: int) -> None:
        """Stop reading from a descriptor; on the engine's thread."""
        self._commands.unwatch(fd)

    def later(self, call: Callable[[], None]) -> None:
        """Run `call` later, in order, when no step waits: while the device drafts, or before the thread sleeps. Call on
        the engine's thread. An error of `call` is logged and has no other effect."""
        self._later.append(call)

    def submit(self, session: Session, step: Step) -> None:
        """Queue a step; on the engine's thread."""
        self.engine.submit(session, step)

    def announce(self, session: Session, step: AnnouncedStep) -> None:
        """Take an announced step; on the engine's thread."""
        self.engine.announce(session, step)

    def _poll_early(self) -> Callable[[], None] | None:
        """Return the command that begins early drafts, if they can begin; on the engine's thread."""
        return self._begin_early if self._guard(self.engine.poll_early) else None

    def _begin_early(self) -> None:
        self.times.enter(Phase.COMPUTE)
        self._guard(self.engine.early.begin)

    def _open_session(
        self, terms: SessionTerms, deliver: Callable[[Answer | Exception], None], opened: Future[Session]
    ) -> None:
        if not opened.set_running_or_notify_cancel():
            return
        if self._failure is not None:
            opened.set_exception(self._failure)
            return
        try:
            opened.set_result(self.engine.open_session(terms, partial(self._deliver, deliver)))
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
            opened.set_exception(EngineFailureError(f"no memory for the draft logits of this session: {error}"))
            check_context(self.engine.device)

    def _deliver(self, deliver: Callable[[Answer | Exception], None], answer: Answer | Exception) -> None:
        phase = self.times.phase
        self.times.enter(Phase.ANSWER)
        deliver(answer)
        self.times.enter(phase)

    def _run(self) -> None:
        make_current(self.engine.device)
        with torch.inference_mode():
            self._serve()

    def _serve(self) -> None:
        try:
            while self._run_commands():
                self.iterate()
                self.times.end_step()
        except Exception as error:
            logger.exception("the draft engine failed")
            self._failure = EngineFailureError(f"the draft engine failed: {error}")
            try:
                self.engine.fail(self._failure)
            finally:
                self._on_failure()
            self._catch_up()
            self.times.enter(Phase.IDLE)
            while (command := self._commands.get()) is not None:
                command()
                self._catch_up()

    def _run_commands(self) -> bool:
        """Run the commands that have arrived, wait for one if there is no work, and return False if the thread must
        end."""
        has_polled = False
        while True:
            has_work = self.engine.has_work
            if has_work and has_polled and not self._commands.has_more:
                return True
            if self._later and not has_work:
                self.times.enter(Phase.ANSWER)
                self._catch_up()
            waiting = Phase.COMPUTE if self.engine.early.is_computing else Phase.IDLE
            self.times.enter(Phase.DECODE if has_work else waiting)
            try:
                command = self._commands.get(timeout=0 if has_work else None)
            except queue.Empty:
                return True
            has_polled = True
            if command is None:
                self._catch_up()
                return False
            self.times.enter(Phase.DECODE)
            command()
            del command  # it may keep shared memory alive while the thread waits for the next command

    def iterate(self) -> None:
        """Compute one batch; on the engine's thread."""
        self.times.enter(Phase.COMPUTE)
        self._guard(lambda: self.engine.iterate(self._catch_up))

    def _guard(self, compute: Callable[[], T]) -> T | None:
        """Call `compute`; without enough memory end all sessions and return None."""
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            known = (torch.OutOfMemoryError, MemoryError)
            if not (isinstance(error, known) or "memory" in str(error)):  # the wording of torch's CPU allocator
                raise
            check_context(self.engine.device)  # raises after an illegal memory access
            logger.exception("out of memory; all sessions end")
            self.engine.fail(EngineFailureError(f"the drafter is out of memory: {error}"))
            torch.cuda.empty_cache()
            return None

    def _catch_up(self) -> None:
        """Make the deferred calls."""
        while self._later:
            call = self._later.popleft()
            try:
                call()
            except Exception:
                logger.exception("a deferred call failed")
