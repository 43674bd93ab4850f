"""The draft engine: one continuous batch over all sequences of all sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from drafter_service.draft_loop.graphs import LoopGraphs, Track, make_graphs
from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.loop import DraftLoop
from drafter_service.draft_loop.prefill import RowFeed
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.answer import Answer, Load
from drafter_service.engine.early_drafts import EarlyDrafts, chosen
from drafter_service.engine.proposer import DraftRows, Proposal, Proposer
from drafter_service.engine.scheduler import Batch, Scheduler
from drafter_service.engine.sequence_table import SequenceTable
from drafter_service.engine.session import Session
from drafter_service.engine.step import AnnouncedStep, OpenedSequence, Step
from drafter_service.engine.step_work import StepRows, StepWork
from drafter_service.heads.spec import Head
from drafter_service.limits import EngineLimits
from drafter_service.options import DEFAULT_SPECULATIVE_TOKENS
from draftwire.model.block_pool import BlockPool
from draftwire.model.devices import upload
from draftwire.model.kv_cache import BLOCK_SIZE, SequenceRows, allocate_cache
from draftwire.server.memory import measure_memory
from draftwire.transport import Incoming
from draftwire.v1 import draft_pb2 as pb

_WAITING_STEPS = attrgetter("waiting_steps")


def _nothing(*_: object) -> None: ...


class DraftEngine:
    """Owns the sequences of every session, their blocks and the cache. Not thread-safe: one thread calls it.

    Attributes:
        early: Drafts that are computed before their step is committed.
    """

    def __init__(
        self,
        head: Head,
        limits: EngineLimits,
        dtype: torch.dtype,
        device: torch.device,
        make_graphs: Callable[[DraftLoop, LogitsBuffers, int], LoopGraphs | None] = make_graphs,
        make_row_feed: Callable[..., RowFeed] = RowFeed,
    ) -> None:
        """`make_graphs` creates the graphs of draft steps, or None; `make_row_feed` creates the object that computes
        rows without drafts."""
        self.head = head
        self.limits = limits = limits.fit(head.spec.max_drafts)
        self.device = device
        self._dtype = dtype
        self._sessions: list[Session] = []
        num_blocks = limits.kv_cache_tokens // BLOCK_SIZE + 1  # block 0 is padding
        self._pool = BlockPool(num_blocks)
        self._table = SequenceTable(limits, self._pool, head.spec.block_rows)
        self._scheduler = Scheduler(limits, self._table)
        self._cache = allocate_cache(head.spec.layer_shapes, num_blocks, dtype, device)
        self._buffers = LogitsBuffers(limits.max_num_seqs, head.spec.draft_vocab_size, device)
        self._loop = DraftLoop(head, self._cache, self._buffers, limits, dtype, device)
        self.graphs = make_graphs(self._loop, self._buffers, limits.max_num_seqs)
        self._row_feed = make_row_feed(head, self._cache, limits, dtype, device)
        self._proposer = Proposer(self._loop, self.graphs, self._table, self._buffers)
        self.early = EarlyDrafts(head, self._loop, self._table, self._proposer)

    @property
    def load(self) -> Load:
        """Return the engine's load; thread-safe."""
        return Load(len(self._sessions), self._table.num_open, self._pool.usage)

    @property
    def waiting_rows(self) -> int:
        """Rows of waiting steps; thread-safe."""
        return sum(session.waiting_rows for session in list(self._sessions))

    @property
    def num_evictions(self) -> int:
        """Sequences evicted for another session so far; thread-safe."""
        return self._scheduler.num_evictions

    @property
    def memory(self) -> pb.MemoryUse:
        """Return the process' memory; thread-safe."""
        return measure_memory(self._cache, self.device, draft_logits=self.logits_bytes)

    @property
    def logits_bytes(self) -> int:
        """Memory of the draft logits' buffers, bytes."""
        return self._buffers.num_bytes

    @property
    def has_work(self) -> bool:
        """Return whether a step waits."""
        return any(map(_WAITING_STEPS, self._sessions))

    def open_session(self, terms: SessionTerms, deliver: Callable[[Answer | Exception], None]) -> Session:
        """Add a session; `deliver` gets the answer to each of its steps.

        Raises:
            torch.OutOfMemoryError: If there is no memory for the session's draft logits or graphs.
        """
        self.early.settle()  # capturing clears the inputs
        self._keep_buffers(terms)
        if self.graphs is not None:
            try:
                self.graphs.capture(terms.mode, terms.num_speculative_tokens)
            except Exception:
                self._keep_buffers()
                raise
        session = Session(terms, deliver)
        self._sessions.append(session)
        return session

    def close_session(self, session: Session) -> None:
        """Drop a session with its sequences; nothing is delivered to the session any more."""
        if session not in self._sessions:
            return
        self.early.forget(session)
        for sequence_id in list(session.slots):
            self._scheduler.drop(session, sequence_id)
        session.waiting_steps.clear()
        self._sessions.remove(session)
        self._keep_buffers()

    def drain(self) -> None:
        """Open no further sequences; open sequences continue."""
        self._scheduler.takes_sequences = False

    def fail(self, error: Exception) -> None:
        """End every session with `error`."""
        self._scheduler.end_batch()
        for session in list(self._sessions):
            self.close_session(session)
            session.deliver(error)

    def submit(self, session: Session, step: Step) -> None:
        """Queue a step, already checked against the session's terms."""
        if session in self._sessions:
            self.early.note(session, step)
            work = StepWork(step)
            session.waiting_steps.append(work)
            session.waiting_rows += len(work.tokens)

    def announce(self, session: Session, step: AnnouncedStep) -> None:
        """Take a session's announced step, already checked against the session's terms."""
        if session in self._sessions:
            self.early.announce(session, step)

    def poll_early(self) -> bool:
        """Return whether early drafts can begin: no step waits, and an announced step's tokens have been written.

        Otherwise prepare the step.
        """
        return not self.has_work and self.early.poll()

    @torch.inference_mode()
    def warm_up(self, track: Track = iter) -> None:
        """Capture greedy steps, compile the kernels of prompts, and draft once from zeros, so that no verifier has to
        wait.

        `track` wraps the shapes to capture, and shows the progress.
        """
        k = min(DEFAULT_SPECULATIVE_TOKENS, self.limits.max_num_speculative_tokens)
        if self.graphs is not None:
            self.graphs.capture(SamplingMode(), k, track)
        self._row_feed.warm_up()
        session = self.open_session(SessionTerms("warm-up", SamplingMode(), k, 1), lambda _: None)
        one = np.ones(1, np.int64)
        num_rows = k + 2  # the last row drafts, the rows before it do not
        step = Step(
            step_id=1,
            opened=[OpenedSequence(1, temperature=1.0, proposal_key=0, first_row=0)],
            closed_ids=[],
            sequence_ids=[1],
            first_rows=0 * one,
            num_rows=num_rows * one,
            num_drafts=k * one,
            tokens=np.zeros(num_rows, np.int32),
            features=Incoming(torch.zeros(num_rows, self.head.spec.feature_width, dtype=self._dtype), self.device),
        )
        self.submit(session, step)
        self.iterate()
        self.close_session(session)

    def iterate(self, meanwhile: Callable[[], None] = _nothing) -> None:
        """Compute one batch of waiting rows, draft for sequences whose rows are complete, and answer finished steps.

        Drafts and the rows that they need come first, because no request waits for other rows. `meanwhile` is called
        while the device computes.

        Call in torch's inference mode, which takes too long to enter for each batch.
        """
        began = time.monotonic()
        batch = self._scheduler.next_batch(self._sessions)
        needed, drafting, later = _plan(batch)
        self._feed(needed)
        for mode, parts in drafting.items():
            self._draft(mode, parts, began, meanwhile)
        if not drafting:
            meanwhile()
        _add_time({rows.work for _, rows in batch.rows}, began)
        waiting = {rows.work for rows in later}
        unanswered = self._deliver(batch.finished, waiting)
        if later:
            began = time.monotonic()
            self._feed(later)
            _add_time(waiting, began)
            self._deliver(unanswered, set())
        self._scheduler.end_batch()

    def _deliver(
        self, finished: list[tuple[Session, StepWork]], waiting: set[StepWork]
    ) -> list[tuple[Session, StepWork]]:
        """Answer steps, in each session's order, up to the first step that must wait, and return the other steps."""
        held: set[Session] = set()
        left = []
        for session, work in finished:
            if work in waiting:
                held.add(session)
            if session in held:
                left.append((session, work))
            else:
                work.drop_features()
                work.answer.load = self.load
                session.deliver(work.answer)
        return left

    def _keep_buffers(self, *new: SessionTerms) -> None:
        self._buffers.keep([*new, *(session.terms for session in self._sessions)])
        if self.graphs is not None:
            self.graphs.drop_stale()

    def _feed(self, parts: list[StepRows]) -> None:
        """Compute rows without drafts after them; a sequence's rows in the order of its steps."""
        table = self._table
        for own in _each_sequence_once(parts):
            states = self._row_feed.states(sum(part.num_rows for part in own))
            tokens = self._load(own, partial(_rows_of, states))
            _finish_features(own)  # now: the answer waits for no other work of the device
            slots, first_rows, counts = (_joined(own, name) for name in ("slots", "first_rows", "counts"))
            positions = np.repeat(first_rows - (np.cumsum(counts) - counts), counts) + np.arange(len(tokens))
            places = first_rows - table.first_row[slots]
            rows = [
                SequenceRows(table.blocks_of(slot), place, count)
                for slot, place, count in zip(slots.tolist(), places.tolist(), counts.tolist(), strict=True)
            ]
            self._row_feed.run(tokens.astype(np.int64), positions, states, rows)
            self._loop.keep_blocks(*upload((slots, table.blocks[slots]), self.device))

    def _draft(self, mode: SamplingMode, parts: list[StepRows], began: float, meanwhile: Callable[[], None]) -> None:
        """Draft after the last rows of sequences of one mode, and add the drafts to their steps' answers."""
        found = self.early.claim(parts)
        if found is not None:
            part, batch, places = found
            part.work.pass_over(part)
            part.work.answer.compute_time_s += batch.seconds_before(began)
            num_drafts = self._table.reserve_drafts(part.slots, part.num_drafts)
            self._prepare_answers([part], part.slots, num_drafts, meanwhile)
            add_drafts(part, chosen(self.early.proposal(batch), places, num_drafts))
            parts = [other for other in parts if other is not part]
        if not parts:
            return
        self.early.settle()
        tokens = self._load(parts, self._loop.state_rows)
        slots, first_rows, counts = (_joined(parts, name) for name in ("slots", "first_rows", "counts"))
        num_drafts = self._table.reserve_drafts(slots, _joined(parts, "num_drafts"))
        launched = self._proposer.launch(mode, DraftRows(slots, first_rows, counts, num_drafts, tokens))
        self._prepare_answers(parts, slots, num_drafts, meanwhile)
        proposal = self._proposer.finish(launched)
        begin = 0
        for part in parts:
            end = begin + len(part.counts)
            add_drafts(part, proposal.select(slice(begin, end)))
            begin = end

    def _prepare_answers(
        self, parts: list[StepRows], slots: np.ndarray, num_drafts: np.ndarray, meanwhile: Callable[[], None]
    ) -> None:
        """Do host work while the device drafts."""
        _finish_features(parts)
        for part in parts:
            part.announce()
        self._table.reserve_next_step(slots, num_drafts)
        meanwhile()

    def _load(self, parts: list[StepRows], states: Callable[[int, int], torch.Tensor]) -> np.ndarray:
        """Return the tokens int32 [T] of rows, and write their states g to the rows that `states(begin, end)` gives."""
        tokens, begin = [], 0
        for part in parts:
            given_tokens, given = part.work.read(part)
            tokens.append(given_tokens)
            if not part.work.step.is_fused:
                given = self.head.fuse(given.to(self.device, non_blocking=True))
            states(begin, begin + part.num_rows).copy_(given, non_blocking=True)
            begin += part.num_rows
        return tokens[0] if len(parts) == 1 else np.concatenate(tokens)


def _plan(batch: Batch) -> tuple[list[StepRows], dict[SamplingMode, list[StepRows]], list[StepRows]]:
    """Return (rows that drafts need, rows that draft by mode, rows that no drafts wait for).

    At most k + 1 rows of a sequence, as in a verify step, draft; earlier rows do not.
    """
    needed: list[StepRows] = []
    leads: list[StepRows] = []  # rows of their sequences' newest steps
    drafting: dict[SamplingMode, list[StepRows]] = {}
    idle: list[StepRows] = []
    for session, rows in batch.rows:
        most, mode = session.terms.num_speculative_tokens + 1, session.terms.mode
        # Lists: Python finds the largest of a few numbers faster than NumPy.
        if min(rows.num_drafts.tolist()) > 0 and max(rows.counts.tolist()) <= most:  # the usual step
            drafting.setdefault(mode, []).append(rows)
            continue
        wants_drafts = rows.num_drafts > 0
        idle.append(rows.select(~wants_drafts))
        if wants_drafts.any():
            lead, tail = rows.select(wants_drafts).split(most)
            leads.append(lead)
            drafting.setdefault(mode, []).append(tail)
    later = []
    if idle:
        slots = [part.slots for parts in drafting.values() for part in parts] or [idle[0].slots[:0]]
        for rows in idle:
            is_needed = np.isin(rows.slots, np.concatenate(slots))
            needed.append(rows.select(is_needed))
            later.append(rows.select(~is_needed))
    return _filled(needed + leads), drafting, _filled(later)


def _each_sequence_once(parts: list[StepRows]) -> Iterator[list[StepRows]]:
    """Yield the parts of each forward pass; two parts of one sequence are in different passes."""
    own: list[StepRows] = []
    seen: set[int] = set()
    for part in parts:
        slots = part.slots.tolist()
        if not seen.isdisjoint(slots):
            yield own
            own, seen = [], set()
        own.append(part)
        seen.update(slots)
    if own:
        yield own


def _rows_of(states: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return states[begin:end]


def _finish_features(parts: list[StepRows]) -> None:
    for part in parts:
        part.work.finish_features()


def _filled(parts: list[StepRows]) -> list[StepRows]:
    return [part for part in parts if len(part.counts)]


def _add_time(works: set[StepWork], began: float) -> None:
    elapsed = time.monotonic() - began
    for work in works:
        work.answer.compute_time_s += elapsed


def _joined(parts: list[StepRows], name: str) -> np.ndarray:
    """Return one column of the entries of all parts."""
    column: np.ndarray = getattr(parts[0], name)
    return column if len(parts) == 1 else np.concatenate([getattr(part, name) for part in parts])


def add_drafts(part: StepRows, proposal: Proposal) -> None:
    """Answer the sequences of a step with their drafts."""
    tokens, is_draft, logits, confidences = proposal
    part.work.answer.add_drafts(is_draft.sum(1), tokens[is_draft])
    if confidences is not None:
        part.work.answer.confidences.append(confidences[is_draft])
    if logits:
        pieces = [buffer[:, : tokens.shape[1]].flatten(0, 1) for buffer in logits]
        if not is_draft.all():
            (chosen,) = upload([np.flatnonzero(is_draft)], pieces[0].device)
            pieces = [piece.index_select(0, chosen) for piece in pieces]
        part.work.answer.logits.append(pieces[0])
        part.work.answer.logits_token_ids += pieces[1:]
