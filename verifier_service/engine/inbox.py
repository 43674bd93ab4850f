"""The engine's events: requests and cancellations from any thread, and the drafters' messages."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from draftwire.contract.errors import DraftwireError, QueueFullError
from draftwire.transport.mailbox import Mailbox
from verifier_service.core.request import Request
from verifier_service.core.step_times import Phase, StepTimes
from verifier_service.drafters.drafting import Drafting
from verifier_service.drafters.stream import Answered, Connected, Disconnected, LinkEvent
from verifier_service.engine.executor import Executor
from verifier_service.engine.outputs import RequestOutputs
from verifier_service.engine.request_metrics import RequestMetrics
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.step import Step

# Seconds between polls for drafts while the thread waits for a step.
POLL_INTERVAL_S = 50e-6
# Seconds that output waits for the next step's drafts, whose forward pass hides the delivery.
OUTPUT_DELAY_S = 0.003


@dataclass(frozen=True, eq=False)
class _Submitted:
    requests: tuple[Request, ...]


@dataclass(frozen=True, eq=False)
class _Cancelled:
    """The client process cancels a request."""

    request: Request
    reason: str
    output_tokens: int


@dataclass(frozen=True, eq=False)
class _Refused:
    """A request was refused before it was submitted."""


@dataclass(frozen=True, eq=False)
class _Called:
    """A function to be called in the engine's thread."""

    run: Callable[[], object]


@dataclass(frozen=True, eq=False)
class _EarlyDrafts:
    """Early drafts have arrived."""


@dataclass(frozen=True, eq=False)
class _Stopped:
    reason: str


_Event = _Submitted | _Cancelled | _Refused | _Called | _EarlyDrafts | _Stopped | LinkEvent
_EARLY_DRAFTS = _EarlyDrafts()


class Inbox:
    """Takes events from any thread and applies them in the engine's thread.

    Attributes:
        has_received: Whether the last `receive` found an event.
        stop_reason: Reason of the stop; empty before.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: Drafting,
        executor: Executor,
        outputs: RequestOutputs,
        metrics: RequestMetrics,
        times: StepTimes,
        awake_s: float,
    ) -> None:
        """`awake_s` as of `Mailbox`."""
        self.has_received = False
        self.stop_reason = ""
        self._scheduler = scheduler
        self._drafting = drafting
        self._executor = executor
        self._outputs = outputs
        self._metrics = metrics
        self._times = times
        self._mailbox: Mailbox[_Event] = Mailbox(awake_s, lambda: _EARLY_DRAFTS if executor.sees_drafts else None)
        self._error: DraftwireError | None = None  # for requests after the engine has ended

    # From any thread.

    def submit(self, *requests: Request) -> None:
        """Submit requests, of which all or none are queued; after the engine's end they get an error."""
        self._mailbox.put(_Submitted(requests))
        if self._error is not None:
            self._refuse_submitted(self._error)

    def cancel(self, request: Request, reason: str, output_tokens: int) -> None:
        """End a request without further output; see `RequestOutputs.cancel`."""
        self._mailbox.put(_Cancelled(request, reason, output_tokens))

    def count_refused(self) -> None:
        """Count a request that was not submitted."""
        self._mailbox.put(_Refused())

    def call(self, run: Callable[[], object]) -> None:
        """Call `run` in the engine's thread between two steps, unless the engine has ended; `run` must not raise."""
        self._mailbox.put(_Called(run))

    def post(self, event: LinkEvent) -> None:
        """Post an event of a drafter's stream."""
        self._mailbox.put(event)

    def stop(self, reason: str) -> None:
        """Make `receive` return False."""
        self._mailbox.put(_Stopped(reason))

    def _refuse_submitted(self, error: DraftwireError) -> None:
        for event in self._mailbox.leftovers():
            if isinstance(event, _Submitted):
                for request in event.requests:
                    self._outputs.deliver_error(request, error)

    # In the engine's thread.

    def close(self, error: DraftwireError) -> None:
        """Answer all requests that were not applied with an error."""
        self._error = error
        self._refuse_submitted(error)

    def has_events(self) -> bool:
        """Return whether there is an event; early drafts count."""
        return self._mailbox.wait(0)

    def comes_before(self, step: Step) -> bool:
        """Wait for a step; return whether an event that may allow the next step arrived before its end."""
        self._times.enter(Phase.SAMPLE)
        if self._drafting.wait_policy.is_awaited:
            while not step.is_done:
                if self._mailbox.wait(POLL_INTERVAL_S):
                    return True
        return False

    def receive(self, *, wait: bool) -> bool:
        """Apply all events; with `wait`, wait for an event or a deadline. Return False if the engine must stop."""
        if wait:
            waiting = Phase.SAMPLE if self._executor.computes_prelaunched else Phase.WAIT
            self._times.enter(waiting if self._scheduler.running else Phase.IDLE)
        self.has_received = False
        with suppress(queue.Empty):
            event = self._next() if wait else self._mailbox.get_nowait()
            self._times.enter(Phase.HOST)
            self.has_received = True
            while not isinstance(event, _Stopped):
                self._apply(event)
                event = self._mailbox.get_nowait()
            self.stop_reason = event.reason
            return False
        self._times.enter(Phase.HOST)
        return True

    def _next(self) -> _Event:
        """Wait for an event, and deliver output if none arrives soon; a step that starts soon hides the delivery.

        Raises:
            queue.Empty: If a deadline passes first.
        """
        deadline = self._drafting.next_deadline()
        expiry = self._executor.deadline
        if expiry is not None:
            deadline = expiry if deadline is None else min(deadline, expiry)
        if self._outputs.is_waiting:
            moment = OUTPUT_DELAY_S if self._drafting.wait_policy.is_awaited and not self._outputs.has_errors else 0.0
            if deadline is not None and deadline - time.monotonic() < moment:
                return self._mailbox.get(timeout=max(0.0, deadline - time.monotonic()))
            with suppress(queue.Empty):
                return self._mailbox.get(timeout=moment)
            self._outputs.deliver()
        return self._mailbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _apply(self, event: _Event) -> None:
        if isinstance(event, _Submitted):
            try:
                self._scheduler.add(*event.requests)
            except QueueFullError as error:
                for request in event.requests:
                    self._outputs.refuse(request, error)
                    self._metrics.count_refused()
        elif isinstance(event, _Cancelled):
            self._outputs.cancel(event.request, event.reason, event.output_tokens)
        elif isinstance(event, _Refused):
            self._metrics.count_refused()
        elif isinstance(event, _Called):
            event.run()
        elif isinstance(event, _EarlyDrafts):
            self._start(self._executor.take_early_drafts)
        elif not isinstance(event, _Stopped):
            self._apply_link_event(event)

    def _apply_link_event(self, event: LinkEvent) -> None:
        if isinstance(event, (Connected, Disconnected)):
            # Allocating or freeing device memory may wait for all streams.
            self._executor.abandon_prelaunched()
            if isinstance(event, Connected) and not self._executor.need_features(event.stream):
                return
            self._watch_stream(event)
        has_started = False
        if isinstance(event, Answered):
            if any(event.drafts.num_drafts):  # no step waits for an answer without drafts
                is_behind = self._executor.computes_prelaunched
                self._times.count_answer(event.drafts.compute_time_s, is_behind=is_behind)
            has_started = self._start(lambda: self._executor.take_answer(event))
        self._drafting.handle(event)
        if isinstance(event, Disconnected):
            event.stream.release()
        if not has_started:
            self._start(self._executor.start_if_complete)
        self._executor.keep_features(self._drafting.feature_kinds)

    def _start(self, start: Callable[[], bool | None]) -> bool:
        """Return the result of `start`; True if it raised an error, because then nothing is left to start."""
        try:
            return bool(start())
        except Exception as error:
            self._outputs.fail_step(self._scheduler.running, error)
            return True

    def _watch_stream(self, event: Connected | Disconnected) -> None:
        """Begin or end reading a direct channel's answers in this thread."""
        stream = event.stream
        if not stream.is_direct:
            return
        if isinstance(event, Connected):
            self._mailbox.watch(stream.fileno(), stream.read_direct)
        else:
            self._mailbox.unwatch(stream.fileno())
