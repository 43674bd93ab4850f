"""The draft engine: superseded steps, unknown sequences and capacity."""

from __future__ import annotations

import pytest
from harness import (
    NO_CAPACITY,
    OK,
    UNKNOWN,
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

from drafter_service.draft_loop.sampling_mode import SamplingMode
from draftwire.model.kv_cache import BLOCK_SIZE


class TestSupersededSteps:
    """A sequence's drafts are dropped if a newer step of the session extends or closes the sequence."""

    def test_only_the_newest_step_of_a_sequence_drafts(self, head: TinyHead) -> None:
        text, stream = Text(1), connect(make_engine(head))
        stream.step(new=[opened(1)])
        for first, count in [(0, 5), (5, 2), (7, 1)]:
            stream.send([Rows(1, text, first, count, drafts=4)])
        head.rows_of_forwards.clear()
        run(stream.engine)
        assert head.rows_of_forwards == [5, 2, 1, 1, 1, 1]
        assert [answer.step_id for answer in stream.answers] == [1, 2, 3, 4]
        assert replies(stream.answers[3])[1] == draft_alone(head, text, 8, 4)

    def test_the_steps_before_it_are_answered_without_drafts(self, head: TinyHead) -> None:
        text, stream = Text(1), connect(make_engine(head), SamplingMode(gumbel=True, dense=True))
        stream.send([Rows(1, text, 0, 5, drafts=4)], [opened(1)])
        stream.send([Rows(1, text, 5, 1, drafts=4)])
        run(stream.engine)
        older = replies(stream.answers[0])[1]
        assert (older.status, older.committed_length, older.last_token) == (OK, 6, int(text.tokens[5]))
        assert (older.tokens, older.logits) == ([], None)
        assert len(replies(stream.answers[1])[1].tokens) == 4

    def test_a_newer_step_without_drafts_supersedes_as_well(self, head: TinyHead) -> None:
        text, stream = Text(1), connect(make_engine(head))
        stream.send([Rows(1, text, 0, 5, drafts=4)], [opened(1)])
        stream.send([Rows(1, text, 5, 1)])
        run(stream.engine)
        assert replies(stream.answers[0])[1].tokens == []
        assert replies(stream.answers[1]) == {}

    def test_other_sequences_of_the_older_step_draft(self, head: TinyHead) -> None:
        texts, stream = [Text(1), Text(2)], connect(make_engine(head))
        stream.send([Rows(i, texts[i], 0, 5, drafts=4) for i in range(2)], [opened(0), opened(1)])
        stream.send([Rows(0, texts[0], 5, 1, drafts=4)])
        run(stream.engine)
        older = replies(stream.answers[0])
        assert older[0].tokens == []
        assert older[1] == draft_alone(head, texts[1], 5, 4)
        assert replies(stream.answers[1])[0] == draft_alone(head, texts[0], 6, 4)

    def test_a_step_that_did_not_fit_into_the_batch_supersedes(self, head: TinyHead) -> None:
        text, stream = Text(1), connect(make_engine(head, max_batch_rows=8, max_sessions=4))
        stream.send([Rows(1, text, 0, 8, drafts=4)], [opened(1)])
        stream.send([Rows(1, text, 8, 2, drafts=4)])
        stream.engine.iterate()
        assert [replies(answer)[1].tokens for answer in stream.answers] == [[]]
        run(stream.engine)
        assert replies(stream.answers[1])[1] == draft_alone(head, text, 10, 4)

    def test_a_sequence_about_to_be_closed_does_not_draft(self, head: TinyHead) -> None:
        stream = connect(make_engine(head, max_num_seqs=1))
        stream.send([Rows(1, Text(1), 0, 5, drafts=4)], [opened(1)])
        stream.send([Rows(2, Text(2), 0, 5, drafts=4)], [opened(2)], closed=[1])
        run(stream.engine)
        assert replies(stream.answers[0])[1].tokens == []
        assert replies(stream.answers[1])[2] == draft_alone(head, Text(2), 5, 4)

    def test_a_newer_step_with_a_gap_drops_the_sequence_afterwards(self, head: TinyHead) -> None:
        """The blocks of a dropped sequence are not given away before its rows in the batch are computed."""
        stream = connect(make_engine(head, kv_cache_tokens=2 * BLOCK_SIZE))
        texts = [Text(1), Text(2)]
        stream.send([Rows(0, texts[0], 0, 5, drafts=4), Rows(1, texts[1], 0, 5)], [opened(0), opened(1)])
        stream.send([Rows(0, texts[0], 6, 1, drafts=4), Rows(1, texts[1], 5, 14, drafts=4)])
        run(stream.engine)
        newer = replies(stream.answers[1])
        assert (newer[0].status, newer[1].status) == (UNKNOWN, NO_CAPACITY)
        assert (stream.engine.load.sequences, stream.engine.load.kv_cache_usage) == (0, 0)
        assert stream.step([Rows(2, texts[1], 0, 19, drafts=4)], [opened(2)])[2] == draft_alone(head, texts[1], 19, 4)


class TestStaleness:
    def test_rows_of_a_sequence_never_opened_are_unknown(self, head: TinyHead) -> None:
        stream = connect(make_engine(head))
        assert stream.step([Rows(9, Text(1), 0, 3, drafts=1)])[9].status == UNKNOWN

    @pytest.mark.parametrize("first_row", [9, 12], ids=["rewind past accepted rows", "gap"])
    def test_rows_that_do_not_follow_the_true_ones_are_unknown(self, head: TinyHead, first_row: int) -> None:
        text, stream = Text(1), connect(make_engine(head))
        stream.step([Rows(1, text, 0, 10)], [opened(1)])
        assert stream.step([Rows(1, text, first_row, 2)])[1].status == UNKNOWN

    def test_an_unknown_sequence_is_opened_again_under_a_new_id(self, head: TinyHead) -> None:
        text, stream = Text(1), connect(make_engine(head))
        stream.step([Rows(1, text, 0, 10)], [opened(1)])
        reply = stream.step([Rows(1, text, 11, 1, drafts=4)])[1]
        assert (reply.status, reply.tokens) == (UNKNOWN, [])
        assert stream.answers[-1].load.kv_cache_usage == 0
        assert stream.step([Rows(1, text, 10, 1)])[1].status == UNKNOWN
        assert stream.step([Rows(2, text, 0, 12, drafts=4)], [opened(2)])[2] == draft_alone(head, text, 12, 4)

    def test_the_others_of_the_step_do_not_notice(self, head: TinyHead) -> None:
        text, stream = Text(1), connect(make_engine(head))
        stream.step([Rows(i, text, 0, 10) for i in range(3)], [opened(i) for i in range(3)])
        answered = stream.step([Rows(0, text, 10, 2, 2), Rows(1, text, 13, 3, 2), Rows(2, text, 10, 2, 2)])
        assert answered[1].status == UNKNOWN
        assert answered[0] == answered[2] == draft_alone(head, text, 12, 2)

    def test_the_first_row_of_a_sequence_is_the_one_announced(self, head: TinyHead) -> None:
        stream = connect(make_engine(head))
        assert stream.step([Rows(1, Text(1), 0, 3)], [opened(1, first_row=5)])[1].status == UNKNOWN

    def test_closing_comes_before_opening_and_rows(self, head: TinyHead) -> None:
        stream = connect(make_engine(head, max_num_seqs=1))
        stream.step([Rows(1, Text(1), 0, 3)], [opened(1)])
        answered = stream.step([Rows(2, Text(2), 0, 3, drafts=1)], [opened(2)], closed=[1])
        assert answered[2].status == OK


class TestCapacity:
    def test_more_sequences_than_the_drafter_takes(self, head: TinyHead) -> None:
        engine = make_engine(head, max_num_seqs=2)
        streams = [connect(engine) for _ in range(2)]
        for stream in streams:
            assert stream.step([Rows(1, Text(1), 0, 3, drafts=1)], [opened(1)])[1].status == OK
        refused = streams[0].step([Rows(2, Text(1), 0, 3)], [opened(2), opened(3)])
        assert {i: reply.status for i, reply in refused.items()} == {2: NO_CAPACITY, 3: NO_CAPACITY}

    def test_more_sequences_than_the_session_announced(self, head: TinyHead) -> None:
        stream = connect(make_engine(head), max_sequences=1)
        assert stream.step(new=[opened(1), opened(2)])[2].status == NO_CAPACITY

    def test_rows_past_the_longest_sequence(self, head: TinyHead) -> None:
        stream = connect(make_engine(head, max_model_len=20))
        stream.step([Rows(1, Text(1), 0, 20)], [opened(1)])
        assert stream.step([Rows(1, Text(1), 20, 1)])[1].status == NO_CAPACITY
        assert stream.step([Rows(1, Text(1), 21, 1)])[1].status == UNKNOWN

    def test_a_full_cache_drops_the_sequence_that_needs_more(self, head: TinyHead) -> None:
        stream = connect(make_engine(head, kv_cache_tokens=4 * BLOCK_SIZE))
        stream.step([Rows(1, Text(1), 0, 32), Rows(2, Text(2), 0, 32)], [opened(1), opened(2)])
        assert stream.answers[-1].load.kv_cache_usage == 1
        answered = stream.step([Rows(1, Text(1), 32, 1, 1), Rows(2, Text(2), 32, 1, 1)])
        assert answered[1].status == NO_CAPACITY
        assert answered[2] == draft_alone(head, Text(2), 33, 1)

    def test_drafting_stops_at_the_longest_sequence(self, head: TinyHead) -> None:
        for num_rows, num_drafts in [(17, 4), (18, 3), (20, 1)]:
            stream = connect(make_engine(head, max_model_len=20))
            reply = stream.step([Rows(1, Text(1), 0, num_rows, drafts=4)], [opened(1)])[1]
            assert reply.tokens == draft_alone(head, Text(1), num_rows, 4).tokens[:num_drafts]

    def test_drafting_stops_where_no_block_is_free(self, head: TinyHead) -> None:
        stream = connect(make_engine(head, kv_cache_tokens=2 * BLOCK_SIZE))
        reply = stream.step([Rows(1, Text(1), 0, 30, drafts=4)], [opened(1)])[1]
        assert (reply.status, reply.tokens) == (OK, draft_alone(head, Text(1), 30, 4).tokens[:3])

    def test_closing_sequences_frees_their_blocks(self, head: TinyHead) -> None:
        stream = connect(make_engine(head))
        stream.step([Rows(i, Text(i), 0, 20, drafts=4) for i in range(3)], [opened(i) for i in range(3)])
        stream.step(closed=[0, 1, 2, 77])
        load = stream.answers[-1].load
        assert (load.sequences, load.kv_cache_usage) == (0, 0)

    def test_closing_a_session_frees_its_sequences_even_in_mid_step(self, head: TinyHead) -> None:
        engine = make_engine(head, max_batch_rows=8, max_sessions=4)
        stream, other = connect(engine), connect(engine)
        stream.send([Rows(1, Text(1), 0, 20, drafts=4)], [opened(1)])
        engine.iterate()
        engine.close_session(stream.session)
        assert not engine.has_work
        assert (engine.load.sessions, engine.load.sequences, engine.load.kv_cache_usage) == (1, 0, 0)
        assert stream.answers == []
        assert other.step([Rows(1, Text(1), 0, 20, drafts=4)], [opened(1)])[1] == draft_alone(head, Text(1), 20, 4)
