"""Block heads in the draft engine: the tests of other heads, and tests that are specific to blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from announcing import Announcer
from block_heads import CONFIGS, block_head
from harness import OK, SAME_LOGITS, Reply, Rows, Text, connect, draft_alone, make_engine, opened
from served import hello, serve_drafter
from test_draft_engine import (  # noqa: F401  collected again, with this module's head
    test_a_step_without_drafts_is_acknowledged,
    test_an_answer_names_what_it_continues,
    test_non_finite_features_harm_only_their_own_sequence,
    test_rows_in_many_steps_are_as_good_as_in_one,
    test_rows_in_steps_that_waited_are_as_good_as_in_one_step,
    test_speculative_rows_are_rolled_back,
)
from test_draft_engine_sequences import TestStaleness  # noqa: F401  likewise
from test_draft_loop import PaddingGraphs, converse
from test_draft_sampling import (  # noqa: F401  likewise
    redraw,
    test_coupled_drafts_know_no_offset,
    test_greedy_drafts_ignore_the_temperature,
    test_gumbel_drafts_at_temperature_0_are_greedy,
    test_gumbel_drafts_follow_their_key,
    test_logits_on_the_wire_do_not_change_the_drafts,
    test_sessions_of_every_mode_share_a_batch,
    test_top_n_of_the_whole_vocabulary_is_dense,
)

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.heads import Head
from drafter_service.heads.spec import DraftContext
from drafter_service.heads.spec import Rows as HeadRows
from drafter_service.limits import EngineLimits
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache, RaggedBatch, SequenceRows
from draftwire.v1 import draft_pb2 as pb

DENSE = SamplingMode(gumbel=True, dense=True, confidences=True)
MODES = [SamplingMode(), DENSE, SamplingMode(gumbel=True, top_n=5), SamplingMode(gumbel=True, coupled=True)]
CPU = torch.device("cpu")


@pytest.fixture(params=CONFIGS)
def head(request: pytest.FixtureRequest) -> Head:
    return block_head(request.param)


class Straight(DraftContext):
    """One sequence for which a head drafts a greedy block without an engine."""

    def __init__(self, head: Head, text: Text, num_rows: int) -> None:
        self.cache = KVCache(head.spec.layer_shapes, 9, torch.float32, CPU)
        self.rows = self._rows(text.tokens[1 : num_rows + 1].long(), 0)
        self.states, self.last_rows = head.fuse(text.features[:num_rows]), torch.tensor([num_rows - 1])
        self.wants_confidences = True
        self.head, self.tokens = head, list[int]()
        self.logits, self.confidences = list[torch.Tensor](), list[float]()

    def _rows(self, tokens: torch.Tensor, start: int) -> HeadRows:
        batch = RaggedBatch([SequenceRows(range(1, 9), start, len(tokens))], CPU)
        return HeadRows(tokens, torch.arange(start, start + len(tokens)), batch)

    def draw(self, offset: int, logits: torch.Tensor, confidences: torch.Tensor | None = None) -> torch.Tensor:
        assert offset == len(self.tokens)
        token = logits.argmax(-1)
        if self.head.draft_token_ids is not None:
            token = self.head.draft_token_ids[token]
        self.tokens.append(int(token))
        self.logits.append(logits[0])
        sure = logits.softmax(-1).amax(-1) if confidences is None else confidences
        self.confidences.append(float(sure))
        return token

    def next_rows(self) -> HeadRows:
        raise NotImplementedError

    def block(self, num_rows: int) -> HeadRows:
        return self._rows(torch.zeros(num_rows, dtype=torch.int64), len(self.rows.tokens))


@pytest.mark.parametrize("num_rows", [1, 11, 16, 40])
def test_drafts_are_those_of_the_head_alone(head: Head, num_rows: int) -> None:
    text = Text(1)
    straight = Straight(head, text, num_rows)
    head.draft(straight, 4)
    mode = SamplingMode(gumbel=True, dense=True, confidences=True)
    reply = draft_alone(head, text, num_rows, 4, mode, opened(1, temperature=0.0))
    assert reply.tokens == straight.tokens
    torch.testing.assert_close(reply.logits, torch.stack(straight.logits), **SAME_LOGITS)
    np.testing.assert_allclose(reply.confidences, straight.confidences, rtol=1e-4)


@pytest.mark.parametrize("mode", [DENSE, SamplingMode(gumbel=True, top_n=5)], ids=str)
def test_drafts_are_drawn_from_the_logits_sent(head: Head, mode: SamplingMode) -> None:
    """The logits sent include the bias of the previous draft, if the head has one."""
    reply = draft_alone(head, Text(1), 11, 4, mode, opened(1, 20.0, 1234567890123))
    assert redraw(reply, head, 20.0) == reply.tokens


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_drafts_depend_neither_on_the_crowd_nor_on_its_drafts(head: Head, mode: SamplingMode) -> None:
    lengths, wanted = [1, 3, 16, 17, 40, 63, 64, 5], [4, 2, 0, 1, 4, 3, 4, 4]
    texts, ids = [Text(10 + i) for i in range(8)], range(8)
    stream = connect(make_engine(head), mode)
    rows = [Rows(i, texts[i], 0, lengths[i], wanted[i]) for i in ids]
    crowd = stream.step(rows, [opened(i, 0.7, key=i) for i in ids])
    assert crowd.keys() == {i for i in ids if wanted[i]}
    for i, reply in crowd.items():
        alone = draft_alone(head, texts[i], lengths[i], 4, mode, opened(i, 0.7, key=i))
        assert reply.tokens == alone.tokens[: wanted[i]]
        if reply.logits is not None:
            torch.testing.assert_close(reply.logits, alone.logits[: wanted[i]], **SAME_LOGITS)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_padded_steps_draft_what_exact_ones_draft(head: Head, mode: SamplingMode) -> None:
    exact = converse(make_engine(head), mode)
    padded = make_engine(head, make_graphs=lambda loop, *_: PaddingGraphs(loop, k=4))
    for given, expected in zip(converse(padded, mode), exact, strict=True):
        assert {i: reply.tokens for i, reply in given.items()} == {i: reply.tokens for i, reply in expected.items()}
        for i, reply in expected.items():
            if reply.logits is not None:
                torch.testing.assert_close(given[i].logits, reply.logits, **SAME_LOGITS)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_gets_the_drafts_that_were_begun_early(head: Head, mode: SamplingMode) -> None:
    texts, ids = [Text(i) for i in range(6)], range(1, 6)

    def prompted() -> tuple:
        stream = connect(make_engine(head), mode)
        stream.step([Rows(i, texts[i], 0, 7 + i) for i in ids], [opened(i, 0.7, key=i) for i in ids])
        return stream, [Rows(i, texts[i], 7 + i, 1 + i % 4, 4) for i in ids]

    stream, rows = prompted()
    expected: dict[int, Reply] = stream.step(rows)
    stream, rows = prompted()
    verifier = Announcer(stream)
    verifier.announce(rows)
    assert stream.engine.poll_early()
    with torch.inference_mode():
        stream.engine.early.begin()
    found = verifier.committed()
    assert stream.engine.early.num_taken == 1
    assert {i: reply.tokens for i, reply in found.items()} == {i: reply.tokens for i, reply in expected.items()}


def test_a_sequence_without_room_for_a_block_gets_no_drafts(head: Head) -> None:
    """A sequence at the end of the context, or without a free cache block, gets no drafts; other sequences do."""
    size = head.spec.block_rows
    stream = connect(make_engine(head, max_model_len=60))
    lengths = [60 - size, 61 - size, 60]
    rows = [Rows(i, Text(i), 0, length, 4) for i, length in enumerate(lengths)]
    answered = stream.step(rows, [opened(i) for i in range(3)])
    assert [(answered[i].status, len(answered[i].tokens)) for i in range(3)] == [(OK, 4), (OK, 0), (OK, 0)]
    assert answered[0].tokens == draft_alone(head, Text(0), lengths[0], 4).tokens
    stream = connect(make_engine(head, kv_cache_tokens=2 * BLOCK_SIZE))
    reply = stream.step([Rows(1, Text(1), 0, 31, 4)], [opened(1)])[1]
    assert (reply.status, reply.tokens) == (OK, [])
    assert stream.step([Rows(2, Text(2), 0, 9, 4)], [opened(2)], closed=[1])[2].tokens


def test_a_block_has_its_trained_size_whatever_is_drawn(head: Head) -> None:
    """A verifier that requests fewer drafts gets the first drafts of the same block."""
    for k in (1, 2, 3):
        assert draft_alone(head, Text(3), 20, k).tokens == draft_alone(head, Text(3), 20, 4).tokens[:k]


def test_what_lies_before_the_first_row_is_not_seen(head: Head) -> None:
    """A sequence that begins past position 0 does not depend on earlier rows, whose features are gone."""
    text, other = Text(4), Text(5)
    other.tokens[21:], other.features[20:] = text.tokens[21:], text.features[20:]
    from_20 = draft_alone(head, text, 30, 4, DENSE, opened(1, first_row=20))
    other_past = draft_alone(head, other, 30, 4, DENSE, opened(1, first_row=20))
    assert from_20.committed_length == 31
    assert torch.equal(other_past.logits, from_20.logits)
    assert not torch.allclose(draft_alone(head, text, 30, 4, DENSE).logits, from_20.logits, atol=1e-2)


def test_warming_up_leaves_nothing_behind(head: Head) -> None:
    engine = make_engine(head)
    engine.warm_up()
    assert (engine.load.sessions, engine.load.sequences, engine.load.kv_cache_usage) == (0, 0, 0)


def test_more_drafts_than_a_block_has_are_refused_by_name() -> None:
    limits = EngineLimits(max_num_seqs=8, max_model_len=64, kv_cache_tokens=1024, max_batch_rows=256, max_sessions=3)
    with serve_drafter(block_head("dspark"), limits) as drafter:
        info = drafter.stub.GetDrafterInfo(pb.GetDrafterInfoRequest())
        assert (info.method, info.max_num_speculative_tokens) == ("dspark", 5)
        _, text = drafter.refusal(hello({"num_speculative_tokens": 6}))
    assert "num_speculative_tokens: the verifier has 6, the drafter allows at most 5" in text


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_drafts_on_a_gpu_are_those_of_the_cpu(kind: str, mode: SamplingMode, is_captured: bool) -> None:
    """Steps without graphs and replays with changing inputs both give the CPU's drafts."""
    expected = converse(make_engine(block_head(kind)), mode)
    graphs = {} if is_captured else {"make_graphs": lambda *_: None}
    found = converse(make_engine(block_head(kind, "cuda"), **graphs), mode)
    for given, wanted in zip(found, expected, strict=True):
        assert {i: reply.tokens for i, reply in given.items()} == {i: reply.tokens for i, reply in wanted.items()}
        for i, reply in wanted.items():
            if reply.logits is not None:
                torch.testing.assert_close(given[i].logits, reply.logits, rtol=2e-3, atol=2e-3)
            if reply.confidences is not None:
                np.testing.assert_allclose(given[i].confidences, reply.confidences, rtol=1e-3, atol=1e-5)
