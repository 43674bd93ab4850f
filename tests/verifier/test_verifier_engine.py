"""The engine: failures of one request or of all, and events while a step is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafting_scene import RecordedStream, answer_to, make_head
from engine_scene import HIDDEN, NUM_LAYERS, WAIT_S, K, Served, features_of
from tiny_targets import VOCAB

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.drafters import audit, features
from verifier_service.drafters import session as draft_session
from verifier_service.drafters.stream import Answered, Disconnected
from verifier_service.engine import executor, outputs
from verifier_service.engine.step import Stage, Step
from verifier_service.target.target import Target

pytestmark = pytest.mark.usefixtures("scheduling")

PROMPT = [(5 * i) % VOCAB for i in range(2 * BLOCK_SIZE + 3)]
REDUCED = torch.tensor([1, 4, 5, 6, 7, 11, 19])
DENSE = {"draft_sample_method": "gumbel", "draft_logits": "dense"}


@pytest.fixture
def served(target: Target) -> Iterator[Served]:
    with Served(target) as own:
        yield own


@pytest.fixture(scope="module")
def greedy(target: Target) -> list[int]:
    """Return the target's output without drafts."""
    own = Served(target)
    (tokens,) = own.run(own.submit())
    assert len(set(tokens)) > 3
    return tokens


def test_answers_without_drafts_are_not_counted(target, monkeypatch):
    own = Served(target, max_prefill_rows=4)
    computed_s, counted = [], []
    monkeypatch.setattr(own.engine.times, "count_answer", lambda seconds, **_: counted.append(seconds))

    def on_send(step: pb.DraftStep) -> None:
        answer = answer_to(step)
        answer.compute_time_s = 1e-6 * (1 + len(computed_s))
        computed_s.append((any(step.num_drafts), answer.compute_time_s))
        own.engine.post(Answered(stream, answer))

    stream = own.connect()
    stream.on_send = on_send
    one = own.submit([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    own.run(one)
    with_drafts = [seconds for has_drafts, seconds in computed_s if has_drafts]
    assert counted == with_drafts[: len(counted)]  # the last answer may arrive after the request's end
    assert len(with_drafts) - 1 <= len(counted) < len(computed_s) - 1


def test_the_drafter_has_a_step_before_its_output_is_delivered(target, monkeypatch):
    own = Served(target)
    order: list[str] = []
    stream = own.connect()
    answer, one = stream.on_send, own.submit()

    def on_send(step: pb.DraftStep) -> None:
        order.extend(["sent"] * len(step.sequence_ids))
        answer(step)

    stream.on_send = on_send
    for observe in ("observe_first", "observe_next"):  # each step calls one of the two when its output is delivered
        monkeypatch.setattr(own.engine.metrics, observe, lambda *_: order.append("delivered"))
    own.run(one)
    assert order == ["sent", "delivered"] * one.verify_steps + ["delivered"]


def test_a_prompt_with_a_cached_beginning_continues_from_there(served):
    stream = served.connect()
    first = served.submit(PROMPT)
    output = served.tokens(first)
    second = served.submit(PROMPT)
    third = served.submit([*PROMPT, *output, 1])
    assert served.tokens(second) == output
    served.tokens(third)
    assert [one.num_prefix_hits for one in (first, second, third)] == [0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    counters = served.engine.counters()
    assert counters.prefix_hit_rows == 4 * BLOCK_SIZE
    assert counters.prompt_rows == len(PROMPT) + 3 + 3 + len(output) + 1
    computed = features_of(stream.steps, 1)
    for sequence in (2, 3):
        sent = features_of(stream.steps, sequence)
        assert torch.equal(sent[: 2 * BLOCK_SIZE], computed[: 2 * BLOCK_SIZE])
        torch.testing.assert_close(sent[: len(PROMPT)], computed[: len(PROMPT)], rtol=0, atol=1e-3)


def test_a_prefix_older_than_the_drafter_is_computed_again(served):
    output = served.tokens(served.submit(PROMPT))
    stream = served.connect()
    plain, drafting, again = (served.submit(PROMPT, k=k) for k in (0, K, K))
    assert [served.tokens(one) for one in (plain, drafting, again)] == [output] * 3
    later = served.submit(PROMPT)
    assert served.tokens(later) == output
    assert plain.num_prefix_hits == later.num_prefix_hits == 2 * BLOCK_SIZE
    assert drafting.num_prefix_hits == 0
    assert sum(drafting.drafted) > 0
    assert all(row == 0 for step in stream.steps for row in step.opened.first_rows)


def test_rows_of_a_request_that_failed_are_computed_again(served, greedy, target, monkeypatch):
    other = Served(target)
    (expected,) = other.run(other.submit(PROMPT))
    forward = target.forward

    def spoil(*arguments: Any) -> Any:
        output = forward(*arguments)
        return output._replace(logits=torch.full_like(output.logits, torch.nan))

    monkeypatch.setattr(target, "forward", spoil)
    assert "not finite" in served.error(served.submit(PROMPT))
    monkeypatch.setattr(target, "forward", forward)
    second = served.submit(PROMPT)
    assert served.tokens(second) == expected
    assert second.num_prefix_hits == 0
    assert served.tokens(served.submit()) == greedy


def test_drafts_that_the_target_says_itself_are_accepted(served, greedy):
    stream = served.connect()

    def answer(step: pb.DraftStep) -> None:
        length = step.first_rows[0] + step.num_rows[0] + 1 if step.num_rows else 0
        served.engine.post(Answered(stream, answer_to(step, greedy[length - 5 :][:K])))

    stream.on_send = answer
    one = served.submit()
    assert served.tokens(one) == greedy
    assert one.accepted == one.drafted
    assert one.verify_steps == 3  # 12 tokens: 1 with the prompt, then 4, 4 and 3


def test_a_step_that_fails_ends_its_requests_and_no_later_one(served, greedy, target, monkeypatch):
    forward = target.forward

    def fail_once(*_: Any) -> torch.Tensor:
        monkeypatch.setattr(target, "forward", forward)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target, "forward", fail_once)
    assert served.error(served.submit()) == "the step failed: out of memory"
    assert served.tokens(served.submit()) == greedy
    assert not served.has_failed.is_set()


@pytest.mark.parametrize("failing", ["step", "features"])
def test_a_device_that_is_lost_ends_the_engine(failing, served, target, monkeypatch):
    """The engine fails as a whole, instead of failing each request or stream in turn."""

    def fail(*_: Any) -> Any:
        for module in (executor, outputs):
            monkeypatch.setattr(module, "check_context", fail)
        raise RuntimeError("an illegal memory access")

    if failing == "step":
        monkeypatch.setattr(target, "forward", fail)
    else:
        monkeypatch.setattr(features, "FeatureStore", fail)
        served.connect(layers=(1, 2))
    assert served.error(served.submit()) == "the engine failed: an illegal memory access"
    assert served.has_failed.is_set()
    assert served.error(served.submit()) == "the engine failed: an illegal memory access"


def test_features_without_memory_fail_only_their_stream(served, greedy, monkeypatch):
    def allocate(target: Target, layers: tuple[int, ...], *rest: Any) -> Any:
        if layers == (3,):
            raise RuntimeError("not enough memory")
        return make_store(target, layers, *rest)

    make_store = features.FeatureStore
    monkeypatch.setattr(features, "FeatureStore", allocate)
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


def test_memory_is_that_of_the_cache_and_its_features(served):
    assert served.engine.memory.features_bytes == 0
    served.connect()
    served.tokens(served.submit())
    use = served.engine.memory
    assert use.kv_cache_token_bytes == NUM_LAYERS * (8 + 8) * 4  # one head of size 8
    assert use.kv_cache_tokens == 32 * BLOCK_SIZE
    assert use.features_bytes == 33 * BLOCK_SIZE * 2 * HIDDEN * 4  # two layers, including the padding block
    assert use.draft_logits_bytes == 0


def connect_briefly(served: Served) -> RecordedStream:
    """Connect a drafter with a reduced vocabulary that disconnects after its first answer."""
    stream = served.connect(draft_token_ids=REDUCED, draft_vocab_size=len(REDUCED))
    answer = stream.on_send

    def answer_and_go(step: pb.DraftStep) -> None:
        answer(step)
        served.engine.post(Disconnected(stream))

    stream.on_send = answer_and_go
    return stream


def test_a_drafter_that_goes_before_the_step_fails_no_request(target, monkeypatch):
    monkeypatch.setattr(audit, "REDRAW_SHARE", 0)
    own = Served(target, DENSE)
    brief = connect_briefly(own)
    requests = [own.submit(temperature=temperature) for temperature in (0.0, 1.0, 1.0)]
    assert [len(tokens) for tokens in own.run(*requests)] == [12, 12, 12]
    assert [one.drafted for one in requests] == [[0, 0, 0]] * 3
    assert len(brief.steps) == 1


def test_drafts_of_heads_of_different_vocabularies_share_a_step(target, monkeypatch):
    monkeypatch.setattr(audit, "REDRAW_SHARE", 0)
    own = Served(target, DENSE)
    columns = [REDUCED, torch.arange(VOCAB - 1)]
    streams = [own.connect(draft_token_ids=ids, draft_vocab_size=len(ids)) for ids in columns]
    widths: list[set[int]] = []

    def note(step: Step) -> None:
        answers = [row.drafts.logits for row in step.rows if row.drafts is not None]
        widths.append({logits.values.shape[1] for logits in answers if logits is not None})

    own.on_stage(Stage.SAMPLED, note)
    requests = [own.submit(temperature=1.0) for _ in range(4)]
    assert [len(tokens) for tokens in own.run(*requests)] == [12] * 4
    assert {len(REDUCED), VOCAB - 1} in widths
    assert [stream.failure for stream in streams] == [None, None]


def test_a_failure_outside_a_step_ends_all_requests(target, monkeypatch):
    own = Served(target, max_num_seqs=2)
    requests = [own.submit(max_tokens=50) for _ in range(3)]

    def handle(event: Any) -> None:
        raise LookupError(f"no {type(event).__name__}")

    monkeypatch.setattr(own.engine.drafting, "handle", handle)
    own.engine.post(Disconnected(RecordedStream(make_head())))
    with own:
        assert [own.error(one) for one in requests] == ["the engine failed: no Disconnected"] * 3
        assert own.has_failed.wait(WAIT_S)


def test_stop_gives_the_requests_that_are_left_an_error(target):
    own = Served(target, max_num_seqs=2)
    stream = own.connect()
    stream.on_send = lambda _: None  # never answers: without a deadline its requests wait
    requests = [own.submit() for _ in range(3)]
    with own:
        assert isinstance(own.next(requests[0]), generate_pb2.GenerateResponse)
    assert [own.error(one) for one in requests] == ["the server is shutting down"] * 3
    assert not own.has_failed.is_set()



@pytest.mark.parametrize("prompt", [5, 40])
def test_no_row_without_features_is_sent(target, prompt):
    """A drafter connects while a step is in flight; its feature store lacks the rows of that step."""
    own = Served(target, max_prefill_rows=16)
    streams: list[RecordedStream | None] = []
    own.on_stage(Stage.SAMPLED, lambda _: streams.append(own.connect() if len(streams) == 1 else None))
    own.run(own.submit([1 + i % 7 for i in range(prompt)], max_tokens=12))
    stream = streams[1]
    assert stream is not None
    assert features_of(stream.steps).any(dim=1).all()


@pytest.mark.parametrize("kind", [{"presence_penalty": 0.5}, pytest.param({"min_tokens": 50}, marks=pytest.mark.full)])
def test_requests_without_drafts_share_steps(target, kind):
    """The second request arrives while a step of the first request is in flight."""
    own = Served(target)
    sizes: list[int] = []
    made: list[Any] = []

    def act(step: Step) -> None:
        sizes.append(len(step.rows))
        if len(sizes) == 4:
            made.append(own.submit([2, 7], k=0, max_tokens=50, **kind))

    own.on_stage(Stage.SAMPLED, act)
    first = own.submit(k=0, max_tokens=50, **kind)
    with own:
        own.tokens(first)
        own.tokens(made[0])
    assert sizes.count(1) < 12, sizes


def test_a_lost_drafter_frees_its_requests(target, monkeypatch):
    monkeypatch.setattr(draft_session, "LOST_AFTER_S", 0.3)
    own = Served(target)
    stream = own.connect()
    stream.on_send = lambda _: None
    (tokens,) = own.run(own.submit(max_tokens=12))
    assert len(tokens) == 12


@pytest.mark.parametrize("number", [1, 3])
def test_a_failed_launch_does_not_leave_the_queue_asleep(target, number):
    own = Served(target, max_num_seqs=1)
    calls: list[Step] = []

    def fail(step: Step) -> None:
        calls.append(step)
        if len(calls) == number:
            raise RuntimeError("lost")

    own.on_stage(Stage.RELEASED, fail)
    first, second = own.submit(k=0), own.submit(k=0)
    with own:
        assert "lost" in own.error(first)
        own.tokens(second)


@pytest.mark.full
def test_one_missed_deadline_costs_one_step_without_drafts(target):
    """The late answer arrives while the step without its drafts is in flight."""
    own = Served(target, draft_deadline_s=0.5, adaptive_k=False)
    stream = own.connect()
    answer = stream.on_send
    held: list[Any] = []
    asked: list[Any] = []
    drafts: list[int] = []

    def on_send(step: Any) -> None:
        if any(step.num_drafts):
            asked.append(step)
        if len(asked) == 3 and asked[-1] is step:
            held.append(step)
        else:
            answer(step)

    def act(step: Step) -> None:
        drafts.append(sum(row.num_drafts for row in step.rows))
        if held:
            answer(held.pop())

    stream.on_send = on_send
    own.on_stage(Stage.SAMPLED, act)
    one = own.submit(max_tokens=40)
    own.run(one)
    assert drafts[1:-1].count(0) == 1, drafts
    causes = Counter({generate_pb2.FallbackCause.Name(c.cause): c.tokens for c in own.engine.counters().fallbacks})
    assert causes["FALLBACK_CAUSE_LATE"] == 1, causes
