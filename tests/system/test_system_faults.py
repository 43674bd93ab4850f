"""Drafters that die, hang, start late or are shared: every request completes with the same greedy output."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import grpc
import pytest
from addresses import free_address
from services import Pair, crowd, drafted_share, drafter_status, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.client import Completion
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("faults")

# Required recovery time: drafting resumes within this many seconds after the drafter is healthy again.
RECOVERY_S = 10.0
# Long enough for drafts to arrive on a machine that also runs other tests.
DEADLINE_MS = "1000"


@pytest.fixture(scope="module")
def own_pair(shelf, tmp_path_factory):
    pair = Pair(
        shelf.target("llama"), {"good": shelf.head("llama", "good")}, tmp_path_factory.mktemp("faults"), DEADLINE_MS
    )
    yield pair
    pair.stop()


@pytest.fixture
def pair(own_pair) -> Pair:
    own_pair.use("good")
    return own_pair


@pytest.fixture(scope="module")
def continuations(references):
    return references("llama").continuations


class Requests:
    """Greedy requests in a background thread, batch after batch until the context exits."""

    def __init__(self, client: Client, continuations) -> None:
        self._client = client
        self._continuations = continuations
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self.batches: list[list[Completion]] = []

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.batches.append(say(self._client, self._continuations))
        except BaseException as error:  # raised in the test's thread
            self._error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_until_running(self) -> None:
        """Wait until several requests are running."""
        wait_for(lambda: self._error is not None or self._client.info().requests_running > 1, "requests are running")

    def wait_for_share(self, condition: Callable[[float], bool], what: str) -> None:
        """Wait for a batch, started after this call, whose `drafted_share` meets the condition."""
        old = len(self.batches) + 1
        wait_for(
            lambda: self._error is not None or any(condition(drafted_share(batch)) for batch in self.batches[old:]),
            what,
        )


def say(client: Client, continuations) -> list[Completion]:
    """Complete all prompts concurrently and check that the tokens equal transformers'."""
    options = {"temperature": 0, "max_tokens": 48, "num_speculative_tokens": 4}
    completions = crowd(client, [(c.prompt, options) for c in continuations])
    assert [list(completion.token_ids) for completion in completions] == [c.tokens for c in continuations]
    return completions


def is_high(share: float) -> bool:
    """Return whether most output tokens are accepted drafts."""
    return share > 0.5


def is_zero(share: float) -> bool:
    return share == 0


def test_a_verifier_serves_before_its_drafter_and_takes_it_up(own_pair, continuations):
    own_pair.kill_drafter()
    assert drafter_status(own_pair.client, own_pair.drafter_address).state == pb.DRAFTER_STATE_CONNECTING
    assert drafted_share(say(own_pair.client, continuations)) == 0
    with Requests(own_pair.client, continuations) as requests:
        requests.wait_until_running()
        own_pair.start_drafter("good")
        requests.wait_for_share(is_high, "drafts are accepted")


def test_a_killed_drafter_ends_no_request_and_returns_in_time(pair, continuations):
    before = drafted_share(say(pair.client, continuations))
    assert is_high(before)
    with Requests(pair.client, continuations) as requests:
        wait_for(lambda: drafter_status(pair.client, pair.drafter_address).sequences > 1, "sequences draft there")
        pair.kill_drafter()
        requests.wait_for_share(is_zero, "requests complete without drafts")
        pair.start_drafter("good")
        healthy = time.monotonic()
        after = 0.0
        while after < 0.9 * before:
            assert time.monotonic() - healthy < RECOVERY_S, f"drafted share is {after}, was {before}"
            after = drafted_share(say(pair.client, continuations[:8]))


def test_a_hanging_drafter_stops_no_request_and_drafts_again(pair, continuations):
    pair.drafter.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        while time.monotonic() - stopped < 2:
            say(pair.client, continuations)
        assert drafted_share(say(pair.client, continuations)) == 0
    finally:
        pair.drafter.send_signal(signal.SIGCONT)
    wait_for(lambda: is_high(drafted_share(say(pair.client, continuations))), "drafts are accepted again")


def test_two_verifiers_share_a_drafter_and_one_verifier_uses_two(pair, shelf, continuations, tmp_path):
    """The second verifier uses the first verifier's drafter and a second drafter, which is then killed."""
    target, head = shelf.target("llama"), shelf.head("llama", "good")
    second_address = free_address()
    second = start_drafter(
        head, target, "--device", "cpu", "--listen", second_address, log_path=tmp_path / "drafter.log"
    )
    both = [pair.drafter_address, second_address]
    options = ("--device", "cpu", "--draft-deadline-ms", DEADLINE_MS, "--no-adaptive-k")
    verifier = start_verifier(target, both, *options, log_path=tmp_path / "verifier.log")
    try:
        with Client(verifier.address) as client, grpc.insecure_channel(pair.drafter_address) as channel:
            for address in both:
                wait_for_drafter(client, address)
            info = draft_pb2_grpc.DraftingStub(channel).GetDrafterInfo(draft_pb2.GetDrafterInfoRequest())
            assert info.load.sessions == 2
            with Requests(pair.client, continuations) as first, Requests(client, continuations) as requests:
                wait_for(
                    lambda: all(drafter_status(client, address).sequences > 0 for address in both),
                    "both drafters have sequences",
                )
                second.kill()
                wait_for_drafter(client, second_address, pb.DRAFTER_STATE_CONNECTING)
                requests.wait_for_share(is_high, "drafts of the other drafter are accepted")
                first.wait_for_share(is_high, "the other verifier's drafts are accepted")
    finally:
        verifier.kill()
        second.kill()
