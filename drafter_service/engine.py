"""The draft engine: one continuous batch over all sequences of all sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from drafter_service.answer import Answer, Load
from drafter_service.heads.spec import Head
from drafter_service.limits import EngineLimits
from drafter_service.logits_buffers import LogitsBuffers
from drafter_service.proposer import DraftRow, Proposal, Proposer
from drafter_service.sampling_mode import SamplingMode
from drafter_service.sequence import Sequence
from drafter_service.session import Session, SessionTerms
from drafter_service.step import OpenedSequence, Step
from drafter_service.step_work import RowRange, RowSlice, StepWork, contiguous_pieces
from draftwire.kv_cache import BLOCK_SIZE, BlockPool, KVCache, RaggedBatch, SequenceRows
from draftwire.v1 import draft_pb2 as pb


@dataclass
class _Batch:
    """Rows of one forward and the steps that are done with it."""

    slices: list[tuple[Session, RowSlice]] = field(default_factory=list)
    finished: list[tuple[Session, StepWork]] = field(default_factory=list)


class DraftEngine:
    """Owns the sequences of every session, their blocks and the cache. Not thread-safe: one thread calls it."""

    def __init__(self, head: Head, limits: EngineLimits, dtype: torch.dtype, device: torch.device) -> None:
        self.head = head
        self.limits = limits
        self.device = device
        self._dtype = dtype
        self._sessions: list[Session] = []
        self._num_sequences = 0
        num_blocks = limits.kv_cache_tokens // BLOCK_SIZE + 1  # block 0 is padding
        self._pool = BlockPool(num_blocks)
        self._cache = KVCache(head.spec.layer_shapes, num_blocks, dtype, device)
        self._buffers = LogitsBuffers(limits.max_num_seqs, head.spec.draft_vocab_size, device)
        self._proposer = Proposer(head, self._cache, self._buffers, device)

    @property
    def load(self) -> Load:
        """How busy the engine is; may be read from any thread."""
        return Load(len(self._sessions), self._num_sequences, self._pool.usage)

    @property
    def logits_bytes(self) -> int:
        """Memory of the draft logits' buffers, bytes."""
        return self._buffers.num_bytes

    @property
    def has_work(self) -> bool:
        """Whether a step waits."""
        return any(session.works for session in self._sessions)

    def open_session(self, terms: SessionTerms, deliver: Callable[[Answer | Exception], None]) -> Session:
        """Adds a session; `deliver` gets the answer to each of its steps.

        Raises
        ------
        torch.OutOfMemoryError
            When there is no memory for the draft logits that it asks for.
        """
        self._buffers.keep([terms, *(session.terms for session in self._sessions)])
        session = Session(terms, deliver)
        self._sessions.append(session)
        return session

    def close_session(self, session: Session) -> None:
        """Drops a session with all that it holds; nothing is delivered to it any more."""
        if session not in self._sessions:
            return
        for sequence_id in list(session.sequences):
            self._drop(session, sequence_id)
        session.works.clear()
        self._sessions.remove(session)
        self._buffers.keep([other.terms for other in self._sessions])

    def fail(self, error: Exception) -> None:
        """Ends every session with `error`."""
        for session in list(self._sessions):
            self.close_session(session)
            session.deliver(error)

    def submit(self, session: Session, step: Step) -> None:
        """Queues a step that was checked against the session's terms."""
        if session in self._sessions:
            session.works.append(StepWork(step))
            session.waiting_rows += len(step.tokens)

    def warm_up(self) -> None:
        """Drafts once, from zeros, so that no verifier waits for the device to be set up."""
        session = self.open_session(SessionTerms("warm-up", SamplingMode(gumbel=True), 2, 1), lambda _: None)
        step = Step(
            step_id=1,
            opened=[OpenedSequence(1, temperature=1.0, proposal_key=0, first_row=0)],
            closed_ids=[],
            sequence_ids=[1],
            first_rows=[0],
            num_rows=[2],
            num_drafts=[2],
            tokens=torch.zeros(2, dtype=torch.int32),
            features=torch.zeros(2, self.head.spec.feature_width, dtype=self._dtype),
        )
        self.submit(session, step)
        self.iterate()
        self.close_session(session)

    @torch.inference_mode()
    def iterate(self) -> None:
        """Computes one batch of waiting rows, drafts where a sequence's rows are complete, answers finished steps."""
        batch = self._schedule()
        if batch.slices:
            self._draft(batch, self._forward([part for _, part in batch.slices]))
        self._deliver(batch)

    def _schedule(self) -> _Batch:
        """Shares max_batch_rows evenly; what a session does not need is shared by those with more rows waiting.

        So drafts never wait for another session's prefill, and no prefill starves.
        """
        batch = _Batch()
        waiting = sorted((s for s in self._sessions if s.works), key=lambda session: session.waiting_rows)
        budget = self.limits.max_batch_rows
        for index, session in enumerate(waiting):
            budget -= self._take(session, budget // (len(waiting) - index), batch)
        return batch

    def _take(self, session: Session, share: int, batch: _Batch) -> int:
        """Takes up to `share` rows of a session's steps, in order; a sequence is in one step of a batch alone."""
        busy: set[int] = set()
        taken = 0
        while session.works:
            work = session.works[0]
            if not work.admitted:
                if not busy.isdisjoint(work.step.named_ids()):
                    break
                self._admit(session, work)
            slices = work.take(share - taken)
            batch.slices += [(session, part) for part in slices]
            taken += sum(part.count for part in slices)
            if work.ranges:
                break
            busy.update(work.step.sequence_ids)
            batch.finished.append((session, session.works.popleft()))
        session.waiting_rows -= taken
        return taken

    def _admit(self, session: Session, work: StepWork) -> None:
        """Closes and opens sequences, finds room for the step's rows and answers for those that have none."""
        step = work.step
        work.admitted = True
        for sequence_id in step.closed_ids:
            self._drop(session, sequence_id)
        refused = self._open_sequences(session, step)
        offset = 0
        rows = zip(step.sequence_ids, step.first_rows, step.num_rows, step.num_drafts, strict=True)
        for sequence_id, first_row, count, num_drafts in rows:
            sequence = session.sequences.get(sequence_id)
            if sequence_id in refused:
                pass  # answered below
            elif sequence is None or first_row != sequence.next_row:
                self._drop(session, sequence_id)
                work.answer.add_failure(sequence_id, pb.SEQUENCE_STATUS_UNKNOWN)
            elif not self._find_room(sequence, count):
                self._drop(session, sequence_id)
                work.answer.add_failure(sequence_id, pb.SEQUENCE_STATUS_NO_CAPACITY)
            else:
                work.ranges.append(RowRange(sequence, offset, count, num_drafts))
            offset += count
        for sequence_id in refused:
            work.answer.add_failure(sequence_id, pb.SEQUENCE_STATUS_NO_CAPACITY)
        session.waiting_rows -= len(step.tokens) - sum(part.count for part in work.ranges)

    def _open_sequences(self, session: Session, step: Step) -> list[int]:
        """Opens the step's new sequences; the ids of those that there is no room for."""
        refused = []
        for new in step.opened:
            is_full = len(session.sequences) >= session.terms.max_sequences
            if is_full or self._num_sequences >= self.limits.max_num_seqs:
                refused.append(new.sequence_id)
                continue
            session.sequences[new.sequence_id] = Sequence(
                new.sequence_id, new.temperature, new.proposal_key, new.first_row, next_row=new.first_row
            )
            self._num_sequences += 1
        return refused

    def _find_room(self, sequence: Sequence, num_rows: int) -> bool:
        is_within_context = sequence.next_row + num_rows <= self.limits.max_model_len
        return is_within_context and sequence.reserve(num_rows, self._pool)

    def _drop(self, session: Session, sequence_id: int) -> None:
        sequence = session.sequences.pop(sequence_id, None)
        if sequence is not None:
            self._pool.release(sequence.blocks)
            self._num_sequences -= 1

    def _forward(self, slices: list[RowSlice]) -> torch.Tensor:
        """The head's states [T, hidden] of the rows."""
        pieces = contiguous_pieces(slices)
        tokens, features = pieces[0] if len(pieces) == 1 else map(torch.cat, zip(*pieces, strict=True))
        positions = np.concatenate([np.arange(part.first_row, part.first_row + part.count) for part in slices])
        cached = [SequenceRows(part.sequence.blocks, part.place, part.count) for part in slices]
        return self.head.forward(
            tokens.to(self.device, torch.int64),
            self.head.fuse(features.to(self.device)),
            torch.from_numpy(positions).to(self.device),
            self._cache,
            RaggedBatch(cached, self.device),
        )

    def _draft(self, batch: _Batch, states: torch.Tensor) -> None:
        """Drafts after the slices that want it; tokens and logits go into the answers of their steps."""
        last_rows = np.cumsum([part.count for _, part in batch.slices]) - 1
        drafting = [(i, session, part) for i, (session, part) in enumerate(batch.slices) if part.num_drafts]
        if not drafting:
            return
        rows = [
            DraftRow(
                part.sequence,
                session.terms.mode,
                part.sequence.reserve_drafts(part.num_drafts, self._pool, self.limits.max_model_len),
            )
            for _, session, part in drafting
        ]
        last = torch.from_numpy(last_rows[[i for i, _, _ in drafting]]).to(self.device)
        proposal = self._proposer.propose(states[last], rows)
        num_drafted: dict[StepWork, int] = {}
        for (_, _, part), tokens in zip(drafting, proposal.tokens, strict=True):
            sequence = part.sequence
            part.work.answer.add_drafts(sequence.sequence_id, sequence.next_row + 1, part.last_token, tokens)
            num_drafted[part.work] = num_drafted.get(part.work, 0) + len(tokens)
        modes = {part.work: session.terms.mode for _, session, part in drafting}
        _add_logits(proposal, num_drafted, modes)

    def _deliver(self, batch: _Batch) -> None:
        for session, work in batch.finished:
            work.answer.load = self.load
            session.deliver(work.answer)


def _add_logits(proposal: Proposal, num_drafted: dict[StepWork, int], modes: dict[StepWork, SamplingMode]) -> None:
    """Gives each step its own of the logits, which lie step after step for each mode."""
    taken: dict[SamplingMode, int] = {}
    for work, count in num_drafted.items():
        mode = modes[work]
        if not mode.sends_logits:
            continue
        logits, token_ids = proposal.logits[mode]
        begin = taken.get(mode, 0)
        taken[mode] = begin + count
        work.answer.logits.append(logits[begin : begin + count])
        if token_ids is not None:
            work.answer.logits_token_ids.append(token_ids[begin : begin + count])
