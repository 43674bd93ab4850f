"""The verifier's engine: one thread that schedules, runs the target, draws tokens and keeps the drafters fed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from draftwire.devices import awake_s, check_context
from draftwire.errors import DraftwireError, QueueFullError, ServerError, UnavailableError
from draftwire.logs import fields
from draftwire.mailbox import Mailbox
from draftwire.memory import measure_memory
from draftwire.practice import Practice, rehearse_with
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.draft_stream import Answered, Connected, Disconnected, LinkEvent, Stream
from verifier_service.drafting import Drafting
from verifier_service.expected_step import PATIENCE_S
from verifier_service.features import FeatureStores
from verifier_service.flight import Flight
from verifier_service.next_step import NextStep
from verifier_service.output_queue import Item
from verifier_service.pacing import Profile
from verifier_service.pass_ahead import PassAhead
from verifier_service.prefix_cache import PrefixCache
from verifier_service.ranks import Followers
from verifier_service.rehearsal import AnswerRehearsal, Rehearsal
from verifier_service.request import Request
from verifier_service.request_metrics import RequestMetrics
from verifier_service.request_outputs import RequestOutputs
from verifier_service.sampler import Drawn, TokenSampler
from verifier_service.scheduler import Scheduler, Work
from verifier_service.step_launcher import StepLauncher
from verifier_service.step_times import Phase, StepTimes
from verifier_service.target import Target
from verifier_service.target_runner import start_runner

logger = logging.getLogger(__name__)

# How often a thread that waits for a step looks for drafts that let it launch the next one.
LOOK_EVERY_S = 50e-6
# Most steps in a row whose output is held back while the device waits for the host.
MOST_STEPS_HELD = 3
# How long output waits for the drafts of the next step, whose forward pass hides the work of handing it out.
OUTPUT_DELAY_S = 0.003


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine."""

    max_num_seqs: int
    max_queue: int
    max_prefill_rows: int  # rows of prompts in one step
    num_blocks: int
    draft_deadline_s: float | None  # None waits until a drafter answers or is lost
    adaptive_k: bool | None = None  # whether fewer drafts are asked for where that is faster; see `Drafting`
    prefix_caching: bool = True
    async_scheduling: bool = False  # whether a step is launched before the tokens of the one before it are known

    @property
    def max_open(self) -> int:
        """Requests that are computed, wait, or are not read to their end. A whole batch may end at once, and its output
        is still on its way when others have taken its places.
        """
        return 2 * self.max_num_seqs + self.max_queue


@dataclass(frozen=True, eq=False)
class _Arrived:
    request: Request


@dataclass(frozen=True, eq=False)
class _Cancelled:
    """The client's side needs no more output of a request."""

    request: Request
    reason: str
    output_tokens: int


@dataclass(frozen=True, eq=False)
class _Refused:
    """A request was, before it came here."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """Drafts have come before their answer."""


_Event = _Arrived | _Cancelled | _Refused | _Seen | LinkEvent
_SEEN = _Seen()


class Engine:
    """Continuous batching with verification of drafts.

    One step: take what has happened, schedule rows, launch the target over them, hand out the output of the step before
    while the device computes, take the drawn tokens, tell the drafters. All state belongs to the engine's thread;
    others reach it through `submit`, `cancel` and `post`.

    With `async_scheduling` a GPU has its next step before the tokens of the last one are known on the host: one of
    requests that took no part in it, such as another group of those that take turns, or, where nothing is drafted, one
    whose rows are the tokens that the last step draws, and further rows of the same prompts. A row that turns out to
    come after a request's end is computed for nothing. Where all wait for drafts, the next forward pass is launched,
    and begins when the host has them.
    """

    def __init__(
        self,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        limits: EngineLimits,
        deliver: Callable[[list[tuple[Request, Item]]], None],
        on_failure: Callable[[], None],
        followers: Followers | None = None,
    ) -> None:
        """Two are called in the engine's thread and must not block: `deliver` with a step's output, `on_failure` when
        the engine has failed for good and its requests have their error. `followers` have the rest of a split target.
        """
        self._target = target
        self._limits = limits
        self._deliver = deliver
        self._on_failure = on_failure
        is_synthetic = config.rejection_sample_method == config_pb2.REJECTION_SAMPLE_METHOD_SYNTHETIC
        runner = start_runner(
            target, limits.num_blocks, limits.max_num_seqs, config.num_speculative_tokens, limits.max_prefill_rows
        )
        self._cache = runner.cache
        self._stores = FeatureStores(target, limits.num_blocks)
        self._sampler = TokenSampler(
            config, target.vocab_size, target.eos_token_ids, limits.max_num_seqs, target.device
        )
        if target.device.type == "cuda":
            began = time.monotonic()
            self._sampler.warm_up(target.dtype)
            logger.info("sampling kernels in %.1f s", time.monotonic() - began)
        self._blocks = PrefixCache(limits.num_blocks, is_enabled=limits.prefix_caching)
        self.scheduler = Scheduler(
            self._blocks,
            limits.max_num_seqs,
            limits.max_queue,
            limits.max_prefill_rows,
            self._suspend,
            self._stores.is_usable,
        )
        self.times = StepTimes()
        self.metrics = RequestMetrics(config.num_speculative_tokens)
        self.drafting = Drafting(
            config,
            target.vocab_size,
            limits.draft_deadline_s,
            target.device,
            self.times,
            adaptive_k=limits.adaptive_k,
            profile=Profile(runner.pass_seconds),
        )
        self._flight: Flight | None = None
        self._landed: Flight | None = None  # and not counted yet
        self._landed_at = 0.0  # monotonic time
        self._was_delayed = False  # whether a step with prompts was launched before it landed
        self._has_ended_some = False  # a failure has made room for others since the last look
        awake = awake_s(target.device)
        practises = awake > 0 and config.num_speculative_tokens > 0
        self._events: Mailbox[_Event | None] = Mailbox(
            awake, rehearse_with(AnswerRehearsal) if practises else None, self._look
        )
        # Before the tokens of steps that drafters wait for.
        self._practice = Practice(rehearse_with(Rehearsal) if practises else None, awake)
        self._pass_ahead = PassAhead(
            *(runner.hold, runner.reserve, self.drafting.gate, target.vocab_size, self.times, self._practice)
        )
        self._next_step = NextStep(self.scheduler, self.drafting, self._pass_ahead)
        self._launcher = StepLauncher(
            target.device,
            runner.run if followers is None else followers.lead(runner.run),
            self._sampler,
            self._stores,
            self.drafting,
            self._pass_ahead,
            self._practice,
            self.times,
        )
        self._has_told = False  # the drafters of all that has happened
        self._steps_held = 0
        self._outputs = RequestOutputs(
            self.scheduler, self.drafting, self.metrics, deliver, self._suspend, is_synthetic=is_synthetic
        )
        self._stop_reason = ""
        self._ended: DraftwireError | None = None  # why the thread takes no more requests
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _look(self) -> _Seen | None:
        """Drafts that let the next pass begin, before their answer has come; on the engine's thread."""
        return _SEEN if self._pass_ahead.sees_drafts else None

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def stop(self, reason: str = "the server is shutting down") -> None:
        """Ends the thread after the step that runs; requests that are left get UnavailableError with the reason."""
        self._stop_reason = reason
        self._events.put(None)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Hands a request over; its sink gets the output or the error."""
        self._events.put(_Arrived(request))
        if self._ended is not None:
            self._refuse_arrived()

    def cancel(self, request: Request, reason: str = "abort", output_tokens: int = 0) -> None:
        """Ends a request without further output; see `RequestOutputs.cancel`."""
        self._events.put(_Cancelled(request, reason, output_tokens))

    def count_refused(self) -> None:
        """Counts a request that was not handed over."""
        self._events.put(_Refused())

    def post(self, event: LinkEvent) -> None:
        """Hands over what happened on a drafter's stream."""
        self._events.put(event)

    def _run(self) -> None:
        self._launcher.make_current()
        try:
            self._loop()
            self._ended = UnavailableError(self._stop_reason)
        except Exception as error:
            logger.exception("the engine failed")
            self._ended = ServerError(f"the engine failed: {error}")
            self._on_failure()
        try:
            self._pass_ahead.drop()
        except RuntimeError:
            logger.exception("the pass that was launched ahead is not dropped")
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._outputs.refuse(request, self._ended)
        self._outputs.hand_out()
        self._refuse_arrived()

    def _refuse_arrived(self) -> None:
        """Ends the requests that nobody will take any more; from any thread."""
        assert self._ended is not None
        for event in self._events.leftovers():
            if isinstance(event, _Arrived):
                self._deliver([(event.request, self._ended)])

    def _loop(self) -> None:
        has_moved = False
        while self._take_events(wait=not has_moved):
            launched, landing = None, self._flight
            has_told, self._has_told = self._has_told, False
            if not (has_told and landing is None and self._all_wait):
                self._tell_drafters(has_answers=True)
                launched = self._launch_next()
            if not self._limits.async_scheduling:
                launched, landing = None, launched
            if landing is None and launched is None:
                self._launch_expected()
            if landing is not None:
                self._count_landed()
                self.drafting.settle_costs()
                if not self._holds_output(launched, landing):
                    self._outputs.hand_out()
                if launched is None and not self._awaits(landing):
                    continue
            self._flight = launched
            if landing is not None:
                self._land(landing)
            has_moved = landing is not None or launched is not None or self._has_ended_some
            self._has_ended_some = False

    @property
    def _all_wait(self) -> bool:
        """Whether everybody waits for drafts, so that nothing can be scheduled."""
        return not self.scheduler.may_admit and self.drafting.gate.all_wait(self.scheduler.running)

    @property
    def _has_drafts_to_come(self) -> bool:
        """Whether drafts are waited for, or there."""
        return self.drafting.gate.is_awaited or any(request.drafts is not None for request in self.scheduler.running)

    def _tell_drafters(self, *, has_answers: bool) -> None:
        """Sends the drafters what is new. Whether all answers have been taken tells which drafters are slow or lost."""
        try:
            if has_answers:
                self.drafting.drop_lost()
            # Features are gathered where the steps run if none does, and no pass stands there that waits for drafts.
            is_free = self._flight is None and not self._pass_ahead.is_pending
            with self._launcher.on_steps() if is_free else nullcontext():
                self.drafting.flush(self.scheduler.running, self._stores.by_kind, watches=has_answers)
        except Exception as error:
            self._end_failed(list(self.scheduler.running), error)

    def _launch_next(self) -> Flight | None:
        """Launches the next step, if there is one."""
        works: list[Work] = []
        try:
            if self._pass_ahead.is_reserved and self._flight is None and not self._has_drafts_to_come:
                self._pass_ahead.drop()  # nobody asked for any in the end
            until = self._pass_ahead.until
            if until is not None and (time.monotonic() >= until or not self.scheduler.running):
                self._pass_ahead.drop()
            works = self._next_step.choose(self._flight)
            if not works:
                return None
            with self._launcher.on_steps():
                return self._launcher.launch(works, self._flight)
        except Exception as error:
            self._end_failed([work.request for work in works] or list(self.scheduler.running), error)
            return None

    def _launch_expected(self) -> None:
        """Where all wait for drafts: launches the forward pass that will verify them, which saves its launch later."""
        running = self.scheduler.running
        num_drafts = self.drafting.gate.expected_drafts(running) if self._limits.async_scheduling else None
        is_reserved = self._pass_ahead.is_reserved
        # A prompt that waits is computed before the drafts come, unless the pass has been launched: then behind it.
        if num_drafts is None or (not is_reserved and (self._pass_ahead.is_pending or self.scheduler.may_admit)):
            return
        self.times.enter(Phase.WAIT)
        try:
            self._launch_pass(running, num_drafts)
            self._await_drafts()
        except Exception as error:
            self._end_failed(list(running), error)

    def _launch_pass(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> None:
        """Launches the pass of these requests with so many drafts at most, if there is room for their last tokens."""
        rooms = list(map(self.scheduler.place_drafts, requests, num_drafts))
        if min(rooms) >= 0:
            with self._launcher.on_steps():
                self._pass_ahead.launch(list(zip(requests, rooms, strict=True)))

    def _await_drafts(self) -> None:
        """Has the pass that was launched begin as soon as its drafts are seen."""
        self._pass_ahead.foresee()
        if self._pass_ahead.sees_drafts:  # their answer need not be read first
            self._pass_ahead.begin_with_board()

    def _awaits(self, flight: Flight) -> bool:
        """Waits for a step to be done; False when something came first that may let the next one be launched."""
        self.times.enter(Phase.SAMPLE)
        if self._limits.async_scheduling and self.drafting.gate.is_awaited:
            while not flight.is_done:
                if self._events.wait(LOOK_EVERY_S):
                    return False
        return True

    def _holds_output(self, launched: Flight | None, landing: Flight) -> bool:
        """Whether output waits for that of the next step, because the device has waited for the host: several steps' in
        one message take less of the interpreter, which this thread shares with the one that writes the messages."""
        is_behind = launched is not None and landing.marks is not None and landing.is_done
        self._steps_held = self._steps_held + 1 if is_behind and self._steps_held < MOST_STEPS_HELD else 0
        return self._steps_held > 0

    def _end_failed(self, requests: Sequence[Request], error: Exception) -> None:
        told = fields(request_ids=[request.request_id for request in requests])
        logger.exception("the step failed; its requests are ended", extra=told)
        check_context(self._target.device)  # or each step from now on would fail
        for request in requests:
            if request.blocks:
                self._has_ended_some = True
                self._outputs.fail(request, ServerError(f"the step failed: {error}"))

    def _take_events(self, wait: bool) -> bool:
        """Takes all events; with `wait`, until there is one or a deadline passes. False when it is time to stop."""
        if wait:
            if not self._events.wait(0):  # else what is there may be drafts, which go first
                self._end_step()
                if not self._pass_ahead.is_pending:  # else the step that waits for drafts hides it
                    self._count_landed()
            # A pass that has begun waits for the answer alone, and the device computes it meanwhile.
            waiting = Phase.SAMPLE if self._pass_ahead.has_begun else Phase.WAIT
            self.times.enter(waiting if self.scheduler.running else Phase.IDLE)
        try:
            event = self._next_event() if wait else self._events.get_nowait()
            self.times.enter(Phase.HOST)
            while event is not None:
                self._take(event)
                event = self._events.get_nowait()
            return False
        except queue.Empty:
            self.times.enter(Phase.HOST)
            return True

    def _next_event(self) -> _Event | None:
        """Waits for an event, the output for a moment only: drafts that come soon let a step hide the handing out.

        Raises
        ------
        queue.Empty
            When a deadline passes first.
        """
        deadline = self.drafting.next_deadline()
        if self._pass_ahead.is_pending and self._pass_ahead.until is not None:
            deadline = self._pass_ahead.until if deadline is None else min(deadline, self._pass_ahead.until)
        if self._outputs.is_waiting:
            moment = OUTPUT_DELAY_S if self.drafting.gate.is_awaited and not self._outputs.has_errors else 0.0
            if deadline is not None and deadline - time.monotonic() < moment:
                return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            with suppress(queue.Empty):
                return self._events.get(timeout=moment)
            self._outputs.hand_out()
        return self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _take(self, event: _Event) -> None:
        self._has_told = False
        if isinstance(event, _Arrived):
            try:
                self.scheduler.add(event.request)
            except QueueFullError as error:
                self._outputs.refuse(event.request, error)
                self.metrics.count_refused()
        elif isinstance(event, _Cancelled):
            self._outputs.cancel(event.request, event.reason, event.output_tokens)
        elif isinstance(event, _Refused):
            self.metrics.count_refused()
        elif isinstance(event, _Seen):
            self._events.has_come()
            self._has_begun(self._pass_ahead.begin_with_board)
        else:
            self._take_of_link(event)

    def _take_of_link(self, event: LinkEvent) -> None:
        if isinstance(event, (Connected, Disconnected)):
            self._pass_ahead.drop()  # memory of the device comes or goes, for which the driver may wait for all streams
            if isinstance(event, Connected) and not self._has_store(event.stream):
                return
            self._use_lane(event)
        has_begun = False
        if isinstance(event, Answered):
            self._events.has_come()
            if any(event.drafts.num_drafts):  # no step waits for one that brings none
                self.times.count_answer(event.drafts.compute_time_s, is_behind=self._pass_ahead.has_begun)
            has_begun = self._has_begun(partial(self._pass_ahead.begin_with, event))
        self.drafting.handle(event)
        if not has_begun:
            self._has_begun(self._pass_ahead.begin)
        self._stores.keep(self.drafting.feature_kinds)

    def _has_begun(self, begin: Callable[[], bool]) -> bool:
        """What `begin` says; or true when it failed, and nothing is left to begin."""
        try:
            return begin()
        except Exception as error:
            self._end_failed(list(self.scheduler.running), error)
            return True

    def _use_lane(self, event: Connected | Disconnected) -> None:
        """Answers that come over a stream's lane reach this thread without another one."""
        lane = event.stream.lane
        if lane is not None and isinstance(event, Connected):
            self._events.watch(lane.fileno(), event.stream.read_lane)
        elif lane is not None:
            self._events.unwatch(lane.fileno())
            lane.close()

    def _has_store(self, stream: Stream) -> bool:
        """Whether there is a store of the features that a new stream needs; makes it."""
        try:
            with self._launcher.on_steps():  # which write it
                self._stores.need(stream.head.kind, stream.head.fusion)
        except (RuntimeError, MemoryError) as error:
            check_context(self._target.device)
            layers = list(stream.head.layers)
            stream.fail(f"there is no memory for the features of its layers {layers}: {error}")
            return False
        return True

    def _land(self, flight: Flight) -> None:
        """Takes the tokens of a step, for which it waits."""
        self.drafting.gate.note_landing()
        self.drafting.take_ahead(flight.ahead)
        try:
            self.times.enter(Phase.SAMPLE)
            drawn: list[Drawn] = []
            if flight.pending is not None:
                self._reserve(flight)
                self._practise(flight)
                drawn = self._sampler.finish(flight.pending)
            elif flight.marks is not None:
                flight.marks.drawn.synchronize()
            self._landed = flight
            self.times.land()
            self._landed_at = now = time.monotonic()
            self._was_delayed = self._flight is not None and self._flight.has_prompts
            self._practice.end(now)
            if flight.marks is None:  # else the phases come from the marks, at any time
                self._end_step()
            self._outputs.commit(flight.works, drawn, now)
            has_filled = self._fill_reserved()
            self._tell_drafters(has_answers=False)  # which wait for it, the rest does not
            self._events.expect()
            self._has_told = True
            if has_filled:
                self._await_drafts()
        except Exception as error:
            self._end_failed([work.request for work in flight.works], error)

    def _reserve(self, flight: Flight) -> None:
        """Where all will wait for drafts when a step has landed: launches the pass behind it, if there is time."""
        running = self.scheduler.running
        others = self._flight is not None or self._pass_ahead.is_pending or bool(self.scheduler.waiting)
        if others or not self._limits.async_scheduling or not flight.has_drafts or flight.has_prompts:
            return
        left_s = self._practice.time_left(time.monotonic())
        if flight.marks is not None and not self._pass_ahead.reserve_s <= left_s < PATIENCE_S:
            return
        num_drafts = self.drafting.gate.drafts_to_come(running)
        # Else all may have come to their end or their last token, and others would wait for a pass of nobody's.
        rooms = (work.request.max_length - len(work.request.tokens) - len(work.tokens) for work in flight.works)
        if max(rooms) > 1 and num_drafts is not None:
            with self._launcher.on_steps():
                self._pass_ahead.reserve(running, num_drafts)

    def _fill_reserved(self) -> bool:
        """Fills the pass behind a step that has landed, where drafters draft already after what it has drawn: their
        drafts may come before the message is built. Whether it did."""
        if not self._pass_ahead.is_reserved:
            return False
        num_drafts = self.drafting.gate.drafts_to_come(self.scheduler.running, has_landed=True)
        if num_drafts is not None:
            self._launch_pass(self.scheduler.running, num_drafts)
        return not self._pass_ahead.is_reserved

    def _practise(self, flight: Flight) -> None:
        """Where a drafter waits for a step's tokens: goes through what follows them shortly before they are due."""
        if flight.has_drafts:
            self._practice.wait(lambda: flight.is_done)

    def _end_step(self) -> None:
        """Counts the last step."""
        flight, self._landed = self._landed, None
        if flight is not None:
            step_s, host_s = self.times.end_step(flight.marks)
            self.drafting.gate.count_step(
                flight.num_rows,
                has_prompts=flight.has_prompts,
                is_delayed=self._was_delayed,
                step_s=step_s,
                host_s=host_s,
                verified=flight.verified,
                landed=self._landed_at,
                is_beside=flight.is_beside if self._limits.async_scheduling and flight.marks is not None else None,
            )

    def _count_landed(self) -> None:
        """Counts the last step and what it verified; late, so that the drafters have what they wait for."""
        self._end_step()
        self._outputs.count()

    def _suspend(self, request: Request) -> None:
        """Drops what is kept of a request beside its tokens: a preempted one is opened anew when it runs again."""
        self.drafting.release(request)
        self._sampler.forget(request)

    def counters(self) -> generate_pb2.EngineCounters:
        """What the engine has done so far; from any thread."""
        counters = self.times.read()
        counters.preemptions = self.scheduler.num_preemptions
        counters.prefix_hit_rows = self.scheduler.num_reused_rows
        counters.fallbacks.extend(self.metrics.fallbacks())
        counters.accepted_drafts = self.metrics.num_accepted
        return counters

    @property
    def memory(self) -> draft_pb2.MemoryUse:
        """What the process takes of memory; from any thread."""
        return measure_memory(self._cache, self._target.device, features=self._stores.num_bytes)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the cache blocks in use, [0, 1]."""
        return self._blocks.usage
