"""Answers of drafters: the drafts that are used, and the answers that expel the drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_scene import DENSE, GUMBEL, Change, start, tokens
from drafting_scene import (
    CPU,
    VOCAB,
    K,
    Scene,
    answer_to,
    rows_of,
)

from draftwire.model.tensors import decode_tensor, encode_tensor
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import gumbel_sample
from verifier_service.core.request import AnswerLogits, ReadyDrafts
from verifier_service.drafters import audit
from verifier_service.drafters.answers import find_mismatched


def test_drafts_that_continue_the_request_are_given_to_it():
    scene, stream, one = start()
    scene.answer(stream)
    assert (one.drafts.committed_length, one.drafts.last_token) == (5, 9)
    assert one.drafts.tokens == [5, 6, 7]
    assert scene.drafting.wait_policy.is_ready(one)


@pytest.mark.parametrize(("field", "value"), [("committed_lengths", 4), ("committed_lengths", 6), ("last_tokens", 8)])
def test_drafts_that_continue_something_else_are_not_used(field, value):
    scene, stream, one = start()
    answer = answer_to(stream.last)
    getattr(answer, field)[0] = value
    scene.answer(stream, answer)
    assert (one.drafts, stream.failure) == (None, None)
    assert scene.drafting.wait_policy.is_ready(one)


def test_drafts_for_what_the_request_was_before_are_not_used():
    scene, stream, one = start()
    scene.step(one, 3)
    scene.answer(stream, answer_to(stream.steps[0]))
    assert one.drafts is None
    assert not scene.drafting.wait_policy.is_ready(one)
    scene.answer(stream)
    assert one.drafts.committed_length == 6


def test_fewer_drafts_than_asked_are_used():
    scene, stream, one = start()
    scene.answer(stream, answer_to(stream.last, [5]))
    assert one.drafts.tokens == [5]


def test_a_request_missing_in_an_answer_has_no_drafts():
    scene, stream, one = start()
    scene.answer(stream, pb.Drafts(step_id=1))
    assert (one.drafts, stream.failure) == (None, None)
    assert scene.drafting.wait_policy.is_ready(one)


WRONG: dict[str, tuple[Change, str]] = {
    "more than asked": (tokens(1, 2, 3, 4), "drafts.num_drafts = 4: allowed range [0, 3]"),
    "above the vocabulary": (tokens(1, VOCAB), f"drafts.tokens = {VOCAB}: token ids must be in [0, {VOCAB})"),
    "negative": (tokens(-1, 2), "drafts.tokens = -1: token ids must be in [0"),
    "fewer tokens than counted": (lambda a: a.num_drafts.__setitem__(0, 2), "drafts.tokens.shape = (3,): must be [2]"),
    "no tokens": (lambda a: a.ClearField("tokens"), "drafts.tokens.dtype"),
    "cut data": (lambda a: setattr(a.tokens, "data", a.tokens.data[:-1]), "drafts.tokens.data = '11 bytes'"),
    "statuses": (lambda a: a.statuses.append(1), "drafts.statuses = '2 entries': must be 1"),
    "committed_lengths": (lambda a: a.ClearField("committed_lengths"), "drafts.committed_lengths = '0 entries'"),
    "last_tokens": (lambda a: a.last_tokens.append(1), "drafts.last_tokens = '2 entries': must be 1"),
    "num_drafts": (lambda a: a.num_drafts.append(0), "drafts.num_drafts = '2 entries': must be 1"),
    "a step to come": (lambda a: setattr(a, "step_id", 2), "answered step 2, which had no answer due"),
    "more sequences than were sent": (lambda a: a.sequence_ids.extend([7] * 99), "more sequences than step 1 had rows"),
    "no time": (lambda a: setattr(a, "compute_time_s", float("nan")), "computed for nan s"),
    "endless time": (lambda a: setattr(a, "compute_time_s", float("inf")), "computed for inf s"),
    "negative time": (lambda a: setattr(a, "compute_time_s", -1.0), "computed for -1.0 s"),
    "no step": (lambda a: setattr(a, "step_id", 0), "answered step 0, which had no answer due"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_drafter_that_answers_what_it_must_not_is_expelled(name):
    change, text = WRONG[name]
    scene, stream, one = start()
    answer = answer_to(stream.last)
    change(answer)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert text in stream.failure
    assert one.drafts is None
    assert scene.drafting.wait_policy.is_ready(one)
    assert scene.drafting.placement.sequences_at(stream.address) == 0


def sure_answer(step: pb.DraftStep, *confidences: float) -> pb.Drafts:
    answer = answer_to(step)
    answer.confidences.CopyFrom(encode_tensor(torch.tensor(confidences, dtype=torch.float32)))
    return answer


def test_drafts_have_the_confidences_that_came_with_them():
    scene, stream, one = start(confidences=True)
    scene.answer(stream, sure_answer(stream.last, 1.0, 0.25, 0.0))
    assert one.drafts.confidences == [1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("confidences", "text"),
    [
        ((0.5, 1.5, 0.5), "drafts.confidences = 1.5: allowed range [0, 1]"),
        ((0.5, 0.5, -0.25), "drafts.confidences = -0.25: allowed range [0, 1]"),
        ((float("nan"), 0.5, 0.5), "drafts.confidences = nan: allowed range [0, 1]"),
        ((float("inf"), 0.5, 0.5), "drafts.confidences = inf: allowed range [0, 1]"),
        ((0.5, 0.5), "drafts.confidences.shape = (2,): must be [3]"),
        (None, "drafts.confidences.dtype"),
    ],
    ids=["above 1", "negative", "nan", "inf", "too few", "none"],
)
def test_a_drafter_with_wrong_confidences_is_expelled(confidences, text):
    scene, stream, one = start(confidences=True)
    scene.answer(stream, answer_to(stream.last) if confidences is None else sure_answer(stream.last, *confidences))
    assert stream.is_expelled
    assert text in stream.failure
    assert one.drafts is None


def test_a_step_that_is_answered_twice_expels():
    scene, stream, _ = start()
    scene.answer(stream)
    scene.answer(stream)
    assert stream.is_expelled


def test_an_answer_takes_all_steps_before_it():
    scene, stream, one = start()
    scene.step(one, 3)
    scene.answer(stream)
    assert one.drafts.committed_length == 6
    assert scene.drafting.next_deadline() is None


def test_requests_of_an_expelled_drafter_go_to_another_one():
    scene, stream, one = start()
    other = scene.connect()
    scene.answer(stream, answer_to(stream.last, [VOCAB]))
    scene.flush()
    scene.answer(other)
    assert one.drafts.tokens == [5, 6, 7]


def test_late_answers_of_an_abandoned_drafter_are_ignored():
    scene, stream, one = start()
    scene.answer(stream, answer_to(stream.last, [VOCAB]))
    scene.answer(stream)
    scene.disconnect(stream)
    assert one.drafts is None


TOP_N = {**GUMBEL, "draft_logits": {"top_n": 4}}


REDUCED = torch.tensor([1, 4, 5, 6, 7, 11, 19])


def start_sampled(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], ids: torch.Tensor | None = None) -> Any:
    """Return (scene, stream, request) at temperature 0.8, with an audit of every answer."""
    monkeypatch.setattr(audit, "REDRAW_SHARE", 1)
    scene = Scene(config)
    stream = scene.connect(draft_token_ids=ids, draft_vocab_size=VOCAB if ids is None else len(ids))
    one = scene.decode(temperature=0.8, max_tokens=1000)
    scene.flush()
    return scene, stream, one


def honest_answer(step: pb.DraftStep, key: int, config: dict[str, Any], ids: torch.Tensor | None) -> pb.Drafts:
    """Return an answer whose drafts are sampled from its logits."""
    ((_, first, rows),), (count,) = rows_of(step), step.num_drafts
    draw = torch.Generator().manual_seed(step.step_id)
    width = VOCAB if ids is None else len(ids)
    form = config["draft_logits"]
    if form != "dense":
        width = form["top_n"]
    logits = 2 * torch.randn(count, width, generator=draw)
    drawn, columns = [], []
    for j in range(count):
        own = ids if form == "dense" else torch.randperm(VOCAB, generator=draw)[:width]
        column = gumbel_sample(
            logits[j : j + 1],
            torch.tensor([0.8]),
            torch.tensor([key]),
            torch.tensor([first + rows + 1 + j]),
            draft_offset=j,
            token_ids=own,
            use_fp64=config.get("use_fp64_gumbel", False),
        )
        drawn.append(int(column if own is None else own[column]))
        columns.append(own)
    answer = answer_to(step, drawn, logits)
    if form != "dense":
        encode_tensor(torch.stack(columns).int(), answer.logits_token_ids)
    return answer


HONEST = [
    (DENSE, None),
    (DENSE, REDUCED),
    ({**DENSE, "use_fp64_gumbel": True}, REDUCED),
    (TOP_N, None),
    (TOP_N, REDUCED),
]


@pytest.mark.parametrize(
    ("config", "ids"), HONEST, ids=["dense", "dense reduced", "dense reduced fp64", "top_n", "top_n reduced"]
)
def test_drafts_that_are_drawn_from_their_logits_never_expel(config, ids, monkeypatch):
    scene, stream, one = start_sampled(monkeypatch, config, ids)
    for _ in range(40):
        scene.answer(stream, honest_answer(stream.last, one.keys.proposal, config, ids))
        assert stream.failure is None
        assert one.drafts is not None
        scene.step(one, 3)


@pytest.mark.parametrize(("config", "ids"), [HONEST[0], HONEST[1], HONEST[3]], ids=["dense", "dense reduced", "top_n"])
def test_drafts_not_drawn_from_logits_are_unused_and_expel(config, ids, monkeypatch):
    scene, stream, one = start_sampled(monkeypatch, config, ids)
    for _ in range(audit.TOO_MANY_MISMATCHES):
        assert stream.failure is None
        scene.answer(stream, replace_last(honest_answer(stream.last, one.keys.proposal, config, ids)))
        assert one.drafts is None
        scene.step(one, 3)
    assert stream.is_expelled
    assert "are not what its logits sample" in stream.failure


@pytest.mark.parametrize("form", ["dense", "dense reduced", "top_n"])
def test_drafts_that_mismatch_logits_are_found_among_others(form):
    scene, draw = Scene(DENSE), torch.Generator().manual_seed(1)
    counts, width = (3, 1, 4), 7 if form != "dense" else VOCAB
    values = 2 * torch.randn(sum(counts), width, generator=draw)
    sent = torch.stack([torch.randperm(VOCAB, generator=draw)[:width] for _ in values]) if form == "top_n" else None
    reduced = REDUCED if form == "dense reduced" else None
    logits = AnswerLogits(values, None if sent is None else sent.int(), reduced)
    answers, first = [], 0
    for number, count in enumerate(counts):
        one = scene.decode(temperature=0.5 + number, max_tokens=1000)
        tokens = []
        for j in range(count):
            ids = reduced if sent is None else sent[first + j]
            arguments = [0.5 + number], [one.keys.proposal], [len(one.tokens) + j]
            row = values[first + j : first + j + 1]
            column = gumbel_sample(row, *map(torch.tensor, arguments), draft_offset=j, token_ids=ids)
            tokens.append(int(column if ids is None else ids[column]))
        answers.append((one, ReadyDrafts(len(one.tokens), one.tokens[-1], tokens, logits, first)))
        first += count
    assert find_mismatched(answers, use_fp64=False) == []
    for request, drafts in answers:
        wrong = drafts._replace(tokens=[*drafts.tokens[:-1], (drafts.tokens[-1] + 1) % VOCAB])
        others = [(request, wrong) if one is request else (one, its) for one, its in answers]
        (found,) = find_mismatched(others, use_fp64=False)
        assert found is wrong


def replace_last(answer: pb.Drafts) -> pb.Drafts:
    """Change the last draft of an answer; return the answer."""
    drawn = decode_tensor(answer.tokens, "tokens", torch.int32, (K,)).tolist()
    answer.ClearField("tokens")
    encode_tensor(torch.tensor([*drawn[:-1], (drawn[-1] + 1) % VOCAB], dtype=torch.int32), answer.tokens)
    return answer


def test_drafts_at_temperature_0_are_not_drawn_again(monkeypatch):
    monkeypatch.setattr(audit, "REDRAW_SHARE", 1)
    scene, stream, one = start(DENSE)
    for _ in range(5):
        scene.answer(stream, answer_to(stream.last, logits=torch.zeros(K, VOCAB)))
        assert one.drafts is not None
        scene.step(one, 3)
    assert stream.failure is None


def test_drafts_have_the_columns_of_their_own_head():
    scene = Scene(DENSE)
    stream = scene.connect(draft_token_ids=REDUCED, draft_vocab_size=len(REDUCED))
    one = scene.decode()
    scene.flush()
    logits = torch.randn(K, len(REDUCED))
    scene.connect(draft_token_ids=REDUCED + 1, draft_vocab_size=len(REDUCED))
    scene.answer(stream, answer_to(stream.last, logits=logits))
    scene.flush()
    assert torch.equal(one.drafts.logits.draft_token_ids, REDUCED)
    assert torch.equal(one.drafts.logits.values, logits)
    assert one.drafts.logits.draft_token_ids.device == CPU


@pytest.mark.parametrize(
    ("config", "logits", "text"),
    [
        (DENSE, None, "drafts.logits.dtype"),
        (DENSE, torch.zeros(K, VOCAB + 1), f"drafts.logits.shape = (3, {VOCAB + 1}): must be [3, {VOCAB}]"),
        (DENSE, torch.zeros(K, VOCAB).half(), "drafts.logits.dtype"),
        (TOP_N, torch.zeros(K, 5), "drafts.logits.shape = (3, 5): must be [3, 4]"),
        (TOP_N, torch.zeros(K, 4), "drafts.logits_token_ids.dtype"),
    ],
    ids=["missing", "wide", "half", "more than n", "without ids"],
)
def test_logits_that_are_not_those_configured_expel(config, logits, text):
    scene, stream, _ = start(config)
    scene.answer(stream, answer_to(stream.last, logits=logits))
    assert stream.is_expelled
    assert text in stream.failure


@pytest.mark.parametrize(
    ("last_id", "text"),
    [
        (2, "drafts.logits_token_ids = 3 rows: each id at most once in a row"),
        (VOCAB, f"drafts.logits_token_ids = {VOCAB}"),
    ],
    ids=["twice", "outside of the vocabulary"],
)
def test_wrong_ids_of_logits_expel(last_id, text):
    scene, stream, _ = start(TOP_N)
    answer = answer_to(stream.last, logits=torch.zeros(K, 4))
    ids = torch.arange(4, dtype=torch.int32).repeat(K, 1)
    ids[1, 3] = last_id
    encode_tensor(ids, answer.logits_token_ids)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert text in stream.failure
