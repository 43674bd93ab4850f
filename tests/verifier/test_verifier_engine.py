"""The engine: what ends one request or one stream alone, and what ends everything."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafting_scene import RecordedStream, answer_to, make_head, make_request
from transformers import AutoModelForCausalLM, LlamaConfig

from draftwire.config import speculative_config_from_mapping
from draftwire.errors import ServerError
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service import attention_hook, drafting, engine
from verifier_service.drafter_link import Answered, Connected, Disconnected
from verifier_service.engine import Engine, EngineLimits, Item
from verifier_service.request import Request
from verifier_service.target import Target

VOCAB, HIDDEN, NUM_LAYERS = 20, 16, 3
K = 3
WAIT_S = 10.0
REDUCED = torch.tensor([1, 4, 5, 6, 7, 11, 19])
DENSE = {"draft_sample_method": "gumbel", "draft_logits": "dense"}


@pytest.fixture(scope="module")
def target() -> Target:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.7,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_hook.NAME)
    return Target(model.eval().requires_grad_(False), "tiny", frozenset())


class Served:
    """An engine and what it hands out."""

    def __init__(self, target: Target, config: dict[str, Any] | None = None, max_num_seqs: int = 8) -> None:
        settings = speculative_config_from_mapping({"num_speculative_tokens": K, **(config or {})})
        limits = EngineLimits(max_num_seqs, max_queue=8, max_prefill_rows=64, num_blocks=33, draft_deadline_s=None)
        self.has_failed = threading.Event()
        self.engine = Engine(target, settings, limits, self._deliver, self.has_failed.set)
        self._items: dict[Request, queue.SimpleQueue[Item]] = {}

    def _deliver(self, items: list[tuple[Request, Item]]) -> None:
        for request, item in items:
            self._items[request].put(item)

    def submit(self, **options: Any) -> Request:
        request = make_request([3, 1, 4, 1, 5], **{"max_tokens": 12, **options})
        self._items[request] = queue.SimpleQueue()
        self.engine.submit(request)
        return request

    def next(self, request: Request) -> Item:
        return self._items[request].get(timeout=WAIT_S)

    def tokens(self, request: Request) -> list[int]:
        """Waits until the request has finished; its output."""
        tokens: list[int] = []
        while True:
            item = self.next(request)
            assert isinstance(item, generate_pb2.GenerateResponse), item
            tokens += item.token_ids
            if item.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED:
                return tokens

    def error(self, request: Request) -> str:
        """Waits until the request has ended with an error; its text."""
        while isinstance(item := self.next(request), generate_pb2.GenerateResponse):
            assert item.finish_reason == generate_pb2.FINISH_REASON_UNSPECIFIED
        assert isinstance(item, ServerError)
        return str(item)

    def connect(self, drafts: list[int] | None = None, **head: Any) -> RecordedStream:
        """A drafter that answers every step with the same drafts."""
        layers = head.get("layers", (1, 2))
        head.setdefault("row_bytes", 4 * HIDDEN * len(layers))
        made = make_head(**{"layers": layers, **head})

        def answer(step: pb.DraftStep) -> None:
            logits = None
            if made.draft_token_ids is not None:
                logits = torch.zeros(K, len(made.draft_token_ids))
            self.engine.post(Answered(stream, answer_to(step, drafts or [5, 6, 7], logits)))

        stream = RecordedStream(made, answer)
        self.engine.post(Connected(stream))
        return stream


@pytest.fixture
def served(target: Target) -> Iterator[Served]:
    own = Served(target)
    own.engine.start()
    yield own
    own.engine.stop()


@pytest.fixture(scope="module")
def greedy(target: Target) -> list[int]:
    """What the target says without drafts."""
    own = Served(target)
    own.engine.start()
    tokens = own.tokens(own.submit())
    own.engine.stop()
    assert len(set(tokens)) > 3
    return tokens


def test_drafts_are_verified_and_change_no_output(served, greedy):
    stream = served.connect()
    one = served.submit()
    assert served.tokens(one) == greedy
    assert sum(one.drafted) > 0
    assert stream.failure is None


def test_drafts_that_the_target_says_itself_are_accepted(served, greedy):
    stream = served.connect()

    def answer(step: pb.DraftStep) -> None:
        length = step.first_rows[0] + step.num_rows[0] + 1 if step.num_rows else 0
        served.engine.post(Answered(stream, answer_to(step, greedy[length - 5 :][:K])))

    stream.on_send = answer
    one = served.submit()
    assert served.tokens(one) == greedy
    assert one.accepted == one.drafted
    assert one.verify_steps == 3  # 12 tokens: one with the prompt, then 4, 4 and 3


def test_a_request_whose_output_cannot_be_decoded_ends_alone(served, greedy):
    broken = make_request([3, 1, 4, 1, 5])

    def push(token_ids: list[int], room: int) -> None:  # noqa: ARG001
        raise ValueError("no such token")

    broken.output.push = push
    served._items[broken] = queue.SimpleQueue()
    others = [served.submit()]
    served.engine.submit(broken)
    others.append(served.submit())
    assert served.error(broken) == "the output cannot be decoded: no such token"
    assert [served.tokens(one) for one in others] == [greedy, greedy]
    assert served.tokens(served.submit()) == greedy
    assert not served.has_failed.is_set()
    assert served.engine.scheduler.running == []


def test_a_step_that_fails_ends_its_requests_and_no_later_one(served, greedy, target, monkeypatch):
    forward = target.forward

    def fail_once(*_: Any) -> torch.Tensor:
        monkeypatch.setattr(target, "forward", forward)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target, "forward", fail_once)
    assert served.error(served.submit()) == "the step failed: out of memory"
    assert served.tokens(served.submit()) == greedy
    assert not served.has_failed.is_set()


def test_features_that_there_is_no_memory_for_fail_their_stream_alone(served, greedy, monkeypatch):
    def allocate(target: Target, layers: tuple[int, ...], *rest: Any) -> Any:
        if layers == (3,):
            raise RuntimeError("not enough memory")
        return make_store(target, layers, *rest)

    make_store = engine.FeatureStore
    monkeypatch.setattr(engine, "FeatureStore", allocate)
    large, small = served.connect(layers=(3,)), served.connect(layers=(1, 2))
    one = served.submit()
    assert served.tokens(one) == greedy
    assert large.failure == "there is no memory for the features of its layers [3]: not enough memory"
    assert (large.is_expelled, large.steps) == (False, [])
    assert small.failure is None
    assert sum(one.drafted) > 0


def test_features_are_kept_from_the_moment_their_drafter_comes(served, greedy):
    first = served.connect()
    late: list[RecordedStream] = []

    def answer(step: pb.DraftStep) -> None:
        if step.step_id == 3:
            late.append(served.connect(layers=(0, 3)))
            served.engine.post(Disconnected(first))
        else:
            served.engine.post(Answered(first, answer_to(step)))

    first.on_send = answer
    one = served.submit(max_tokens=30)
    assert served.tokens(one)[:12] == greedy
    rows = sum(sum(step.num_rows) for step in first.steps)
    assert list(late[0].steps[0].opened.first_rows) == [rows]


def connect_briefly(served: Served) -> RecordedStream:
    """A drafter with a reduced vocabulary that is gone as soon as it has answered with drafts."""
    stream = served.connect(draft_token_ids=REDUCED, draft_vocab_size=len(REDUCED))
    answer = stream.on_send

    def answer_and_go(step: pb.DraftStep) -> None:
        answer(step)
        served.engine.post(Disconnected(stream))

    stream.on_send = answer_and_go
    return stream


def test_a_drafter_that_goes_between_its_answer_and_the_step_fails_no_request(target, monkeypatch):
    monkeypatch.setattr(drafting, "REDRAW_SHARE", 0)
    own = Served(target, DENSE)
    brief = connect_briefly(own)
    requests = [own.submit(temperature=temperature) for temperature in (0.0, 1.0, 1.0)]
    own.engine.start()
    assert [len(own.tokens(one)) for one in requests] == [12, 12, 12]
    assert [one.drafted for one in requests] == [[1, 1, 1]] * 3
    assert len(brief.steps) == 1
    own.engine.stop()


def test_drafts_of_heads_with_different_vocabularies_are_verified_in_one_step(target, monkeypatch):
    monkeypatch.setattr(drafting, "REDRAW_SHARE", 0)
    own = Served(target, DENSE)
    brief = connect_briefly(own)
    other = own.connect(draft_token_ids=torch.arange(VOCAB - 1), draft_vocab_size=VOCAB - 1)
    requests = [own.submit(temperature=1.0) for _ in range(4)]
    own.engine.start()
    assert [len(own.tokens(one)) for one in requests] == [12] * 4
    assert all(one.drafted[0] > 0 for one in requests)
    assert len(brief.steps) == 1
    assert (brief.failure, other.failure) == (None, None)
    own.engine.stop()


def test_a_failure_outside_a_step_ends_all_requests_and_is_told(target, monkeypatch):
    own = Served(target, max_num_seqs=2)
    requests = [own.submit(max_tokens=50) for _ in range(3)]

    def handle(event: Any) -> None:
        raise LookupError(f"no {type(event).__name__}")

    monkeypatch.setattr(own.engine.drafting, "handle", handle)
    own.engine.post(Disconnected(RecordedStream(make_head())))
    own.engine.start()
    assert [own.error(one) for one in requests] == ["the engine failed: no Disconnected"] * 3
    assert own.has_failed.wait(WAIT_S)
    own.engine.stop()


def test_stop_gives_the_requests_that_are_left_an_error(target):
    own = Served(target, max_num_seqs=2)
    stream = own.connect()
    stream.on_send = lambda _: None  # without a deadline its requests wait
    requests = [own.submit() for _ in range(3)]
    own.engine.start()
    assert isinstance(own.next(requests[0]), generate_pb2.GenerateResponse)
    own.engine.stop()
    assert [own.error(one) for one in requests] == ["the server is shutting down"] * 3
    assert not own.has_failed.is_set()
