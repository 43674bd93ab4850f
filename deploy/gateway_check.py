"""The part of the check that chats through the gateway while verifiers come and go."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import click

from deploy.stack import GATEWAY, PROMETHEUS, Stack, wait_until
from draftwire import Client
from draftwire.client.request import ChatMessage

PROMPTS = ["Write a function that sorts a list.", "Write a class for a stack.", "Read lines of a file.", "Parse JSON."]
OUTPUT_TOKENS = 100
NUM_CLIENTS = 4
HTTP_TIMEOUT_S = 300.0
# Queries of Prometheus and their values: both verifiers and the gateway are scraped, and the gateway has routed chats.
SCRAPED = {
    'count(up{job="verifier"} == 1)': 2.0,
    'up{job="gateway"}': 1.0,
    'sum(smg_worker_selection_total{job="gateway"}) > bool 0': 1.0,
}


class Chats:
    """Clients of OpenAI's HTTP API that chat greedily, one request after another."""

    def __init__(self, model: str, expected: Sequence[str]) -> None:
        """`expected` has the answer to each prompt."""
        self._model = model
        self._expected = expected
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self.requests = 0
        self.problems: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clients; leave when their last requests have ended."""
        threads = [threading.Thread(target=self._chat, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_stopped.set()
            for thread in threads:
                thread.join()

    def wait_for(self, requests: int) -> None:
        """Wait until `requests` more requests have ended."""
        wanted = self.requests + len(self.problems) + requests
        while self.requests + len(self.problems) < wanted:
            time.sleep(0.1)

    def _chat(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._is_stopped.is_set():
                return
            which = turn % len(PROMPTS)
            try:
                text = self._ask(PROMPTS[which], stream=turn % 2 == 0)
            except (OSError, ValueError, LookupError) as error:
                with self._lock:
                    self.problems.append(f"a chat failed: {error}")
                time.sleep(1.0)
                continue
            with self._lock:
                self.requests += 1
                if text != self._expected[which]:
                    self.problems.append(f"the answer to chat {which} changed: {text!r}")

    def _ask(self, prompt: str, *, stream: bool) -> str:
        asked = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        body = json.dumps({**asked, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": stream}).encode()
        request = Request(f"http://{GATEWAY}/v1/chat/completions", body)
        request.add_header("content-type", "application/json")
        with urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
            if not stream:
                return str(json.load(answer)["choices"][0]["message"]["content"])
            events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            raise ValueError(f"the stream ended with {events[-1]}")
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print the counts of a stage."""
        requests = self.requests
        yield
        click.echo(f"{name}: {self.requests - requests} chats, {len(self.problems)} problems so far")


def check_gateway(stack: Stack, requests: int) -> list[str]:
    """Chat through the gateway with 2, 1 and 2 verifiers, let Prometheus scrape it, and return the problems."""
    stack.scale(2, verifiers=2)
    stack.start("gateway", "prometheus")
    _wait_for_verifiers(2)
    stack.inspect("gateway")
    chats = Chats(*_expected(stack))
    with chats.running():
        with chats.stage("2 verifiers behind the gateway"):
            chats.wait_for(requests)
        with chats.stage("1 verifier, the other drains"):
            stack.scale(2, verifiers=1)
            _wait_for_verifiers(1)
            chats.wait_for(requests)
        with chats.stage("2 verifiers again"):
            stack.scale(2, verifiers=2)
            _wait_for_verifiers(2)
            chats.wait_for(requests)
            wait_until(lambda: min(_steps(stack)) > 0, True, "chats of each verifier")
    _check_prometheus()
    stack.remove("gateway", "prometheus")
    stack.scale(2)
    return chats.problems


def _expected(stack: Stack) -> tuple[str, list[str]]:
    """Return the served model, and its greedy answers without drafts and without the gateway."""
    options: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    with Client(stack.servers()[0]) as client:
        answers = [
            client.complete([ChatMessage(role="user", content=prompt)], num_speculative_tokens=0, **options).text
            for prompt in PROMPTS
        ]
        return client.info().target, answers


def _steps(stack: Stack) -> list[int]:
    """Return the steps that each verifier has computed."""
    steps = []
    for server in stack.servers():
        with Client(server) as client:
            steps.append(client.info().counters.steps)
    return steps


def _wait_for_verifiers(count: int) -> None:
    """Wait until the gateway knows this many verifiers, all of them healthy."""
    wait_until(_verifiers, [count, count], "healthy verifiers of the gateway, and all")


def _verifiers() -> list[int] | str:
    """Return how many verifiers are healthy, and how many the gateway knows, or why it is not ready."""
    try:
        found = _get(f"http://{GATEWAY}/readiness")
    except OSError as error:
        return str(error)
    return [found["healthy_workers"], found["total_workers"]]


def _check_prometheus() -> None:
    """Wait until Prometheus has metrics of the gateway and of both verifiers."""
    for query, value in SCRAPED.items():
        wait_until(partial(_value, query), value, f"Prometheus has {query}")
    click.echo("Prometheus scrapes the gateway and both verifiers")


def _value(query: str) -> float | str | None:
    """Return the value of a query that has one result, None without a result, or why Prometheus does not answer."""
    try:
        found = _get(f"http://{PROMETHEUS}/api/v1/query?{urlencode({'query': query})}")["data"]["result"]
    except OSError as error:
        return str(error)
    return float(found[0]["value"][1]) if found else None


def _get(url: str) -> dict[str, Any]:
    with urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        return dict(json.load(answer))
