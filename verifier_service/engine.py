"""The verifier's engine: one thread that schedules, runs the target, draws tokens and keeps the drafters fed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from draftwire.devices import awake_s, make_current, record_event
from draftwire.errors import DraftwireError, QueueFullError, ServerError, UnavailableError
from draftwire.kv_cache import SequenceRows
from draftwire.logs import fields
from draftwire.mailbox import Mailbox
from draftwire.memory import measure_memory
from draftwire.practice import Practice, rehearse_with
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.draft_session import DraftSession
from verifier_service.draft_stream import Answered, Connected, Disconnected, LinkEvent, Stream
from verifier_service.drafting import Drafting
from verifier_service.expected_step import PATIENCE_S
from verifier_service.features import FeatureKind, FeatureStore
from verifier_service.features_ahead import FeaturesAhead
from verifier_service.flight import Flight
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
from verifier_service.step_times import Phase, StepMarks, StepTimes
from verifier_service.target import Target
from verifier_service.target_runner import DrawnTokens, StepOutput, StepRows, start_runner

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
    request: Request


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

    Behind its draw a step puts its features where they are sent from. What else drafting does on the GPU goes to a
    stream of its own, so that nothing is sent a step late; it touches rows of landed steps alone, and each launch waits
    for it.
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
        self._run_rows = runner.run if followers is None else followers.lead(runner.run)
        self._cache = runner.cache
        self._stores: dict[FeatureKind, FeatureStore] = {}
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
            self._is_usable,
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
        # The streams of a GPU: that of the steps, and the thread's own, which drafting uses beside them.
        self._steps = torch.cuda.default_stream(target.device) if target.device.type == "cuda" else None
        self._beside = torch.cuda.Stream(target.device, priority=-1) if target.device.type == "cuda" else None
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

    def cancel(self, request: Request) -> None:
        """Ends a request without further output."""
        self._events.put(_Cancelled(request))

    def count_refused(self) -> None:
        """Counts a request that was not handed over."""
        self._events.put(_Refused())

    def post(self, event: LinkEvent) -> None:
        """Hands over what happened on a drafter's stream."""
        self._events.put(event)

    def _run(self) -> None:
        make_current(self._target.device)
        if self._beside is not None:
            torch.cuda.set_stream(self._beside)
        try:
            self._loop()
            self._ended = UnavailableError(self._stop_reason)
        except Exception as error:
            logger.exception("the engine failed")
            self._ended = ServerError(f"the engine failed: {error}")
            self._on_failure()
        self._pass_ahead.drop()
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
            self.drafting.flush(self.scheduler.running, self._stores, watches=has_answers)
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
            works = self._schedule()
            if not works:
                return None
            with self._on_steps():
                return self._launch(works)
        except Exception as error:
            self._end_failed([work.request for work in works] or list(self.scheduler.running), error)
            return None

    def _schedule(self) -> list[Work]:
        gate, flight = self.drafting.gate, self._flight
        following = self._following(flight) if flight is not None else {}
        drafted = [] if flight is None else [work.request for work in flight.works if work.num_drafts > 0]
        requests = [one for one in self.scheduler.running if not one.is_in_flight or one in following]
        has_launched = flight is not None or self._pass_ahead.is_pending
        if gate.is_held(requests, has_launched=has_launched, may_admit=self.scheduler.may_admit):
            return []

        def can_go(request: Request) -> bool:
            return gate.is_ready(request) and gate.takes_turns(request, drafted)

        if flight is not None and not following and self._would_part(flight, can_go):
            return []
        going_on = {} if flight is None or gate.is_counted_on else self._going_on(flight)
        return self.scheduler.schedule(can_go, following, going_on, takes_prompts=not self._pass_ahead.is_pending)

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
            with self._on_steps():
                self._pass_ahead.launch(list(zip(requests, rooms, strict=True)))

    def _await_drafts(self) -> None:
        """Has the pass that was launched begin as soon as its drafts are seen."""
        self._pass_ahead.foresee()
        if self._pass_ahead.sees_drafts:  # their answer need not be read first
            self._pass_ahead.begin_with_board()

    def _would_part(self, flight: Flight, can_go: Callable[[Request], bool]) -> bool:
        """Whether a step beside one that is in flight would part requests that a step after it has together: some
        without a drafter would never be in one again, and prompts alone would go before others that can go soon."""
        is_bound = self.drafting.is_bound
        others = [one for one in self.scheduler.running if one.is_decoding and not one.is_in_flight]
        flying = [work.request for work in flight.works if work.is_current]
        if not any(map(can_go, others)):
            have_drafts = any(one.drafts is not None for one in others)
            return have_drafts or self.drafting.gate.come_soon(one for one in flying if one.is_decoding)
        return any(not is_bound(one) for one in others) and any(not is_bound(one) for one in flying)

    def _following(self, flight: Flight) -> dict[Request, int]:
        """The requests of a step that can go on before its tokens are known, and the tokens' places in its draw: all
        that go on, or none, so that they stay together, but for a few that look after a drafter."""
        if flight.pending is None or flight.pending.first_tokens is None or self.drafting.gate.is_counted_on:
            return {}
        held_back = self.drafting.held_back(flight.sampling)
        # Who goes on may give its blocks back, and with them what it draws, which a drafter must not have seen.
        if held_back is None or any(work.request.is_foretold for work in flight.sampling):
            return {}
        following: dict[Request, int] = {}
        for place, work in enumerate(flight.sampling):
            request = work.request
            if not work.is_current or len(request.tokens) + 1 >= request.max_length or request in held_back:
                continue
            if work.num_drafts > 0:
                return {}
            following[request] = place
        return following

    def _going_on(self, flight: Flight) -> dict[Request, int]:
        """The prompts that go on while a step is in flight that has rows of them and not the last one, and the first
        row after those."""
        return {
            work.request: work.start + len(work.tokens)
            for work in flight.works
            if not work.samples and work.is_current and self.drafting.may_go_on(work.request)
        }

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
            if event.request in self.scheduler.running or event.request in self.scheduler.waiting:
                self.metrics.count_end("abort", time.monotonic() - event.request.arrived)
            self._outputs.forget(event.request)
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
            self.times.count_answer(event.drafts.compute_time_s)
            has_begun = self._has_begun(partial(self._pass_ahead.begin_with, event))
        self.drafting.handle(event)
        if not has_begun:
            self._has_begun(self._pass_ahead.begin)
        self._drop_unused_stores()

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
        head = stream.head
        if head.kind not in self._stores:
            try:
                with self._on_steps():  # which write it
                    store = FeatureStore(self._target, head.layers, self._limits.num_blocks, head.fusion)
            except (RuntimeError, MemoryError) as error:  # what torch raises on a CPU and on a GPU without memory
                stream.fail(f"there is no memory for the features of its layers {list(head.layers)}: {error}")
                return False
            self._stores[head.kind] = store
        return True

    def _drop_unused_stores(self) -> None:
        """Frees the features that no drafter takes any more, but for the last ones: their drafter may come back."""
        used = self.drafting.feature_kinds
        if used:
            self._stores = {kind: store for kind, store in self._stores.items() if kind in used}

    def _is_usable(self, request: Request, block: int) -> bool:
        """Whether a request may begin with a cached block: one that drafts needs features, which blocks that were
        computed before a drafter came do not have, or its head would see a part of the prompt alone.
        """
        return request.num_speculative_tokens == 0 or all(store.holds(block) for store in self._stores.values())

    def _on_steps(self) -> AbstractContextManager[object]:
        """What is launched within belongs to the steps of a GPU."""
        return nullcontext() if self._steps is None else torch.cuda.stream(self._steps)

    def _launch(self, works: Sequence[Work]) -> Flight:
        if self._steps is not None and self._beside is not None:
            self._steps.wait_stream(self._beside)
        output = self._forward(works)
        computed = record_event(self._target.device)
        sampling = [work for work in works if work.samples]
        self.times.enter(Phase.SAMPLE)
        pending = self._sampler.launch(sampling, output.logits) if sampling else None
        drawn = record_event(self._target.device) if pending is None else pending.copied
        self.times.enter(Phase.HOST)
        for work in works:
            if work.is_decoding and work.num_drafts == 0 and work.follows is None and work.cause is None:
                work.cause = self.drafting.fallback_cause(work.request)  # answers may come while it is in flight
            work.request.num_in_flight += 1
        marks = None
        if output.began is not None and computed is not None and drawn is not None:
            marks = StepMarks(output.began, computed, drawn)
        ahead: dict[DraftSession, FeaturesAhead] = {}
        if pending is not None and pending.drawn is not None:
            ahead = self.drafting.begin_features(sampling, pending.drawn, self._stores)
        num_rows, is_beside = len(output.slots_on_host), self._flight is not None
        verified = self.drafting.count_by_drafter(works)
        self.drafting.gate.note_launch()
        return Flight(works, sampling, pending, marks, num_rows, ahead, is_beside=is_beside, verified=verified)

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
            with self._on_steps():
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

    def _forward(self, works: Sequence[Work]) -> StepOutput:
        """Runs the rows of `works`; logits [R, V] of the rows that sample."""
        self._count(works)
        self.times.enter(Phase.VERIFY)
        has_begun = self._pass_ahead.has_begun
        output = self._pass_ahead.take(works)
        if output is None:
            output, has_begun = self._run_rows(self._step_of(works)), False
        if not has_begun:
            self._practice.begin(time.monotonic())
        for store in self._stores.values():
            store.capture(output)
        return output

    def _step_of(self, works: Sequence[Work]) -> StepRows:
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        followed: list[tuple[int, int]] = []
        sequences = []
        for work in works:
            count = len(work.tokens)
            if work.follows is not None:
                followed.append((len(token_ids), work.follows))
            token_ids += work.tokens
            positions += range(work.start, work.start + count)
            rows += range(len(token_ids) - work.num_logit_rows, len(token_ids))
            sequences.append(SequenceRows(work.request.blocks, work.start, count))
        ids, places, logit_rows = (np.array(values, np.int64) for values in (token_ids, positions, rows))
        return StepRows(ids, places, sequences, logit_rows, self._drawn_tokens(followed))

    def _drawn_tokens(self, followed: Sequence[tuple[int, int]]) -> DrawnTokens | None:
        """Those of (row, place in the draw that is in flight)."""
        if not followed:
            return None
        assert self._flight is not None
        assert self._flight.pending is not None
        assert self._flight.pending.first_tokens is not None
        rows, places = np.array(followed, np.int64).T
        return DrawnTokens(rows, places, self._flight.pending.first_tokens)

    def _count(self, works: Sequence[Work]) -> None:
        verified = [len(work.tokens) for work in works if work.is_decoding]
        prompt_rows = sum(len(work.tokens) for work in works) - sum(verified)
        self.times.count_step(prompt_rows=prompt_rows, verify_steps=len(verified), verify_rows=sum(verified))

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
        features = sum(store.num_bytes for store in list(self._stores.values()))
        return measure_memory(self._cache, self._target.device, features=features)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the cache blocks in use, [0, 1]."""
        return self._blocks.usage
