"""Launches steps: the target's forward pass over their rows, the draw behind it, and features for the drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from draftwire.devices import make_current, record_event
from draftwire.kv_cache import SequenceRows
from verifier_service.core.batch import ForwardInput, ForwardOutput, FutureTokens, ScheduledRows
from verifier_service.draft_session import DraftSession
from verifier_service.drafting import Drafting
from verifier_service.features import FeatureStores
from verifier_service.features_ahead import FeaturesAhead
from verifier_service.flight import Flight
from verifier_service.pass_ahead import PassAhead
from verifier_service.sampler import TokenSampler
from verifier_service.step_times import Phase, StepMarks, StepTimes


class StepLauncher:
    """Used by the engine's thread alone.

    Behind its draw a step puts its features where they are sent from. What else drafting sends is copied on a stream of
    its own, so that nothing is sent a step late; it touches rows of landed steps alone, and each launch waits for what
    of it is not done. Kernels do not belong there, though draft logits have some: a GPU on which those of a second
    stream have run takes longer from each kernel to the next from then on (docs/performance.md, "A pass takes longer
    where a second stream has kernels").
    """

    def __init__(
        self,
        device: torch.device,
        run_rows: Callable[[ForwardInput], ForwardOutput],
        sampler: TokenSampler,
        stores: FeatureStores,
        drafting: Drafting,
        pass_ahead: PassAhead,
        times: StepTimes,
    ) -> None:
        """`run_rows` runs the target."""
        self._device = device
        self._run_rows = run_rows
        self._sampler = sampler
        self._stores = stores
        self._drafting = drafting
        self._pass_ahead = pass_ahead
        self._times = times
        # The streams of a GPU: that of the steps, and the thread's own, which drafting uses beside them.
        self._steps = torch.cuda.default_stream(device) if device.type == "cuda" else None
        self._beside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def make_current(self) -> None:
        """Has the calling thread use the device, and the stream beside the steps."""
        make_current(self._device)
        if self._beside is not None:
            torch.cuda.set_stream(self._beside)

    def on_steps(self) -> AbstractContextManager[object]:
        """What is launched within belongs to the steps of a GPU."""
        return nullcontext() if self._steps is None else torch.cuda.stream(self._steps)

    def launch(self, works: Sequence[ScheduledRows], running: Flight | None) -> Flight:
        """Launches the step of `works`, behind the one that runs."""
        # Mostly nothing is left, and a wait would be two more calls of the driver in each step.
        if self._steps is not None and self._beside is not None and not self._beside.query():
            self._steps.wait_stream(self._beside)
        output = self._forward(works, running)
        computed = record_event(self._device)
        sampling = [work for work in works if work.samples]
        self._times.enter(Phase.SAMPLE)
        pending = self._sampler.launch(sampling, output.logits) if sampling else None
        drawn = record_event(self._device) if pending is None else pending.copied
        self._times.enter(Phase.HOST)
        for work in works:
            if work.is_decoding and work.num_drafts == 0 and work.follows is None and work.cause is None:
                work.cause = self._drafting.fallback_cause(work.request)  # answers may come while it is in flight
            work.request.num_in_flight += 1
        marks = None
        if output.began is not None and computed is not None and drawn is not None:
            marks = StepMarks(output.began, computed, drawn)
        ahead: dict[DraftSession, FeaturesAhead] = {}
        if pending is not None and pending.drawn is not None:
            ahead = self._drafting.begin_features(sampling, pending.drawn, self._stores.by_kind)
        num_rows, is_beside = len(output.slots_on_host), running is not None
        verified = self._drafting.count_by_drafter(works)
        self._drafting.gate.note_launch()
        return Flight(works, sampling, pending, marks, num_rows, ahead, is_beside=is_beside, verified=verified)

    def _forward(self, works: Sequence[ScheduledRows], running: Flight | None) -> ForwardOutput:
        """Runs the rows of `works`; logits [R, V] of the rows that sample."""
        self._count(works)
        self._times.enter(Phase.VERIFY)
        output = self._pass_ahead.take(works)
        if output is None:
            output = self._run_rows(_rows_of(works, running))
        self._stores.capture(output, (work.request for work in works))
        return output

    def _count(self, works: Sequence[ScheduledRows]) -> None:
        verified = [len(work.tokens) for work in works if work.is_decoding]
        prompt_rows = sum(len(work.tokens) for work in works) - sum(verified)
        self._times.count_step(prompt_rows=prompt_rows, verify_steps=len(verified), verify_rows=sum(verified))


def _rows_of(works: Sequence[ScheduledRows], running: Flight | None) -> ForwardInput:
    """The rows of a step; those whose tokens are still drawn follow the step that runs."""
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
    return ForwardInput(ids, places, sequences, logit_rows, _drawn_tokens(followed, running))


def _drawn_tokens(followed: Sequence[tuple[int, int]], running: Flight | None) -> FutureTokens | None:
    """Those of (row, place in the draw of the step that runs)."""
    if not followed:
        return None
    assert running is not None
    assert running.pending is not None
    assert running.pending.first_tokens is not None
    rows, places = np.array(followed, np.int64).T
    return FutureTokens(rows, places, running.pending.first_tokens)
