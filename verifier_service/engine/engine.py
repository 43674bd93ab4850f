"""The verifier's engine: one thread that plans, executes and commits steps, and sends them to the drafters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draftwire.contract.errors import DraftwireError, ServerError, UnavailableError
from draftwire.model.devices import awake_s
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.core.request import Request
from verifier_service.core.step_times import StepTimes
from verifier_service.drafters.drafting import Drafting
from verifier_service.drafters.features import FeatureStores
from verifier_service.drafters.stream import LinkEvent
from verifier_service.engine.executor import Executor
from verifier_service.engine.inbox import Inbox
from verifier_service.engine.outputs import Deliver, RequestOutputs
from verifier_service.engine.planner import Planner
from verifier_service.engine.prefix_cache import PrefixCache
from verifier_service.engine.request_metrics import RequestMetrics
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.step import Stage, Step, StepObserver
from verifier_service.pacing import Profile
from verifier_service.sampling.sampler import TokenSampler
from verifier_service.target.runner import start_runner
from verifier_service.target.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine."""

    max_num_seqs: int
    max_queue: int
    max_prefill_rows: int  # rows of prompts in one step
    num_blocks: int
    draft_deadline_s: float | None  # None waits until a drafter answers or is lost
    adaptive_k: bool | None = None  # whether fewer drafts are requested where that is faster; see `Drafting`
    prefix_caching: bool = True
    async_scheduling: bool = False  # whether a step is executed before the previous step is committed

    @property
    def max_open(self) -> int:
        """Return the most open requests: running, waiting, or with unread output. A whole batch may end at once, and
        its output may be unread when the next batch runs.
        """
        return 2 * self.max_num_seqs + self.max_queue


class Workers(Protocol):
    """The other processes of a split target."""

    def lead(self, run: Callable[[ForwardInput], ForwardOutput]) -> Callable[[ForwardInput], ForwardOutput]:
        """Return a function that runs a step on all ranks; `run` runs it on this rank."""


class Engine:
    """Continuous batching with verification of drafts.

    One iteration of the loop plans a step, executes it, commits the previous step and sends rows to the drafters. All
    state belongs to the engine's thread; other threads use `submit`, `cancel` and `post`.

    With `async_scheduling` a step is launched before the host has the previous step's tokens; see `Planner`. Rows
    after a request's end are then computed without use. If all requests wait for drafts, the executor may launch their
    forward pass, which starts when the drafts arrive.
    """

    def __init__(
        self,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        limits: EngineLimits,
        deliver: Deliver,
        on_failure: Callable[[], None],
        workers: Workers | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        """The engine's thread calls `deliver` with a step's output, `on_failure` after a fatal failure and the
        requests' errors, and `observer` with each step at each stage; none may block. `workers` are the other ranks of
        a split target.
        """
        runner = start_runner(
            target, limits.num_blocks, limits.max_num_seqs, config.num_speculative_tokens, limits.max_prefill_rows
        )
        run_forward = runner.run if workers is None else workers.lead(runner.run)
        sampler = TokenSampler(config, target.vocab_size, target.eos_token_ids, limits.max_num_seqs, target.device)
        if target.device.type == "cuda":
            began = time.monotonic()
            sampler.warm_up(target.dtype)
            logger.info("sampling kernels in %.1f s", time.monotonic() - began)
        stores = FeatureStores(target, limits.num_blocks)
        self.scheduler = Scheduler(
            PrefixCache(limits.num_blocks, is_enabled=limits.prefix_caching),
            limits.max_num_seqs,
            limits.max_queue,
            limits.max_prefill_rows,
            limits.max_num_seqs * (config.num_speculative_tokens + 1),
            self._release,
            stores.is_usable,
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
        self._planner = Planner(self.scheduler, self.drafting, observer, is_async=limits.async_scheduling)
        self._executor = Executor(runner, run_forward, target.vocab_size, sampler, stores, self.drafting, self.times)
        is_synthetic = config.rejection_sample_method == config_pb2.REJECTION_SAMPLE_METHOD_SYNTHETIC
        self._outputs = RequestOutputs(
            *(self.scheduler, self.drafting, self.metrics, deliver, self._release, target.device),
            is_synthetic=is_synthetic,
        )
        self._inbox = Inbox(
            *(self.scheduler, self.drafting, self._executor, self._outputs, self.metrics, self.times),
            awake_s(target.device),
        )
        self._in_flight: Step | None = None  # executed and not committed
        self._uncounted: Step | None = None  # the last committed step, until its time is counted
        self._thread = threading.Thread(target=self._run, args=(on_failure,), name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, reason: str = "the server is shutting down") -> None:
        """End the thread after the running step; remaining requests get UnavailableError with the reason."""
        self._inbox.stop(reason)
        self._thread.join()

    def submit(self, *requests: Request) -> None:
        """Submit requests, of which all or none are queued; each gets its output or an error."""
        self._inbox.submit(*requests)

    def cancel(self, request: Request, reason: str = "abort", output_tokens: int = 0) -> None:
        """End a request without further output; see `RequestOutputs.cancel`."""
        self._inbox.cancel(request, reason, output_tokens)

    def count_refused(self) -> None:
        """Count a request that was not submitted."""
        self._inbox.count_refused()

    def post(self, event: LinkEvent) -> None:
        """Post an event of a drafter's stream."""
        self._inbox.post(event)

    def flush_cache(self, on_done: Callable[[int], object]) -> None:
        """Forget the prefixes that no request uses; `on_done` gets the number of blocks that can still be found.

        `on_done` is called in the engine's thread and must not block. It is not called after the engine has ended.
        """
        self._inbox.call(lambda: on_done(self.scheduler.flush_cache()))

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """Call `deliver`, in the engine's thread, with the blocks of the prefix cache, and with every change."""
        self._inbox.call(lambda: self.scheduler.watch_cache(deliver))

    def _run(self, on_failure: Callable[[], None]) -> None:
        error: DraftwireError
        self._executor.make_current()
        try:
            self._loop()
            error = UnavailableError(self._inbox.stop_reason)
        except Exception as failure:
            logger.exception("the engine failed")
            error = ServerError(f"the engine failed: {failure}")
            on_failure()
        try:
            self._executor.abandon_prelaunched()
        except RuntimeError:
            logger.exception("the prelaunched step cannot be abandoned")
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._outputs.refuse(request, error)
        self._outputs.deliver()
        self._inbox.close(error)

    def _loop(self) -> None:
        """Plan, execute and commit steps, and send rows to the drafters, until the engine is stopped.

        With asynchronous scheduling a step is executed before the step in flight is committed.
        """
        has_progress = has_sent = False
        while self._receive(wait=not has_progress):
            committing, step = self._in_flight, None
            # If all requests wait for drafts and no event arrived, there is nothing to send or to plan.
            if committing is not None or not has_sent or self._inbox.has_received or not self._planner.all_wait:
                self._send_to_drafters()
                step = self._execute_next()
            has_sent = False
            if not self._planner.is_async:
                committing, step = step, None
            if committing is None and step is None:
                self._prelaunch()
            if committing is not None:
                self._count()
                self._outputs.deliver_behind(step)
                if step is None and self._planner.is_async and self._inbox.comes_before(committing):
                    continue
            self._in_flight = step
            if committing is not None:
                has_sent = self._commit(committing)
            has_progress = self._outputs.take_has_freed() or committing is not None or step is not None

    def _receive(self, *, wait: bool) -> bool:
        """Apply the events; return False if the engine must stop."""
        self.scheduler.deliver_cache_events()
        # If a prelaunched step waits for drafts, the last step is counted later, while the device computes.
        if wait and self._executor.prelaunched is None and not self._inbox.has_events():
            self._count()
        return self._inbox.receive(wait=wait)

    def _send_to_drafters(self, *, has_answers: bool = True) -> None:
        """Send new rows to the drafters. If all answers were taken (`has_answers` is false), also find slow and lost
        drafters."""
        try:
            if has_answers:
                self.drafting.placement.drop_lost()
            with self._executor.copying(self._in_flight):
                self.drafting.flush(self.scheduler.running, self._executor.features, watches=has_answers)
        except Exception as error:
            self._outputs.fail_step(self.scheduler.running, error)

    def _execute_next(self) -> Step | None:
        """Plan the next step and execute it; None if there is none."""
        step: Step | None = None
        try:
            self._executor.abandon_expired(self.scheduler.running)
            step = self._planner.plan(self._in_flight, self._executor.prelaunched)
            return None if step is None else self._executor.execute(step, self._in_flight)
        except Exception as error:
            failed = self.scheduler.running if step is None else [row.request for row in step.rows]
            self._outputs.fail_step(failed, error)
            return None

    def _prelaunch(self) -> None:
        """Let the executor prelaunch the awaited step, if all requests wait for drafts."""
        try:
            if self._executor.prelaunched is None and (step := self._planner.plan_awaited()) is not None:
                self._executor.prelaunch(step)
        except Exception as error:
            self._outputs.fail_step(self.scheduler.running, error)

    def _commit(self, step: Step) -> bool:
        """Wait for a step, commit its tokens and send them to the drafters; return whether the step succeeded."""
        self.drafting.commit(step.announced)
        try:
            self._executor.wait(step)
            self.times.finish_step()
            step.committed_at = time.monotonic()
            step.is_delayed = self._in_flight is not None and self._in_flight.has_prompts
            self._uncounted = step
            if step.marks is None:  # else the marks give the phases
                self._count_step()
            self._outputs.commit(step)
            step.advance(Stage.COMMITTED)
        except Exception as error:
            step.abandon()
            self._outputs.fail_step([row.request for row in step.rows], error)
            return False
        self._send_to_drafters(has_answers=False)  # first, because the drafters wait for the tokens
        return True

    def _count(self) -> None:
        """Count the last step and its verified drafts, after the rows were sent to the drafters."""
        self._count_step()
        self._outputs.count()

    def _count_step(self) -> None:
        """Count the cost of the last step."""
        step, self._uncounted = self._uncounted, None
        if step is not None:
            step_s, host_s = self.times.end_step(step.marks)
            self.drafting.count_step(
                has_prompts=step.has_prompts or step.is_delayed,
                step_s=step_s,
                host_s=host_s,
                verified=step.verified,
                num_rows=step.num_rows,
                num_prompt_rows=step.num_prompt_rows,
                num_waiting=self.scheduler.num_admissible,
                landed=step.committed_at,
                is_beside=step.is_beside if self._planner.is_async and step.marks is not None else None,
            )

    def _release(self, request: Request) -> None:
        """Drop a request's state except its tokens. A preempted request is opened at a drafter again when it runs."""
        self.drafting.release(request)
        self._executor.forget(request)

    def counters(self) -> generate_pb2.EngineCounters:
        """Return the engine's counters; thread-safe."""
        counters = self.times.read()
        counters.preemptions = self.scheduler.num_preemptions
        counters.prefix_hit_rows = self.scheduler.num_reused_rows
        counters.fallbacks.extend(self.metrics.fallbacks())
        counters.accepted_drafts = self.metrics.num_accepted
        counters.prefix_cache_queries = self.scheduler.prefix_cache_queries
        counters.prefix_cache_hits = self.scheduler.prefix_cache_hits
        return counters

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the cache blocks in use, [0, 1]."""
        return self.scheduler.kv_cache_usage

    @property
    def memory(self) -> draft_pb2.MemoryUse:
        """Return the process' memory; thread-safe."""
        return self._executor.memory
