"""A step's way through the verifier's host, gone through without a target and a drafter, for `draftwire.practice`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftwire.block_pool import blocks_for
from draftwire.carriers import DrafterBoard, Lane, TensorReceiver, TensorSender, VerifierBoard, board_bytes
from draftwire.carriers.host_segment import HostSegment
from draftwire.config import build_sampling_params, resolve_sampling_params, speculative_config_from_mapping
from draftwire.tensors import encode_ids
from draftwire.traffic import Traffic
from draftwire.v1 import draft_pb2, generate_pb2
from verifier_service.draft_answer import read_ahead, read_board
from verifier_service.draft_session import AwaitedAnswer
from verifier_service.draft_stream import Answered, Connected, HeadInfo, Stream
from verifier_service.drafting import Drafting
from verifier_service.expected_step import ExpectedStep
from verifier_service.features import FeatureKind
from verifier_service.features_ahead import Foretold
from verifier_service.graph_inputs import GraphInputs, StagedStep
from verifier_service.request import NoiseKeys, Request
from verifier_service.request_metrics import RequestMetrics
from verifier_service.request_outputs import RequestOutputs
from verifier_service.sampler import PendingDraw, TokenSampler
from verifier_service.scheduler import Work
from verifier_service.step_times import StepTimes
from verifier_service.stop_conditions import StopConditions
from verifier_service.target_buckets import Bucket
from verifier_service.target_runner import HeldStep, StepRows

_CPU = torch.device("cpu")
_DRAFTS, _EMITTED = 4, [1, 2, 3]  # in a step
_PROMPT = [1] * 3
_MODEL_LEN = 512
_MODEL_BLOCKS = blocks_for(_MODEL_LEN)
_VOCAB = 16
_HEAD = HeadInfo("0" * 16, (1, 2, 3), torch.float32, _VOCAB, None, 96, 16, 1024, _MODEL_LEN)
_SEGMENT_BYTES = 1 << 20


class Rehearsal:
    """Steps of a few requests: from their tokens to the pass that waits for drafts and the message, and from the
    drafter's answer to the pass's begin.

    Attributes
    ----------
    parts
        What `run` does, in order.
    num_marks_before_wait
        Times that `run` yields before the thread waits for what the rest is made of.
    """

    parts = ("tokens read", "tokens committed", "pass filled", "message built and sent", "answer read", "step begun")

    num_marks_before_wait = 0

    def __init__(self, num_requests: int = 1) -> None:
        config = speculative_config_from_mapping(
            {
                "num_speculative_tokens": _DRAFTS,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 1.0 * len(_EMITTED),
            }
        )
        self._drafting = Drafting(config, _VOCAB, None, _CPU, StepTimes())
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._drafter = Lane(theirs)
        self._stream = _stream(Lane(own))
        self._drafting.handle(Connected(self._stream))
        self._stores: dict[FeatureKind, Any] = {_HEAD.kind: _NoStore()}
        self._sampler = TokenSampler(config, _VOCAB, frozenset(), num_requests, _CPU)
        scheduler: Any = None  # no request comes to its end
        metrics = RequestMetrics(_DRAFTS)
        self._outputs = RequestOutputs(
            scheduler, self._drafting, metrics, lambda _: None, lambda _: None, is_synthetic=True
        )
        self._drawn = torch.tensor([[len(_EMITTED), *_EMITTED, *[-1] * (_DRAFTS + 1 - len(_EMITTED))]] * num_requests)
        self._num_requests = num_requests
        self._requests: list[Request] = []
        rows = (_DRAFTS + 1) * num_requests
        bucket = Bucket(num_requests, _DRAFTS + 1, rows, rows)
        self._staged = StagedStep(GraphInputs([bucket], _MODEL_BLOCKS, _CPU), bucket, num_requests, _MODEL_BLOCKS)

    def prepare(self) -> None:
        """Has drafts that were verified, of other requests where the last ones have come to their end."""
        if not self._requests or len(self._requests[0].tokens) + 2 * (_DRAFTS + 1) > _MODEL_LEN:
            for request in self._requests:
                self._drafting.release(request)
            self._requests = [_request(number) for number in range(self._num_requests)]
            self._drafting.flush(self._requests, self._stores)
            self._answer()
            self._take(self._read())
        works = []
        for request in self._requests:
            drafts = request.drafts
            assert drafts is not None
            tokens = [request.tokens[-1], *drafts.tokens]
            works.append(Work(request, request.num_computed, tokens, drafts, samples=True))
            request.drafts = None
            request.num_in_flight += 1
        self._pending = PendingDraw(works, [(list(range(len(works))), self._drawn)], None, self._drawn.flatten(), None)
        self._drafting.take_ahead(self._drafting.begin_features(works, self._drawn, self._stores))

    def run(self) -> Iterator[float | None]:
        """Takes the tokens. Yields monotonic times: of the begin, and of the end of each part; None after what is left
        out of these times: what happens while the drafter drafts, and its answer."""
        yield time.monotonic()
        drawn = self._sampler.finish(self._pending)
        read = time.monotonic()
        yield read
        self._outputs.commit(self._pending.works, drawn, read)
        yield time.monotonic()
        gate = self._drafting.gate
        gate.drafts_to_come(self._requests, has_landed=True)
        expected = ExpectedStep([(request, _DRAFTS) for request in self._requests])
        expected.launch(self._fill)
        yield time.monotonic()
        self._drafting.flush(self._requests, self._stores, watches=False)
        gate.all_wait(self._requests)
        awaited = gate.awaited_answer()
        assert awaited is not None
        expected.foresee(awaited.requests, awaited.num_drafts)
        sent = time.monotonic()
        yield sent
        self._answer()
        yield None
        skipped = time.monotonic() - sent
        answers = self._read()
        yield time.monotonic() - skipped
        tokens = read_ahead(answers[0].drafts, awaited, _VOCAB)
        assert tokens is not None
        expected.begin_with(tokens)
        yield time.monotonic() - skipped
        self._take(answers)

    def _fill(self, step: StepRows) -> HeldStep:
        """Tells a reserved pass what it is."""
        self._staged.fill(step)
        computed: Any = None
        return HeldStep(lambda _: computed, lambda: None)

    def _answer(self) -> None:
        """The drafter's."""
        (message,) = self._drafter.receive()
        step = draft_pb2.DraftRequest.FromString(message).step
        drafts = draft_pb2.Drafts(step_id=step.step_id, features_read=step.features.span.generation)
        count = len(step.sequence_ids)
        drafts.sequence_ids.extend(step.sequence_ids)
        drafts.statuses.extend([draft_pb2.SEQUENCE_STATUS_OK] * count)
        drafts.committed_lengths.extend([len(request.tokens) for request in self._requests])
        drafts.last_tokens.extend([request.tokens[-1] for request in self._requests])
        drafts.num_drafts.extend([_DRAFTS] * count)
        encode_ids([1] * (_DRAFTS * count), drafts.tokens)
        self._drafter.send(draft_pb2.DraftResponse(drafts=drafts).SerializeToString())

    def _read(self) -> list[Answered]:
        return [event for event in self._stream.read_lane() or () if isinstance(event, Answered)]

    def _take(self, answers: list[Answered]) -> None:
        for answer in answers:
            self._drafting.handle(answer)


class AnswerRehearsal:
    """From a drafter's answer, and from drafts on the board, to the begin of the step that waits for them, of one
    request. Nothing leaves it."""

    def __init__(self) -> None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._drafter, self._stream = Lane(theirs), _stream(Lane(own))
        board = HostSegment.unshared(board_bytes(1, _DRAFTS), _CPU)
        self._board, self._drafters_board = VerifierBoard(board, _CPU), DrafterBoard(board, _CPU)
        self._drawn = torch.tensor([[len(_EMITTED), *_EMITTED, *[-1] * (_DRAFTS + 1 - len(_EMITTED))]]).int()
        self._drafts = torch.ones(1, _DRAFTS, dtype=torch.int32)
        self._request = _request(0)
        self._awaited = AwaitedAnswer(self._stream, 1, [1], [_DRAFTS], [self._request])
        drafts = draft_pb2.Drafts(step_id=1, sequence_ids=[1], num_drafts=[_DRAFTS])
        encode_ids([1] * _DRAFTS, drafts.tokens)
        self._answer = draft_pb2.DraftResponse(drafts=drafts).SerializeToString()

    def prepare(self) -> None:
        """Launches the step, and has its drafts asked for, written on the board and answered."""
        self._expected = ExpectedStep([(self._request, _DRAFTS)])
        computed: Any = None
        self._expected.launch(lambda _: HeldStep(lambda _: computed, lambda: None))
        self._expected.foresee(self._awaited.requests, self._awaited.num_drafts)
        drawn = self._board.post(self._drawn)
        assert drawn is not None
        self._drafters_board.answer(drawn.generation, drawn.offset, self._drafts)
        self._awaited = self._awaited._replace(foretold=Foretold(drawn, _DRAFTS))
        self._stream.count_received()
        self._stream.send(draft_pb2.DraftStep(step_id=1))
        self._drafter.receive()
        self._drafter.send(self._answer)

    def run(self) -> Iterator[float | None]:
        """Takes the answer, and what is on the board. Yields None after each piece."""
        (answer,) = [event for event in self._stream.read_lane() or () if isinstance(event, Answered)]
        yield None
        tokens = read_ahead(answer.drafts, self._awaited, _VOCAB)
        assert tokens is not None
        yield None
        tokens = read_board(self._board, self._awaited, _VOCAB)
        assert tokens is not None
        self._expected.begin_with(tokens)
        yield None


def _stream(lane: Lane) -> Stream:
    loop = asyncio.new_event_loop()  # which nothing is given to
    loop.close()
    segment = HostSegment.unshared(_SEGMENT_BYTES, _CPU)
    return Stream(
        generate_pb2.DrafterStatus(address="rehearsal"),
        _HEAD,
        lambda: None,
        TensorSender(_CPU, segment),
        TensorReceiver(_CPU, segment),
        lambda _stream, _state: None,
        Traffic(),
        lane,
        loop=loop,
    )


def _request(number: int) -> Request:
    """One whose first token has been drawn."""
    params = resolve_sampling_params(build_sampling_params(temperature=1.0, max_tokens=_MODEL_LEN - len(_PROMPT)))
    stops = StopConditions(params, frozenset())
    request = Request(f"{number}", _PROMPT, params, _DRAFTS, NoiseKeys(1, 2, 3), stops, _MODEL_LEN)
    request.blocks = list(range(1, 1 + _MODEL_BLOCKS))
    request.tokens.append(_EMITTED[0])
    request.num_computed = len(_PROMPT)
    return request


class _NoStore:
    """Features that are there before they are asked for."""

    def first_row(self, _request: Request) -> int:
        return 0

    def read(self, _spans: object, _out: Tensor) -> None: ...

    def read_true_rows(self, *_: Tensor) -> None: ...
