"""`Drafting` with fakes of the target, its requests, the drafters' streams and the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from outgoing import finish

from draftwire.contract.validation import (
    build_sampling_params,
    resolve_sampling_params,
    speculative_config_from_mapping,
)
from draftwire.model.block_pool import BlockPool, blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE, RaggedBatch, SequenceRows
from draftwire.model.tensors import decode_tensor, encode_ids, encode_tensor
from draftwire.transport import Outgoing, TensorReceiver, TensorSender
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ForwardOutput
from verifier_service.core.request import NoiseKeys, Request
from verifier_service.core.step_times import StepTimes
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.drafters import draft_wait, drafting, placement
from verifier_service.drafters import sender as step_sender
from verifier_service.drafters.drafting import Drafting
from verifier_service.drafters.features import FeatureKind, FeatureStore
from verifier_service.drafters.stream import (
    AnnouncedStep,
    Answered,
    Connected,
    Disconnected,
    HeadInfo,
    StepMessage,
    Stream,
)
from verifier_service.pacing import Profile

CPU = torch.device("cpu")
VOCAB = 20
HIDDEN = 2
LAYERS = (1, 3)
WIDTH = len(LAYERS) * HIDDEN
NUM_BLOCKS = 1000
K = 3


def make_head(**changes: Any) -> HeadInfo:
    """Return a head with the target's vocabulary and high limits, with `changes`."""
    layers = changes.get("layers", LAYERS)
    values: dict[str, Any] = {
        "fingerprint": "f00d",
        "layers": layers,
        "dtype": torch.float32,
        "draft_vocab_size": VOCAB,
        "draft_token_ids": None,
        "row_bytes": len(layers) * HIDDEN * 4,
        "max_drafts": 16,
        "max_sequences": 100,
        "max_model_len": 4096,
    }
    return HeadInfo(**{**values, **changes})


def make_request(
    prompt: Sequence[int],
    *,
    k: int = K,
    temperature: float = 0.0,
    max_tokens: int = 100,
    keys: int = 100,
    **sampling: Any,
) -> Request:
    """Return a new request; its noise keys are `keys` + 1, + 2 and + 3."""
    params = resolve_sampling_params(build_sampling_params(temperature=temperature, max_tokens=max_tokens, **sampling))
    return Request(
        request_id=f"request-{keys}",
        prompt=list(prompt),
        params=params,
        num_speculative_tokens=k,
        keys=NoiseKeys(keys + 1, keys + 2, keys + 3),
        stops=StopConditions(params, frozenset()),
        max_length=len(prompt) + max_tokens,
    )


class RecordedStream(Stream):
    """A stream that records sent steps; `on_send` may answer. A commit is recorded as the step that it confirms."""

    def __init__(
        self, head: HeadInfo, on_send: Callable[[pb.DraftStep], object] = lambda _: None, *, on_trial: bool = False
    ) -> None:
        self.address = "drafter:1"
        self.head = head
        self.steps: list[pb.DraftStep] = []
        self.is_local = False  # whether steps are announced
        self.early_drafts: np.ndarray | None = None
        self._announced: dict[int, tuple[pb.Announce, list[list[int]]]] = {}
        self.failure: str | None = None
        self.is_expelled = False
        self.has_ended = False
        self.on_trial = on_trial
        self.states: list[int] = []
        self.on_send = on_send
        self.sender = TensorSender(CPU)
        self.receiver = TensorReceiver(CPU)

    def send(self, step: StepMessage, features: Outgoing | None = None) -> None:
        if isinstance(step, pb.Commit):
            step = self._step_of(step)
        elif features is not None:
            finish(features, step.features)
        self.steps.append(step)
        self.on_send(step)

    @property
    def is_direct(self) -> bool:
        return False  # tests post the answers, also those of announced steps

    @property
    def may_announce(self) -> bool:
        return self.is_local

    def announce(self, message: pb.Announce, numbers: torch.Tensor, features: Outgoing) -> AnnouncedStep:
        features.announce(message.features)
        self._announced[message.announced_id] = message, numbers.tolist()
        return AnnouncedStep(
            message.announced_id, message.num_drafts, len(message.sequence_ids), self.head.confidences
        )

    def has_early_drafts(self, announced: AnnouncedStep) -> bool:  # noqa: ARG002
        return self.early_drafts is not None

    def read_early_drafts(self, announced: AnnouncedStep) -> np.ndarray:
        tokens, self.early_drafts = self.early_drafts, None
        assert tokens is not None
        return np.resize(tokens, announced.early_shape)

    def _step_of(self, commit: pb.Commit) -> pb.DraftStep:
        """Return the step that a commit confirms, without features."""
        message, numbers = self._announced.pop(commit.announced_id)
        left = [place for place, one in enumerate(message.sequence_ids) if one not in commit.closed_ids]
        step = pb.DraftStep(
            step_id=commit.step_id,
            closed_ids=commit.closed_ids,
            sequence_ids=[message.sequence_ids[place] for place in left],
            first_rows=[message.first_rows[place] for place in left],
            num_rows=[numbers[place][0] for place in left],
            num_drafts=commit.num_drafts,
        )
        encode_ids([token for place in left for token in numbers[place][1 : 1 + numbers[place][0]]], step.tokens)
        return step

    def report(self, state: int) -> None:
        self.states.append(state)

    def count_received(self) -> None:
        pass

    def record_answer(self, drafts: pb.Drafts) -> None:
        self.sender.release(drafts.features_read, "drafts.features_read")

    def end(self) -> None:
        assert not self.has_ended
        self.has_ended = True

    def release(self) -> None:
        pass

    def fail(self, reason: str, *, expel: bool = False) -> None:
        assert self.failure is None
        self.failure, self.is_expelled = reason, expel

    @property
    def last(self) -> pb.DraftStep:
        return self.steps[-1]


def rows_of(step: pb.DraftStep) -> list[tuple[int, int, int]]:
    """Return (sequence id, first row, number of rows) of each sequence of a step."""
    return list(zip(step.sequence_ids, step.first_rows, step.num_rows, strict=True))


def tokens_of(step: pb.DraftStep) -> list[int]:
    return decode_tensor(step.tokens, "tokens", torch.int32, (sum(step.num_rows),)).tolist()


def answer_to(step: pb.DraftStep, tokens: Sequence[int] = (5, 6, 7), logits: torch.Tensor | None = None) -> pb.Drafts:
    """Return a correct answer: the first of `tokens`, with `logits`, for each sequence with requested drafts."""
    drafts = pb.Drafts(step_id=step.step_id)
    sent = tokens_of(step) if step.num_rows else []
    drawn: list[int] = []
    scores = []
    end = 0
    for (sequence_id, first, rows), wanted in zip(rows_of(step), step.num_drafts, strict=True):
        end += rows
        if wanted:
            drafts.sequence_ids.append(sequence_id)
            drafts.statuses.append(pb.SEQUENCE_STATUS_OK)
            drafts.committed_lengths.append(first + rows + 1)
            drafts.last_tokens.append(sent[end - 1])
            drafts.num_drafts.append(len(tokens[:wanted]))
            drawn += tokens[:wanted]
            scores += [] if logits is None else [logits[:wanted]]
    encode_tensor(torch.tensor(drawn, dtype=torch.int32), drafts.tokens)
    if scores:
        encode_tensor(torch.cat(scores), drafts.logits)
    return drafts


def refusal_of(step: pb.DraftStep, status: pb.SequenceStatus) -> pb.Drafts:
    """Return an answer without drafts, with the same status for every sequence of the step."""
    count = len(step.sequence_ids)
    return pb.Drafts(
        step_id=step.step_id,
        sequence_ids=step.sequence_ids,
        statuses=[status] * count,
        committed_lengths=[0] * count,
        last_tokens=[0] * count,
        num_drafts=[0] * count,
    )


class Clock:
    """A fake of the module `time`; tests set `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    @classmethod
    def stand_in(cls, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Return a clock that replaces the real one."""
        made = cls()
        for module in (drafting, draft_wait, placement, step_sender):
            monkeypatch.setattr(module, "time", made)
        return made

    def monotonic(self) -> float:
        return self.now


class _HandTarget:
    """The attributes of a target that a `FeatureStore` needs."""

    hidden_size = HIDDEN
    dtype = torch.float32
    device = CPU


def capture_every_row(store: FeatureStore, hidden_size: int, num_blocks: int, device: torch.device = CPU) -> None:
    """Give every row features: in all columns the row's index in the cache."""
    slots = torch.arange(num_blocks * BLOCK_SIZE)
    states = slots.float()[:, None].expand(-1, hidden_size).to(device)
    output = ForwardOutput(torch.empty(0), [states] * (max(LAYERS) + 1), slots.to(device), slots.numpy())
    with torch.inference_mode():
        store.capture(output)


class Scene:
    """A `Drafting` with running requests and connected drafters."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        deadline_s: float | None = None,
        *,
        adaptive_k: bool | None = None,
        profile: Profile | None = None,
    ) -> None:
        settings = speculative_config_from_mapping({"num_speculative_tokens": K, **(config or {})})
        times = StepTimes()
        self.drafting = Drafting(settings, VOCAB, deadline_s, CPU, times, adaptive_k=adaptive_k, profile=profile)
        self.requests: list[Request] = []
        self.stores: dict[FeatureKind, FeatureStore] = {}
        self._target = _HandTarget()
        self._pool = BlockPool(NUM_BLOCKS)
        self._count = 0

    def connect(self, *, on_trial: bool = False, **head: Any) -> RecordedStream:
        """Connect a drafter; `head` changes its head. Return its stream."""
        stream = RecordedStream(make_head(**head), on_trial=on_trial)
        self.connect_stream(stream)
        return stream

    def connect_stream(self, stream: Stream) -> None:
        """Connect a drafter through the given stream."""
        head = stream.head
        if head.kind not in self.stores:
            target: Any = self._target
            self.stores[head.kind] = FeatureStore(target, head.layers, NUM_BLOCKS, head.fusion)
        self.drafting.handle(Connected(stream))

    def disconnect(self, stream: Stream) -> None:
        self.drafting.handle(Disconnected(stream))

    def admit(self, prompt_length: int, **options: Any) -> Request:
        """Return a new running request without computed rows."""
        number = self._count = self._count + 1
        prompt = [(7 * number + i) % VOCAB for i in range(prompt_length)]
        request = make_request(prompt, keys=100 * number, **options)
        request.blocks = self._pool.allocate(blocks_for(request.max_length)) or []
        assert request.blocks
        self.requests.append(request)
        return request

    def reuse(self, former: Request, num_blocks: int, prompt_length: int) -> Request:
        """Return a new running request that shares the first blocks of `former`, as after a prefix cache hit."""
        request = self.admit(prompt_length)
        request.blocks[:num_blocks] = former.blocks[:num_blocks]
        request.num_computed = request.num_reused = num_blocks * BLOCK_SIZE
        return request

    def compute(self, request: Request, rows: int) -> None:
        """Compute this many more rows of a request; each feature of row i of request r is 10000 r + i."""
        number = request.keys.proposal // 100
        start = request.num_computed
        states = (10000.0 * number + torch.arange(start, start + rows))[:, None].expand(-1, HIDDEN)
        slots = RaggedBatch([SequenceRows(request.blocks, start, rows)], CPU).slot_mapping
        output = ForwardOutput(torch.empty(0), [states] * (max(LAYERS) + 1), slots, slots.numpy())
        for store in self.stores.values():
            store.capture(output)
        request.num_computed += rows

    def verify(self, request: Request, *tokens: int) -> None:
        """Commit a step of the request that samples `tokens`."""
        request.drafts = None
        self.compute(request, len(tokens))
        request.tokens += tokens

    def step(self, request: Request, *tokens: int) -> None:
        """Commit a step of the request that samples `tokens`, and send new rows to the drafters."""
        self.verify(request, *tokens)
        self.flush()

    def decode(self, prompt_length: int = 4, **options: Any) -> Request:
        """Return a new request whose prompt is computed and whose first token, 9, is sampled."""
        request = self.admit(prompt_length, **options)
        self.compute(request, prompt_length)
        request.tokens.append(9)
        return request

    def end(self, request: Request) -> None:
        """End a request and release its place at a drafter."""
        self.requests.remove(request)
        self.drafting.release(request)

    def free(self, request: Request) -> None:
        """Return the blocks of an ended request to the pool."""
        self._pool.release(request.blocks)

    def capture_every_row(self) -> None:
        """Give all rows features, computed or not."""
        for store in self.stores.values():
            capture_every_row(store, HIDDEN, NUM_BLOCKS)

    def flush(self) -> None:
        self.drafting.flush(self.requests, self.stores)

    def answer(self, stream: RecordedStream, drafts: pb.Drafts | None = None) -> None:
        """Deliver an answer; by default a correct answer to the last step."""
        self.drafting.handle(Answered(stream, drafts or answer_to(stream.last), drafting.time.monotonic()))
