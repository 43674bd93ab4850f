"""Requests before they reach the engine: limits, memory and cancellation."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from draftwire.contract.errors import DraftwireError, QueueFullError
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.v1 import generate_pb2 as pb
from verifier_service.api.preparation import RequestPreparer
from verifier_service.api.prompts import PromptReader
from verifier_service.api.requests import AbortedError, RequestHandler
from verifier_service.host.access import EngineFacts, Submission

MAX_OPEN = 2
WAIT_S = 60.0


class FakeEngine:
    """An engine that takes requests and never answers."""

    facts = EngineFacts(vocab_size=64, max_model_len=64, max_num_seqs=1, max_queue=1, max_open=MAX_OPEN)

    def __init__(self) -> None:
        self.submitted: list[weakref.ref[Submission]] = []
        self.cancelled: list[int] = []

    def submit(self, submission: Submission) -> None:
        self.submitted.append(weakref.ref(submission))

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def count_refused(self) -> None: ...


class Scene:
    """A handler over a `FakeEngine`, whose threads wait during the preparation of a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.handler = RequestHandler(self.engine, None, speculative_config_from_mapping({}), lambda: None)  # type: ignore
        self.read: list[str] = []
        self.may_end = threading.Event()
        self.ended: list[str] = []
        prepare = RequestPreparer.prepare

        def prepare_slowly(preparer: RequestPreparer, request: Any, name: str, parent: str) -> Submission:
            self.read.append(name)
            assert self.may_end.wait(WAIT_S)
            self.ended.append(name)
            return prepare(preparer, request, name, parent)

        monkeypatch.setattr(RequestPreparer, "prepare", prepare_slowly)

    def serve(
        self, name: str, on_submitted: Callable[[Callable[[], None]], object] = lambda _: None
    ) -> asyncio.Task[DraftwireError | None]:
        async def write(_: pb.GenerateResponse) -> None: ...

        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1, 4]), n=MAX_OPEN)
        return asyncio.create_task(self.handler.serve(request, name, (), write, on_submitted))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(
    monkeypatch: pytest.MonkeyPatch, play: Callable[[Scene], Awaitable[None]], num_threads: int = MAX_OPEN
) -> None:
    """Play a scene; asyncio must have nothing to log, such as an exception that nobody reads."""
    logged: list[str] = []

    async def run_scene() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context["message"]))
        loop.set_default_executor(ThreadPoolExecutor(num_threads))
        scene = Scene(monkeypatch)
        try:
            await play(scene)
        finally:
            scene.may_end.set()

    asyncio.run(run_scene())
    gc.collect()
    assert logged == []


def test_a_cancelled_request_counts_until_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        begun = scene.serve("first")
        await until(lambda: len(scene.read) == 1)
        await cancelled(begun)
        assert isinstance(await scene.serve("one more"), QueueFullError)
        scene.may_end.set()
        await until(lambda: scene.ended == ["first"])
        await asyncio.sleep(0.1)  # until the loop knows that the thread has ended
        accepted = scene.serve("the next")
        await until(lambda: len(scene.engine.submitted) == 1)
        await cancelled(accepted)

    run(monkeypatch, play)


def test_a_request_cancelled_before_its_turn_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        scene.engine.facts = replace(scene.engine.facts, max_open=3 * MAX_OPEN)
        first, second = scene.serve("first"), scene.serve("second")
        await until(lambda: len(scene.read) == 1)
        await cancelled(second)
        scene.may_end.set()
        await until(lambda: len(scene.engine.submitted) == 1)
        third = scene.serve("third")
        await until(lambda: len(scene.read) == 2)
        await cancelled(first, third)
        assert scene.read == ["first", "third"]

    run(monkeypatch, play, num_threads=1)


def test_a_request_cancelled_while_it_is_read_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(scene: Scene) -> None:
        begun = scene.serve("r1")
        await until(lambda: scene.read == ["r1"])
        await cancelled(begun)

    with caplog.at_level(logging.INFO):
        run(monkeypatch, play)
    (record,) = [one for one in caplog.records if one.message == "request finished"]
    assert record.fields == {"request_id": "r1", "reason": "cancelled", "output_tokens": 0}  # type: ignore[attr-defined]


def test_a_submitted_request_may_be_ended_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        scene.may_end.set()
        # The second call has no effect.
        running = scene.serve("r1", lambda end: (end(), end()))
        assert isinstance(await running, AbortedError)
        assert scene.engine.cancelled == [0, 1]
        assert not scene.handler.open_outputs

    run(monkeypatch, play)


def test_the_prompt_is_not_kept_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 131,072 tokens takes 4 MiB."""

    class Prompt(list[int]):
        """A list that allows weak references."""

    async def play(scene: Scene) -> None:
        prompts: list[weakref.ref[Prompt]] = []

        def read(_: PromptReader, request: pb.GenerateRequest) -> Prompt:
            prompts.append(weakref.ref(prompt := Prompt(request.token_ids.ids)))
            return prompt

        monkeypatch.setattr(PromptReader, "read", read)
        scene.may_end.set()
        running = scene.serve("r1")
        await until(lambda: len(scene.engine.submitted) == 1)
        await asyncio.sleep(0.1)  # until the thread drops its references
        gc.collect()
        assert prompts[0]() is None
        assert scene.engine.submitted[0]() is None
        await cancelled(running)

    run(monkeypatch, play)
