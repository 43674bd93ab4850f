"""The draft engine: rows, roll-back, batches and order. Notation as in docs/architecture.md."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from harness import (
    OK,
    SAME_LOGITS,
    Reply,
    Rows,
    Text,
    connect,
    draft_alone,
    make_engine,
    opened,
    replies,
    run,
)
from tiny_head import TinyHead

from drafter_service.draft_loop.prefill import RowFeed
from drafter_service.draft_loop.sampling_mode import SamplingMode
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows


def chain_without_engine(head: TinyHead, text: Text, num_rows: int, k: int) -> list[int]:
    """Return greedy drafts as the contract defines them; each draft computes all rows again."""
    tokens, states = text.tokens[1 : num_rows + 1].long(), head.fuse(text.features[:num_rows])
    drafts: list[int] = []
    for _ in range(k):
        cache = KVCache(head.spec.layer_shapes, 9, torch.float32, torch.device("cpu"))
        batch = RaggedBatch([SequenceRows(range(1, 9), 0, len(tokens))], torch.device("cpu"))
        g = head.forward(tokens, states, torch.arange(len(tokens)), cache, batch)
        column = head.logits(g[-1:]).argmax(-1)
        token = column if head.draft_token_ids is None else head.draft_token_ids[column]
        drafts.append(int(token))
        tokens, states = torch.cat([tokens, token]), torch.cat([states, g[-1:]])
    return drafts


@pytest.mark.parametrize("reduced_vocabulary", [True, False])
def test_drafts_are_those_of_the_contract(reduced_vocabulary: bool) -> None:
    head, text = TinyHead(reduced_vocabulary), Text(1)
    reply = draft_alone(head, text, num_rows=11, k=4)
    assert reply.tokens == chain_without_engine(head, text, 11, 4)


def test_an_answer_names_what_it_continues(head: TinyHead) -> None:
    text = Text(1)
    reply = draft_alone(head, text, num_rows=11, k=2)
    assert (reply.status, reply.committed_length, reply.last_token) == (OK, 12, int(text.tokens[11]))


def test_a_step_without_drafts_is_acknowledged(head: TinyHead) -> None:
    stream = connect(make_engine(head))
    assert stream.step([Rows(1, Text(1), 0, 5)], [opened(1)]) == {}
    assert stream.answers[0].step_id == 1
    assert stream.answers[0].load.sequences == 1
    assert stream.step() == {}


def test_rows_in_many_steps_are_as_good_as_in_one(head: TinyHead) -> None:
    text, stream = Text(2), connect(make_engine(head))
    stream.step([Rows(1, text, 0, 7)], [opened(1)])
    stream.step([Rows(1, text, 7, 1, drafts=3)])
    reply = stream.step([Rows(1, text, 8, 30, drafts=4)])[1]
    assert reply == draft_alone(head, text, 38, 4)


@pytest.mark.parametrize("counts", [(40, 30), (40, 3), (40, 30, 3), (20, 20, 30)])
def test_rows_in_steps_that_waited_are_as_good_as_in_one_step(head: TinyHead, counts: tuple[int, ...]) -> None:
    """Rows attend to the rows of earlier waiting steps, with and without drafts."""
    mode, text = SamplingMode(gumbel=True, dense=True), Text(2)
    stream = connect(make_engine(head), mode)
    stream.step(new=[opened(1)])
    for i, count in enumerate(counts):
        stream.send([Rows(1, text, sum(counts[:i]), count, drafts=4 if i == len(counts) - 1 else 0)])
    run(stream.engine)
    reply, alone = replies(stream.answers[-1])[1], draft_alone(head, text, sum(counts), 4, mode)
    assert reply.tokens == alone.tokens
    torch.testing.assert_close(reply.logits, alone.logits, **SAME_LOGITS)


def test_rows_that_are_padded_as_on_a_gpu_are_as_good() -> None:
    """Padding changes no drafts, although the block tables still contain blocks of earlier batches."""

    def answered(head: TinyHead, *, is_padded: bool) -> list[Reply]:
        make_row_feed = partial(RowFeed, is_padded=is_padded)
        engine = make_engine(head, make_row_feed=make_row_feed, max_num_seqs=8, max_batch_rows=128)
        draw = random.Random(4)
        engine.warm_up()
        stream = connect(engine, SamplingMode(gumbel=True, dense=True), max_sequences=8)
        head.rows_of_forwards.clear()
        answers: list[Reply] = []
        for turn in range(6):
            texts = {8 * turn + i: Text(8 * turn + i) for i in range(draw.randint(1, 8))}
            rows = dict.fromkeys(texts, 0)
            stream.step(new=[opened(i, key=i) for i in texts])
            for drafts in (0, 0, 4):
                counts = {i: draw.randint(1, 30) for i in texts}
                stream.send([Rows(i, text, rows[i], counts[i], drafts) for i, text in texts.items()])
                rows = {i: rows[i] + counts[i] for i in texts}
            run(engine)
            answers += replies(stream.answers[-1]).values()
            stream.step(closed=list(texts))
        return answers

    padded = TinyHead()
    for own, expected in zip(answered(padded, is_padded=True), answered(TinyHead(), is_padded=False), strict=True):
        assert len(own.tokens) == 4
        assert own.tokens == expected.tokens
        torch.testing.assert_close(own.logits, expected.logits, **SAME_LOGITS)
    assert {64, 96} <= set(padded.rows_of_forwards)


@pytest.mark.parametrize("num_accepted", [0, 1, 4])
def test_speculative_rows_are_rolled_back(head: TinyHead, num_accepted: int) -> None:
    """Rows of rejected drafts have no effect: the next drafts are those of a fresh sequence."""
    text, stream = Text(3), connect(make_engine(head))
    stream.step([Rows(1, text, 0, 14, drafts=4)], [opened(1)])
    reply = stream.step([Rows(1, text, 14, num_accepted + 1, drafts=4)])[1]
    assert reply == draft_alone(head, text, 14 + num_accepted + 1, 4)


def test_a_sequence_may_begin_past_position_0(head: TinyHead) -> None:
    """Positions stay absolute; rows before the first row are not attended to."""
    text = Text(4)
    from_20 = draft_alone(head, text, 30, 4, new=opened(1, first_row=20))
    assert from_20.committed_length == 31
    other_past = Text(5)
    other_past.tokens[21:], other_past.features[20:] = text.tokens[21:], text.features[20:]
    assert draft_alone(head, other_past, 30, 4, new=opened(1, first_row=20)) == from_20
    shifted = Text(6)
    shifted.tokens[1:11], shifted.features[:10] = text.tokens[21:31], text.features[20:30]
    assert draft_alone(head, shifted, 10, 4).tokens != from_20.tokens


class TestBatch:
    def test_drafts_do_not_depend_on_the_crowd(self, head: TinyHead) -> None:
        lengths = [1, 3, 16, 17, 40, 63, 64, 5]
        texts = [Text(10 + i) for i in range(len(lengths))]
        stream = connect(make_engine(head))
        rows = [Rows(i, text, 0, length, drafts=4) for i, (text, length) in enumerate(zip(texts, lengths, strict=True))]
        crowd = stream.step(rows, [opened(i) for i in range(len(lengths))])
        for i, length in enumerate(lengths):
            assert crowd[i] == draft_alone(head, texts[i], length, 4)

    def test_each_sequence_has_its_own_number_of_drafts(self, head: TinyHead) -> None:
        wanted = [2, 0, 4, 1, 3, 4]
        stream = connect(make_engine(head))
        texts = [Text(i) for i in range(len(wanted))]
        rows = [Rows(i, texts[i], 0, 6 + i, drafts=k) for i, k in enumerate(wanted)]
        answered = stream.step(rows, [opened(i) for i in range(len(wanted))])
        assert {i: len(reply.tokens) for i, reply in answered.items()} == {0: 2, 2: 4, 3: 1, 4: 3, 5: 4}
        for i, reply in answered.items():
            assert reply.tokens == draft_alone(head, texts[i], 6 + i, 4).tokens[: wanted[i]]

    def test_sessions_share_a_forward_and_not_their_ids(self, head: TinyHead) -> None:
        engine = make_engine(head)
        streams = [connect(engine) for _ in range(3)]
        texts = [Text(30 + i) for i in range(3)]
        for stream, text in zip(streams, texts, strict=True):
            stream.send([Rows(1, text, 0, 5, drafts=3)], [opened(1)])
        head.rows_of_forwards.clear()
        run(engine)
        assert head.rows_of_forwards == [15, 3, 3]
        for stream, text in zip(streams, texts, strict=True):
            assert stream.answers[0].drafts.sequence_ids == [1]
            assert np.concatenate(stream.answers[0].tokens).tolist() == draft_alone(head, text, 5, 3).tokens

    def test_more_rows_than_a_step_brings_are_fed_before_drafting(self, head: TinyHead) -> None:
        texts = [Text(30 + i) for i in range(3)]
        lengths = [9, 5, 6]
        stream = connect(make_engine(head), k=4)
        rows = [Rows(i, texts[i], 0, lengths[i], drafts=3) for i in range(3)]
        head.rows_of_forwards.clear()
        answered = stream.step(rows, [opened(i) for i in range(3)])
        assert head.rows_of_forwards == [8 + 5, 1 + 5 + 1, 3, 3]
        assert answered == {i: draft_alone(head, texts[i], lengths[i], 3) for i in range(3)}

    def test_a_long_step_is_computed_in_pieces_without_a_difference(self, head: TinyHead) -> None:
        texts = [Text(40 + i) for i in range(3)]
        rows = [Rows(i, texts[i], 0, 50 + i, drafts=3) for i in range(3)]
        engine = make_engine(head, max_batch_rows=16, max_sessions=4)
        stream = connect(engine)
        head.rows_of_forwards.clear()
        answered = stream.step(rows, [opened(i) for i in range(3)])
        assert max(head.rows_of_forwards) == 16
        assert answered == {i: draft_alone(head, texts[i], 50 + i, 3) for i in range(3)}

    def test_logits_of_a_step_in_pieces_stay_in_order(self, head: TinyHead) -> None:
        mode = SamplingMode(gumbel=True, dense=True)
        texts = [Text(40 + i) for i in range(3)]
        stream = connect(make_engine(head, max_batch_rows=16, max_sessions=4), mode)
        answered = stream.step([Rows(i, texts[i], 0, 20 + i, 3) for i in range(3)], [opened(i) for i in range(3)])
        for i in range(3):
            alone = draft_alone(head, texts[i], 20 + i, 3, mode)
            assert answered[i].tokens == alone.tokens
            torch.testing.assert_close(answered[i].logits, alone.logits, **SAME_LOGITS)

    def test_a_prefill_does_not_delay_another_sessions_drafts(self, head: TinyHead) -> None:
        engine = make_engine(head, max_batch_rows=16, max_sessions=4)
        long, short = connect(engine), connect(engine)
        long.send([Rows(i, Text(i), 0, 80) for i in range(4)], [opened(i) for i in range(4)])
        engine.iterate()
        short.send([Rows(1, Text(9), 0, 3, drafts=4)], [opened(1)])
        engine.iterate()
        assert [answer.step_id for answer in short.answers] == [1]
        assert long.answers == []

    def test_a_prefill_gets_the_rows_that_others_do_not_need(self, head: TinyHead) -> None:
        engine = make_engine(head, max_batch_rows=16, max_sessions=4)
        long, short = connect(engine), connect(engine)
        long.send([Rows(1, Text(1), 0, 80)], [opened(1)])
        short.send([Rows(1, Text(9), 0, 3)], [opened(1)])
        head.rows_of_forwards.clear()
        run(engine)
        assert head.rows_of_forwards == [16, 16, 16, 16, 16, 3]

    def test_short_steps_do_not_starve_a_prefill(self, head: TinyHead) -> None:
        engine = make_engine(head, max_batch_rows=8, max_sessions=4)
        long = connect(engine)
        busy = [connect(engine) for _ in range(3)]
        texts = [Text(50 + i) for i in range(3)]
        for stream in busy:
            stream.step(new=[opened(1)])
        long.send([Rows(1, Text(5), 0, 20)], [opened(1)])
        for first in range(0, 60, 6):
            for stream, text in zip(busy, texts, strict=True):
                stream.send([Rows(1, text, first, 6)])
            engine.iterate()
        assert [answer.step_id for answer in long.answers] == [1]

    def test_steps_of_one_session_are_batched(self, head: TinyHead) -> None:
        stream = connect(make_engine(head))
        texts = [Text(60), Text(61)]
        stream.send([Rows(1, texts[0], 0, 4, drafts=2)], [opened(1)])
        stream.send([Rows(2, texts[1], 0, 5, drafts=2)], [opened(2)])
        head.rows_of_forwards.clear()
        run(stream.engine)
        assert head.rows_of_forwards == [9, 2]
        assert [answer.step_id for answer in stream.answers] == [1, 2]
        for i, length in enumerate((4, 5)):
            assert replies(stream.answers[i])[i + 1] == draft_alone(head, texts[i], length, 2)


class TestOrder:
    """Rows without drafts are computed after drafts; the steps of a session are answered in order."""

    def test_drafts_come_before_the_rows_of_a_prompt(self, head: TinyHead) -> None:
        stream = connect(make_engine(head))
        stream.step(new=[opened(1), opened(2)])
        stream.send([Rows(1, Text(1), 0, 3, drafts=2)])
        stream.send([Rows(2, Text(2), 0, 40)])
        head.rows_of_forwards.clear()
        stream.engine.iterate()
        assert head.rows_of_forwards == [3, 1, 40]
        assert [answer.step_id for answer in stream.answers] == [1, 2, 3]
        assert stream.answers[1].compute_time_s < stream.answers[2].compute_time_s

    def test_an_older_step_is_answered_first(self, head: TinyHead) -> None:
        stream = connect(make_engine(head))
        stream.step(new=[opened(1), opened(2)])
        stream.send([Rows(2, Text(2), 0, 40)])
        stream.send([Rows(1, Text(1), 0, 3, drafts=2)])
        head.rows_of_forwards.clear()
        stream.engine.iterate()
        assert head.rows_of_forwards == [3, 1, 40]
        assert [answer.step_id for answer in stream.answers] == [1, 2, 3]

    def test_another_sessions_prompt_does_not_hold_up_drafts(self, head: TinyHead) -> None:
        engine = make_engine(head)
        order: list[str] = []
        streams = {name: connect(engine) for name in ("prompt", "drafts")}
        for name, stream in streams.items():
            stream.step(new=[opened(1)])
            stream.session.deliver = lambda _, name=name: order.append(name)
        streams["prompt"].send([Rows(1, Text(2), 0, 40)])
        streams["drafts"].send([Rows(1, Text(1), 0, 3, drafts=2)])
        engine.iterate()
        assert order == ["drafts", "prompt"]


def test_warming_up_leaves_nothing_behind(head: TinyHead) -> None:
    engine = make_engine(head)
    engine.warm_up()
    assert head.rows_of_forwards == [5, 1, 1, 1, 1]
    assert (engine.load.sessions, engine.load.sequences, engine.load.kv_cache_usage) == (0, 0, 0)


@pytest.mark.parametrize("mode", [SamplingMode(), SamplingMode(gumbel=True), SamplingMode(gumbel=True, top_n=3)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_features_harm_only_their_own_sequence(head: TinyHead, mode: SamplingMode, value: float) -> None:
    sick, text = Text(1), Text(2)
    sick.features[5] = value
    stream = connect(make_engine(head), mode)
    rows = [Rows(1, sick, 0, 8, drafts=4), Rows(2, text, 0, 8, drafts=4)]
    answered = stream.step(rows, [opened(1), opened(2)])
    assert (answered[1].status, answered[1].tokens) == (OK, [])
    assert answered[2].tokens == draft_alone(head, text, 8, 4, mode).tokens
    # Its freed blocks do not harm the next sequence either.
    reply = stream.step([Rows(3, text, 0, 8, drafts=4)], [opened(3)], closed=[1])[3]
    assert reply.tokens == draft_alone(head, text, 8, 4, mode).tokens
