"""An engine with a tiny target and fake drafters."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import pytest
import torch
from drafting_scene import RecordedStream, answer_to, make_head, make_request
from tiny_targets import tiny_llama

from draftwire.contract.errors import DraftwireError
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.model.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.core.request import Request
from verifier_service.drafters.stream import Answered, Connected
from verifier_service.engine.engine import Engine, EngineLimits
from verifier_service.engine.outputs import Item
from verifier_service.engine.step import Stage, Step
from verifier_service.host.ranks import Workers
from verifier_service.target.target import Target

async_by_default = False
HIDDEN, NUM_LAYERS = 16, 3
K = 3
WAIT_S = 120.0


@pytest.fixture(params=[pytest.param(False, id="sync", marks=pytest.mark.full), pytest.param(True, id="async")])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the engines of a test without, then with async scheduling."""
    monkeypatch.setattr(sys.modules[__name__], "async_by_default", request.param)


def features_of(steps: Sequence[pb.DraftStep], sequence: int | None = None) -> torch.Tensor:
    """Return the features sent to a drafter, of all sequences or of one, [rows, 2 * HIDDEN]."""
    found = []
    for step in (step for step in steps if step.num_rows):
        features = decode_tensor(step.features, "features", torch.float32, (sum(step.num_rows), 2 * HIDDEN))
        parts = zip(step.sequence_ids, features.split(list(step.num_rows)), strict=True)
        found += [part for number, part in parts if sequence in (None, number)]
    return torch.cat(found)


def make_target() -> Target:
    """Return a Llama with random weights, 3 layers, 20 tokens and 64 positions."""
    return tiny_llama(NUM_LAYERS, HIDDEN)


class Served:
    """An engine and the items that it delivers."""

    def __init__(
        self,
        target: Target,
        config: dict[str, Any] | None = None,
        *,
        workers: Workers | None = None,
        **limits: Any,
    ) -> None:
        settings = speculative_config_from_mapping({"num_speculative_tokens": K, **(config or {})})
        usual = {
            "max_num_seqs": 8,
            "max_queue": 8,
            "max_prefill_rows": 64,
            "num_blocks": 33,
            "draft_deadline_s": None,
            "async_scheduling": async_by_default,
        }
        self.has_failed = threading.Event()
        sizes = EngineLimits(**{**usual, **limits})
        self._acts: list[tuple[Stage, Callable[[Step], object]]] = []
        self.engine = Engine(target, settings, sizes, self._deliver, self.has_failed.set, workers, self._observe)
        self._items: dict[Request, queue.SimpleQueue[Item]] = {}

    def _observe(self, step: Step) -> None:
        for stage, act in self._acts:
            if step.stage is stage:
                act(step)

    def on_stage(self, stage: Stage, act: Callable[[Step], object]) -> None:
        """Call `act` in the engine's thread with each step that enters `stage`; an exception fails the step."""
        self._acts.append((stage, act))

    def _deliver(self, items: list[tuple[Request, Item]]) -> None:
        for request, item in items:
            self._items[request].put(item)

    def submit(self, prompt: Sequence[int] = (3, 1, 4, 1, 5), **options: Any) -> Request:
        """Submit a request for 12 output tokens, changed by `options`."""
        return self.submit_made(make_request(prompt, **{"max_tokens": 12, **options}))

    def submit_made(self, request: Request) -> Request:
        """Submit an existing request."""
        self._items[request] = queue.SimpleQueue()
        self.engine.submit(request)
        return request

    def next(self, request: Request) -> Item:
        return self._items[request].get(timeout=WAIT_S)

    def messages(self, request: Request) -> list[generate_pb2.GenerateResponse]:
        """Wait until the request has finished; return its remaining responses."""
        messages = []
        while not messages or messages[-1].finish_reason == generate_pb2.FINISH_REASON_UNSPECIFIED:
            item = self.next(request)
            assert isinstance(item, generate_pb2.GenerateResponse), item
            messages.append(item)
        return messages

    def tokens(self, request: Request) -> list[int]:
        """Wait until the request has finished; return its remaining output."""
        return [token for message in self.messages(request) for token in message.token_ids]

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def run(self, *requests: Request) -> list[list[int]]:
        """Start the engine, wait until these requests have finished, and stop it; return their outputs."""
        with self:
            return [self.tokens(request) for request in requests]

    def error(self, request: Request) -> str:
        """Wait until the request has ended with an error; return the error's text."""
        while isinstance(item := self.next(request), generate_pb2.GenerateResponse):
            assert item.finish_reason == generate_pb2.FINISH_REASON_UNSPECIFIED
        assert isinstance(item, DraftwireError)
        return str(item)

    def connect(self, drafts: list[int] | None = None, **head: Any) -> RecordedStream:
        """Connect a drafter that answers every step with the same drafts."""
        return self.connect_with(lambda _: drafts or [5, 6, 7], **head)

    def connect_with(self, drafts_for: Callable[[pb.DraftStep], list[int]], **head: Any) -> RecordedStream:
        """Connect a drafter that answers each step with the drafts that `drafts_for` returns."""
        layers = head.get("layers", (1, 2))
        head.setdefault("row_bytes", 4 * HIDDEN * len(layers))
        made = make_head(**{"layers": layers, **head})

        def answer(step: pb.DraftStep) -> None:
            logits = None
            if made.draft_token_ids is not None:
                logits = torch.zeros(K, len(made.draft_token_ids))
            self.engine.post(Answered(stream, answer_to(step, drafts_for(step), logits)))

        stream = RecordedStream(made, answer)
        self.engine.post(Connected(stream))
        return stream
