"""The engine: what ends one request or one stream alone, and what ends everything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafting_scene import RecordedStream, answer_to, make_head, rows_of, tokens_of
from engine_scene import HIDDEN, NUM_LAYERS, WAIT_S, K, Served, scheduling  # noqa: F401
from tiny_targets import VOCAB

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.model.tensors import decode_tensor, encode_tensor
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.drafters import audit, features, placement
from verifier_service.drafters.stream import Answered, Disconnected
from verifier_service.engine import executor, outputs
from verifier_service.engine.step import Stage, Step
from verifier_service.pacing import DraftingPolicy
from verifier_service.target.target import Target

pytestmark = pytest.mark.usefixtures("scheduling")

REDUCED = torch.tensor([1, 4, 5, 6, 7, 11, 19])
DENSE = {"draft_sample_method": "gumbel", "draft_logits": "dense"}


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


def test_an_answer_without_drafts_keeps_no_step_waiting(target, monkeypatch):
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
    assert counted == with_drafts[: len(counted)]  # the last answer may come when the request has ended
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
    for observe in ("observe_first", "observe_next"):  # each is called once a step, as its output is delivered
        monkeypatch.setattr(own.engine.metrics, observe, lambda *_: order.append("delivered"))
    own.run(one)
    assert order == ["sent", "delivered"] * one.verify_steps + ["delivered"]


def test_a_prompt_with_a_cached_beginning_continues_from_there(served):
    stream = served.connect()
    prompt = [(5 * i) % VOCAB for i in range(2 * BLOCK_SIZE + 3)]
    first = served.submit(prompt)
    output = served.tokens(first)
    second = served.submit(prompt)
    third = served.submit([*prompt, *output, 1])
    assert served.tokens(second) == output
    served.tokens(third)
    assert [one.num_prefix_hits for one in (first, second, third)] == [0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    counters = served.engine.counters()
    assert counters.prefix_hit_rows == 4 * BLOCK_SIZE
    assert counters.prompt_rows == len(prompt) + 3 + 3 + len(output) + 1
    computed = features_of(stream, 1)
    for sequence in (2, 3):
        sent = features_of(stream, sequence)
        assert torch.equal(sent[: 2 * BLOCK_SIZE], computed[: 2 * BLOCK_SIZE])
        torch.testing.assert_close(sent[: len(prompt)], computed[: len(prompt)], rtol=0, atol=1e-3)


def test_a_prefix_older_than_the_drafter_is_computed_again(served):
    prompt = [(5 * i) % VOCAB for i in range(2 * BLOCK_SIZE + 3)]
    output = served.tokens(served.submit(prompt))
    stream = served.connect()
    plain, drafting, again = (served.submit(prompt, k=k) for k in (0, K, K))
    assert [served.tokens(one) for one in (plain, drafting, again)] == [output] * 3
    later = served.submit(prompt)
    assert served.tokens(later) == output
    assert plain.num_prefix_hits == later.num_prefix_hits == 2 * BLOCK_SIZE
    assert drafting.num_prefix_hits == 0
    assert sum(drafting.drafted) > 0
    assert all(row == 0 for step in stream.steps for row in step.opened.first_rows)


def features_of(stream: RecordedStream, sequence: int) -> torch.Tensor:
    """All features that a drafter was sent of a sequence, row after row."""
    rows = []
    for step in (step for step in stream.steps if step.num_rows):
        features = decode_tensor(step.features, "features", torch.float32, (sum(step.num_rows), 2 * HIDDEN))
        parts = dict(zip(step.sequence_ids, features.split(list(step.num_rows)), strict=True))
        rows += [parts[sequence]] if sequence in parts else []
    return torch.cat(rows)


def test_rows_of_a_request_that_failed_are_computed_again(served, greedy, target, monkeypatch):
    prompt = [(5 * i) % VOCAB for i in range(2 * BLOCK_SIZE + 3)]
    expected = served.tokens(served.submit(prompt))
    own = Served(target)
    own.engine.start()
    forward = target.forward

    def spoil(*arguments: Any) -> Any:
        output = forward(*arguments)
        return output._replace(logits=torch.full_like(output.logits, torch.nan))

    monkeypatch.setattr(target, "forward", spoil)
    assert "not finite" in own.error(own.submit(prompt))
    monkeypatch.setattr(target, "forward", forward)
    second = own.submit(prompt)
    assert own.tokens(second) == expected
    assert second.num_prefix_hits == 0
    assert own.tokens(own.submit()) == greedy
    own.engine.stop()


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


@pytest.mark.full
def test_output_stays_the_same_while_the_number_of_drafts_jumps(target, monkeypatch):
    """From step to step between none and all, the drafter given up and taken up again."""
    draw = random.Random(0)

    monkeypatch.setattr(placement, "MAX_PAUSED_ROWS", 0)
    monkeypatch.setattr(DraftingPolicy, "count", lambda policy, _: policy.pin(draw.randrange(K + 1)))
    own = Served(target, draft_deadline_s=WAIT_S)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8]]
    own.engine.start()
    alone = [own.tokens(own.submit(prompt, max_tokens=50)) for prompt in prompts]
    texts = {tuple(prompt): prompt + tokens for prompt, tokens in zip(prompts, alone, strict=True)}
    stream = own.connect()
    sequences: dict[int, list[int]] = {}  # each sequence's prompt and all that the target says after it

    def answer(step: pb.DraftStep) -> None:
        """Each second draft is what the target says, as far as it is known which sequence it is."""
        tokens = tokens_of(step) if step.num_rows else []
        drafts = pb.Drafts(step_id=step.step_id)
        drawn: list[int] = []
        end = 0
        for (sequence_id, first, rows), wanted in zip(rows_of(step), step.num_drafts, strict=True):
            end += rows
            if sequence_id not in sequences:
                own_rows = tokens[end - rows : end]
                sequences[sequence_id] = next(
                    (text for text in texts.values() if text[first + 1 : first + 1 + rows] == own_rows), [0] * 64
                )
            if wanted:
                length = first + rows + 1
                drafts.sequence_ids.append(sequence_id)
                drafts.statuses.append(pb.SEQUENCE_STATUS_OK)
                drafts.committed_lengths.append(length)
                drafts.last_tokens.append(tokens[end - 1])
                text = sequences[sequence_id] + [0] * K
                made = [text[length + j] if draw.random() < 0.7 else 11 for j in range(wanted)]
                drafts.num_drafts.append(len(made))
                drawn += made
        encode_tensor(torch.tensor(drawn, dtype=torch.int32), drafts.tokens)
        own.engine.post(Answered(stream, drafts))

    stream.on_send = answer
    requests = [own.submit(prompt, max_tokens=50) for prompt in prompts]
    assert [own.tokens(one) for one in requests] == alone
    own.engine.stop()
    assert stream.failure is None
    counts = {wanted for step in stream.steps for wanted in step.num_drafts}
    assert counts == set(range(K + 1))
    assert any(step.closed_ids for step in stream.steps[:-1])  # given up on the way
    assert sum(sum(one.accepted) for one in requests) > 10


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
    """Not a request, or a stream, after the other."""

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
    assert use.kv_cache_token_bytes == NUM_LAYERS * (8 + 8) * 4  # one head of 8
    assert use.kv_cache_tokens == 32 * BLOCK_SIZE
    assert use.features_bytes == 33 * BLOCK_SIZE * 2 * HIDDEN * 4  # of two layers, the padding block's too
    assert use.draft_logits_bytes == 0


def connect_briefly(served: Served) -> RecordedStream:
    """A drafter with a reduced vocabulary that is gone as soon as it has answered with drafts."""
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
    own.engine.start()
    assert [len(own.tokens(one)) for one in requests] == [12, 12, 12]
    assert [one.drafted for one in requests] == [[0, 0, 0]] * 3
    assert len(brief.steps) == 1
    own.engine.stop()


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
    own.engine.start()
    assert [len(own.tokens(one)) for one in requests] == [12] * 4
    own.engine.stop()
    assert {len(REDUCED), VOCAB - 1} in widths
    assert [stream.failure for stream in streams] == [None, None]


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
