"""Draft logits: the audit of drafts, and logits that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_scene import DENSE, GUMBEL, start
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

TOP_N = {**GUMBEL, "draft_logits": {"top_n": 4}}


REDUCED = torch.tensor([1, 4, 5, 6, 7, 11, 19])


def start_sampled(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], ids: torch.Tensor | None = None) -> Any:
    """(scene, stream, request) at temperature 0.8, where every draft is drawn again."""
    monkeypatch.setattr(audit, "REDRAW_SHARE", 1)
    scene = Scene(config)
    stream = scene.connect(draft_token_ids=ids, draft_vocab_size=VOCAB if ids is None else len(ids))
    one = scene.decode(temperature=0.8, max_tokens=1000)
    scene.flush()
    return scene, stream, one


def honest_answer(step: pb.DraftStep, key: int, config: dict[str, Any], ids: torch.Tensor | None) -> pb.Drafts:
    """Drafts drawn as a drafter draws them."""
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
        scene.verify(one, 3)
        scene.flush()


@pytest.mark.parametrize(("config", "ids"), [HONEST[0], HONEST[1], HONEST[3]], ids=["dense", "dense reduced", "top_n"])
def test_drafts_not_drawn_from_logits_are_unused_and_expel(config, ids, monkeypatch):
    scene, stream, one = start_sampled(monkeypatch, config, ids)
    for _ in range(audit.TOO_MANY_MISMATCHES):
        assert stream.failure is None
        scene.answer(stream, replace_last(honest_answer(stream.last, one.keys.proposal, config, ids)))
        assert one.drafts is None
        scene.verify(one, 3)
        scene.flush()
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
    """The answer with another last draft."""
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
        scene.verify(one, 3)
        scene.flush()
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


def test_an_id_twice_among_a_drafts_logits_expels():
    scene, stream, _ = start(TOP_N)
    answer = answer_to(stream.last, logits=torch.zeros(K, 4))
    ids = torch.arange(4, dtype=torch.int32).repeat(K, 1)
    ids[1, 3] = 2
    encode_tensor(ids, answer.logits_token_ids)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert "drafts.logits_token_ids = 3 rows: each id at most once in a row" in stream.failure


def test_ids_of_logits_outside_the_vocabulary_expel():
    scene, stream, _ = start(TOP_N)
    answer = answer_to(stream.last, logits=torch.zeros(K, 4))
    encode_tensor(torch.full((K, 4), VOCAB, dtype=torch.int32), answer.logits_token_ids)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert f"drafts.logits_token_ids = {VOCAB}" in stream.failure
