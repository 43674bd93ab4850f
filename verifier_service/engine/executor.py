"""Executes steps on the device: the target's forward pass, sampling, and features for the drafters."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from draftwire.model.devices import check_context, make_current, record_event
from draftwire.model.kv_cache import SequenceRows
from draftwire.server.memory import measure_memory
from draftwire.v1 import draft_pb2
from verifier_service.core.batch import ForwardInput, ForwardOutput, FutureTokens, ScheduledRows
from verifier_service.core.request import Request
from verifier_service.core.step_times import Phase, StepMarks, StepTimes
from verifier_service.drafters.drafting import Drafting
from verifier_service.drafters.features import FeatureKind, FeatureStore, FeatureStores
from verifier_service.drafters.stream import Answered, Stream
from verifier_service.engine.prelaunch import Prelaunch
from verifier_service.engine.step import Stage, Step
from verifier_service.grammar.matcher import MaskedRows, MaskFiller, RowMasks
from verifier_service.sampling.logprobs import PromptLogprobs, logit_places
from verifier_service.sampling.sampler import TokenSampler
from verifier_service.target.runner import TargetRunner

RunForward = Callable[[ForwardInput], ForwardOutput]


class Executor:
    """Executes steps. Used only by the engine's thread.

    A launch costs a millisecond on the host. So `prelaunch` launches the forward pass of a step before its drafts
    arrive, and the pass starts when the host sees a drafter's answer, or early drafts in shared memory.

    After sampling, a step writes its features to the memory for sending. Other features are copied on a
    second stream, so that they are not sent a step late. The second stream reads only rows of committed steps, and each
    launch waits for its unfinished copies. The second stream should run no kernels, although draft logits need some:
    after kernels on a second stream a GPU takes longer between all kernels (docs/decisions/007-second-stream.md).
    """

    def __init__(
        self,
        runner: TargetRunner,
        run_forward: RunForward,
        vocab_size: int,
        sampler: TokenSampler,
        stores: FeatureStores,
        drafting: Drafting,
        times: StepTimes,
    ) -> None:
        """`run_forward` runs the forward pass of `runner`, or of all ranks of a split target."""
        self._device = runner.device
        self._cache = runner.cache
        self._run_forward = run_forward
        self._prelaunch = Prelaunch(runner, vocab_size, drafting.budget)
        self._sampler = sampler
        self._stores = stores
        self._drafting = drafting
        self._times = times
        self._mask_filler = MaskFiller(self._device)
        # Streams of a GPU: one for the steps, and the thread's current stream for copies to and from drafters.
        is_gpu = self._device.type == "cuda"
        self._steps = torch.cuda.default_stream(self._device) if is_gpu else None
        self._beside = torch.cuda.Stream(self._device, priority=-1) if is_gpu else None

    def make_current(self) -> None:
        """Let the calling thread use the device and the second stream."""
        make_current(self._device)
        if self._beside is not None:
            torch.cuda.set_stream(self._beside)

    def _on_steps(self) -> AbstractContextManager[object]:
        """Return a context in which launches use the stream of the steps."""
        return nullcontext() if self._steps is None else torch.cuda.stream(self._steps)

    def execute(self, step: Step, in_flight: Step | None) -> Step:
        """Launch a planned step after the step in flight.

        Returns:
            The step that runs: the prelaunched step with the planned rows if its pass computes these rows, else `step`.
        """
        with self._on_steps():
            # Usually no copy is left; waiting would cost two driver calls in each step.
            if self._steps is not None and self._beside is not None and not self._beside.query():
                self._steps.wait_stream(self._beside)
            self._count(step.rows)
            self._times.enter(Phase.VERIFY)
            running = self._prelaunch.confirm(step.rows) or step
            try:
                if running is step:
                    step.forward = self._run_forward(_forward_input(step.rows, in_flight))
                    step.advance(Stage.RELEASED)
                # Checked now: masks of structured output make `_launch_sampling` wait for the step in flight.
                running.is_late = in_flight is not None and in_flight.marks is not None and in_flight.is_done
                self._launch_sampling(running, in_flight)
                running.is_beside = in_flight is not None
                running.verified = self._drafting.count_by_drafter(running.rows)
                running.advance(Stage.SAMPLED)
            except BaseException:
                running.abandon()
                raise
        return running

    def _launch_sampling(self, step: Step, in_flight: Step | None) -> None:
        forward = step.forward
        assert forward is not None
        self._stores.capture(forward, (row.request for row in step.rows))
        computed = record_event(self._device)
        sampling = [row for row in step.rows if row.samples]
        masks = self._masks(sampling, in_flight)
        self._times.enter(Phase.SAMPLE)
        step.prompt_logprobs = PromptLogprobs.launch(step.rows, forward.logits)
        if step.prompt_logprobs is not None:
            forward = forward.with_logits_of(np.array(logit_places(step.rows, of_prompts=False), np.int64))
        output = self._sampler.launch(sampling, forward.logits, masks) if sampling else None
        sampled = record_event(self._device) if output is None else output.copied
        self._times.enter(Phase.HOST)
        for row in step.rows:
            row.request.num_in_flight += 1
        # Now, because answers may arrive while the step is in flight.
        self._drafting.placement.note_causes([row for row in step.rows if row.follows is None])
        if forward.began is not None and computed is not None and sampled is not None:
            step.marks = StepMarks(forward.began, computed, sampled)
        if output is not None and output.packed is not None:
            step.announced = self._drafting.announce(sampling, output.packed, self._stores.by_kind)
        step.num_rows = len(forward.slots_on_host)
        step.sampler_output, step.forward = output, None

    def _masks(self, sampling: Sequence[ScheduledRows], in_flight: Step | None) -> RowMasks | None:
        """Return the masks of requests with structured output, filled while the device runs the forward pass.

        A row that follows a step in flight needs that step's token on the host. So the launch of the sampling waits for
        that step; meanwhile the forward pass of this step is already launched.
        """
        masked: list[MaskedRows] = []
        first = 0
        for row in sampling:
            request, grammar = row.request, row.request.grammar
            if grammar is not None:
                grammar.follow(request.tokens[len(request.prompt) + grammar.num_tokens :])
                if row.follows is not None:
                    assert in_flight is not None
                    self.wait(in_flight)
                    grammar.follow(_sampled_for(request, in_flight))
                masked.append(MaskedRows(grammar, first, [] if row.drafts is None else row.drafts.tokens))
            first += row.num_logit_rows
        if not masked:
            return None
        self._times.enter(Phase.HOST)
        return self._mask_filler.fill(masked)

    def _count(self, rows: Sequence[ScheduledRows]) -> None:
        verified = [len(row.tokens) for row in rows if row.is_decoding]
        prompt_rows = sum(len(row.tokens) for row in rows) - sum(verified)
        self._times.count_step(prompt_rows=prompt_rows, verify_steps=len(verified), verify_rows=sum(verified))

    def wait(self, step: Step) -> None:
        """Wait until the device has finished a step, and give its rows their sampled tokens."""
        self._times.enter(Phase.SAMPLE)
        if step.sampler_output is not None:
            output = step.sampler_output
            for row, sampled in zip(output.rows, self._sampler.finish(output), strict=True):
                row.sampled = sampled
            step.sampler_output = None
        elif step.marks is not None:
            step.marks.drawn.synchronize()
        if step.prompt_logprobs is not None:
            step.prompt_logprobs.finish()
            step.prompt_logprobs = None

    # Steps whose drafts are awaited.

    def prelaunch(self, step: Step) -> None:
        """Launch the forward pass of a planned step, if the device can, to start as soon as its drafts arrive."""
        self._times.enter(Phase.WAIT)
        with self._on_steps():
            self._prelaunch.launch(step)
        self._prelaunch.expect(self._drafting.wait_policy.awaited_answer())
        if self.sees_drafts:
            self.take_early_drafts()

    @property
    def prelaunched(self) -> Step | None:
        """Return the prelaunched step that is neither executed nor abandoned, or None."""
        return self._prelaunch.pending

    @property
    def computes_prelaunched(self) -> bool:
        """Return whether the device runs the prelaunched pass with early drafts, before the drafter's answer."""
        return self._prelaunch.is_released

    @property
    def deadline(self) -> float | None:
        """Return the monotonic time at which the prelaunched step must be abandoned; None without one."""
        return self._prelaunch.deadline

    def abandon_prelaunched(self) -> None:
        """Abandon the prelaunched step, if any."""
        self._prelaunch.abandon()

    def abandon_expired(self, running: Collection[Request]) -> None:
        """Abandon the prelaunched step if its deadline has passed or no requests are running."""
        deadline = self._prelaunch.deadline
        if deadline is not None and (time.monotonic() >= deadline or not running):
            self._prelaunch.abandon()

    @property
    def sees_drafts(self) -> bool:
        """Return whether early drafts for the prelaunched step have arrived."""
        return self._prelaunch.has_early_drafts

    def take_early_drafts(self) -> bool:
        """Release the prelaunched step with the early drafts; return False if they are invalid."""
        drafts = self._prelaunch.read_early_drafts()
        if drafts is None:
            return False
        self._prelaunch.release(drafts)
        self._times.see_drafts()
        return True

    def take_answer(self, answer: Answered) -> bool:
        """Release the prelaunched step if it waits for this unchecked answer; return whether it was released."""
        drafts = self._prelaunch.read_answer(answer)
        if drafts is None:
            return False
        self._times.enter(Phase.VERIFY)
        try:
            self._prelaunch.release(drafts)
        finally:
            self._times.enter(Phase.HOST)
        return True

    def start_if_complete(self) -> None:
        """Release the prelaunched step if its requests wait for no more drafts."""
        if self._prelaunch.has_all_drafts(self._drafting.wait_policy.is_waiting):
            self._times.enter(Phase.VERIFY)
            try:
                self._prelaunch.release_with_known_drafts()
            finally:
                self._times.enter(Phase.HOST)

    # Features and memory.

    def need_features(self, stream: Stream) -> bool:
        """Allocate the feature store of a new stream. Without memory, end the stream and return False."""
        try:
            with self._on_steps():  # the steps write the store
                self._stores.need(stream.head.kind, stream.head.fusion)
        except (RuntimeError, MemoryError) as error:
            check_context(self._device)
            layers = list(stream.head.layers)
            stream.fail(f"there is no memory for the features of its layers {layers}: {error}")
            return False
        return True

    def keep_features(self, used: Collection[FeatureKind]) -> None:
        """Free the features that no drafter needs."""
        self._stores.keep(used)

    @property
    def features(self) -> dict[FeatureKind, FeatureStore]:
        """Return the features of committed steps by kind."""
        return self._stores.by_kind

    def copying(self, in_flight: Step | None) -> AbstractContextManager[object]:
        """Return a context in which features are copied on the second stream, or on the stream of the steps if the
        device is idle."""
        return self._on_steps() if in_flight is None and self.prelaunched is None else nullcontext()

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended or was preempted."""
        self._sampler.forget(request)

    @property
    def memory(self) -> draft_pb2.MemoryUse:
        """Return the process' memory; thread-safe."""
        return measure_memory(self._cache, self._device, features=self._stores.num_bytes)


def _sampled_for(request: Request, step: Step) -> list[int]:
    """Return the tokens that a finished step has sampled for a request."""
    return [token for row in step.rows if row.request is request and row.sampled for token in row.sampled.tokens]


def _forward_input(rows: Sequence[ScheduledRows], in_flight: Step | None) -> ForwardInput:
    """Return the input of a step's forward pass; the step in flight may still sample some of its token ids."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    followed: list[tuple[int, int]] = []
    sequences = []
    for row in rows:
        count = len(row.tokens)
        if row.follows is not None:
            followed.append((len(token_ids), row.follows))
        token_ids += row.tokens
        positions += range(row.start, row.start + count)
        num_logit_rows = row.num_prompt_logit_rows + row.num_logit_rows
        logit_rows += range(len(token_ids) - num_logit_rows, len(token_ids))
        sequences.append(SequenceRows(row.request.blocks, row.start, count))
    ids, places, with_logits = (np.array(values, np.int64) for values in (token_ids, positions, logit_rows))
    return ForwardInput(ids, places, sequences, with_logits, _future_tokens(followed, in_flight))


def _future_tokens(followed: Sequence[tuple[int, int]], in_flight: Step | None) -> FutureTokens | None:
    """Return the future token ids of pairs (row, index in the sample of the step in flight)."""
    if not followed:
        return None
    assert in_flight is not None
    assert in_flight.sampler_output is not None
    assert in_flight.sampler_output.first_tokens is not None
    rows, places = np.array(followed, np.int64).T
    return FutureTokens(rows, places, in_flight.sampler_output.first_tokens)
