"""A step gone through on an engine that computes nothing, for `draftwire.practice`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter_service.answer import Load
from drafter_service.draft_loop import DraftLoop, LoopShape
from drafter_service.engine import DraftEngine, add_drafts
from drafter_service.heads.spec import Head, HeadSpec
from drafter_service.limits import EngineLimits
from drafter_service.proposer import Proposal
from drafter_service.sampling_mode import SamplingMode
from drafter_service.session import SessionTerms
from drafter_service.step import Step
from drafter_service.step_decoder import StepDecoder
from drafter_service.step_work import StepRows, StepWork
from draftwire.carriers import (
    DrafterBoard,
    Incoming,
    Lane,
    Outgoing,
    TensorReceiver,
    TensorSender,
    VerifierBoard,
    board_bytes,
)
from draftwire.carriers.host_segment import HostSegment
from draftwire.encoding import encode_step
from draftwire.kv_cache import KVCache, RaggedBatch
from draftwire.tensors import encode_ids
from draftwire.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb

_CPU = torch.device("cpu")
_SPEC = HeadSpec(
    method="eagle3",
    hidden_size=8,
    target_vocab_size=16,
    target_hidden_size=8,
    target_num_layers=4,
    feature_layers=(1, 2, 3),
    feature_width=24,
    draft_vocab_size=16,
    layer_shapes=((1, 8, 8),),
    max_position_embeddings=512,
)
_ROWS, _DRAFTS = 3, 4  # of each sequence in a step
_SEGMENT_BYTES = 1 << 20


class Rehearsal:
    """Steps of a few sequences: from what a verifier's device has drawn, and its message, to the bytes of the answer.
    Nothing leaves it.

    Attributes
    ----------
    parts
        What `run` does, in order.
    num_marks_before_wait
        Times that `run` yields before the thread waits for what the rest is made of.
    """

    parts = ("batch prepared", "batch begun", "message parsed", "step decoded", "batch taken", "answer encoded")

    num_marks_before_wait = 2

    def __init__(self, num_sequences: int = 1) -> None:
        limits = EngineLimits(
            max_num_seqs=num_sequences,
            max_model_len=_SPEC.max_position_embeddings,
            kv_cache_tokens=num_sequences * _SPEC.max_position_embeddings,
        )
        self._engine = DraftEngine(_NoHead(), limits, torch.float32, _CPU, make_loop=_IdleLoop)
        self._answers: list[Any] = []
        terms = SessionTerms("rehearsal", SamplingMode(), _DRAFTS, num_sequences)
        self._session = self._engine.open_session(terms, self._answers.append)
        segment = HostSegment.unshared(_SEGMENT_BYTES, _CPU)
        board = HostSegment.unshared(board_bytes(num_sequences, _DRAFTS), _CPU)
        self._receiver, self._sender = TensorReceiver(_CPU, segment), TensorSender(_CPU, segment)
        self._words, self._address = board.memory.numpy().view(np.uint32), board.memory.data_ptr()
        self._board, own = VerifierBoard(board, _CPU, self._hold), DrafterBoard(board, _CPU)
        self._held: tuple[int, int] | None = None  # place and value of a generation that is not on the board yet
        self._decoder = StepDecoder(
            *(_SPEC.target_vocab_size, _SPEC.hidden_size, torch.float32, _DRAFTS, self._receiver, own),
            is_fused=True,
        )
        self._drawn = torch.tensor([[_ROWS] + [1] * (_DRAFTS + 1)] * num_sequences, dtype=torch.int32)
        self._ids = range(num_sequences)
        self._step_id = 0
        self._first_row = _SPEC.max_position_embeddings
        self._message = b""

    def prepare(self) -> None:
        """Writes the message of the next step, which takes other sequences where the last ones have come to their end,
        and foretells it where they have not.

        The first one closes sequences that were never opened, which an engine does not mind.
        """
        self._step_id += 1
        step = pb.DraftStep(step_id=self._step_id)
        count = len(self._ids)
        if self._first_row + _ROWS + _DRAFTS > _SPEC.max_position_embeddings:
            step.closed_ids.extend(self._ids)
            self._ids, self._first_row = range(self._ids.stop, self._ids.stop + count), 0
            step.opened.ids.extend(self._ids)
            step.opened.temperatures.extend([1.0] * count)
            step.opened.proposal_keys.extend([0] * count)
            step.opened.first_rows.extend([0] * count)
        step.sequence_ids.extend(self._ids)
        step.first_rows.extend([self._first_row] * count)
        step.num_rows.extend([_ROWS] * count)
        step.num_drafts.extend([_DRAFTS] * count)
        encode_ids([1] * (_ROWS * count), step.tokens)
        self._sender.release(self._receiver.generation_read, "features_read")
        features = self._sender.begin(torch.float32, (_ROWS * count, _SPEC.hidden_size))
        features.seal()
        if not step.HasField("opened"):
            self._foretell(step, features)
        self._message = encode_step(step, features.finish(step.features)).data
        self._first_row += _ROWS

    def _foretell(self, step: pb.DraftStep, features: Outgoing) -> None:
        upcoming = pb.UpcomingStep(
            sequence_ids=step.sequence_ids,
            first_rows=step.first_rows,
            num_drafts=step.num_drafts,
            drawn=self._board.post(self._drawn),
            columns=self._drawn.shape[1],
            features_offset=features.offset,
        )
        self._engine.foresee(self._session, self._decoder.decode_upcoming(upcoming))

    def run(self) -> Iterator[float | None]:
        """Prepares the batch, begins it when its tokens are on the board, and takes the message. Yields monotonic
        times: of the begin, and of the end of each part; the wait for the tokens is left out of them."""
        yield time.monotonic()
        self._engine.look_ahead()
        prepared = time.monotonic()
        yield prepared
        self._write_held()
        waited = time.monotonic() - prepared
        if self._engine.look_ahead():
            self._engine.ahead.begin()
        yield time.monotonic() - waited
        request = pb.DraftRequest.FromString(self._message)
        yield time.monotonic() - waited
        step = self._decoder.decode(request)
        yield time.monotonic() - waited
        self._engine.submit(self._session, step)
        self._engine.iterate()
        yield time.monotonic() - waited
        self._answers.pop().encode(self._receiver.generation_read)
        yield time.monotonic() - waited

    def _hold(self, _stream: int, address: int, value: int) -> None:
        self._held = (address - self._address) // self._words.itemsize, value

    def _write_held(self) -> None:
        """The device has drawn."""
        if self._held is not None:
            place, generation = self._held
            self._words[place], self._held = generation, None


class AnswerRehearsal:
    """What follows a step's drafts, of one sequence, until they have been sent. Nothing leaves it."""

    def __init__(self) -> None:
        self._sender = TensorSender(_CPU)
        self._traffic = Traffic()
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lane, self._verifier = Lane(own), Lane(theirs)
        self._tokens = np.ones((1, _DRAFTS), np.int32)
        one = np.ones(1, np.int64)
        no_features = Incoming(torch.empty(_ROWS, _SPEC.hidden_size), _CPU)
        tokens = np.ones(_ROWS, np.int32)
        self._step = Step(1, [], [], [1], 0 * one, _ROWS * one, _DRAFTS * one, tokens, no_features, is_fused=True)

    def prepare(self) -> None:
        """Begins the answer."""
        one = np.ones(1, np.int64)
        work = StepWork(self._step)
        self._rows = StepRows(work, 0 * one, 0 * one, 0 * one, _ROWS * one, _ROWS * one, _DRAFTS * one, _ROWS)
        self._rows.announce()

    def run(self) -> Iterator[float | None]:
        """Takes the drafts. Yields None after each piece."""
        add_drafts(self._rows, Proposal(self._tokens, self._tokens >= 0, []))
        yield None
        answer = self._rows.work.answer
        answer.load = Load(1, 1, 0.0)
        answer.begin_sending(self._sender, self._traffic)
        response = answer.encode(1)
        yield None
        self._lane.send(response.data)
        self._traffic.count_message("direct", "sent", response.message, len(response.data))
        yield None
        self._verifier.receive()


class _IdleLoop(DraftLoop):
    """Computes nothing."""

    def run(self, shape: LoopShape) -> None: ...


class _NoHead(Head):
    """Shapes alone."""

    spec = _SPEC
    draft_token_ids = None
    fingerprint = "0" * 16

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, g: Tensor, positions: Tensor, cache: KVCache, batch: RaggedBatch) -> Tensor:
        raise NotImplementedError  # no row of a rehearsal is computed

    def logits(self, g: Tensor) -> Tensor:
        raise NotImplementedError
