"""Sessions share slots, blocks and rows: a flood from one verifier does not starve another verifier."""

from __future__ import annotations

from harness import (
    NO_CAPACITY,
    OK,
    UNKNOWN,
    Rows,
    Stream,
    Text,
    connect,
    draft_alone,
    make_engine,
    opened,
    replies,
    run,
)

from draftwire.model.kv_cache import BLOCK_SIZE

LENGTH = 10


def fill(stream: Stream, count: int, num_rows: int = LENGTH) -> None:
    """Open the sequences 1 .. `count` with `num_rows` rows each."""
    ids = range(1, count + 1)
    answered = stream.step([Rows(i, Text(i), 0, num_rows, 1) for i in ids], [opened(i) for i in ids])
    assert all(answered[i].status == OK for i in ids)


def ask_all(stream: Stream, ids: range, first_row: int = LENGTH) -> list[int]:
    """Send the next row of each sequence and return the statuses."""
    answered = stream.step([Rows(i, Text(i), first_row, 1, 1) for i in ids])
    return [answered[i].status for i in ids]


def test_a_newcomer_takes_slots_until_both_hold_as_many(head):
    engine = make_engine(head, max_num_seqs=8)
    flood, newcomer = connect(engine), connect(engine)
    fill(flood, 8)
    ids = range(1, 7)
    answered = newcomer.step([Rows(i, Text(i), 0, 5, 1) for i in ids], [opened(i) for i in ids])
    assert [answered[i].status for i in ids] == [OK] * 4 + [NO_CAPACITY] * 2
    assert answered[1] == draft_alone(head, Text(1), 5, 1)
    # The oldest sequences of the flood remain.
    assert ask_all(flood, range(1, 9)) == [OK] * 4 + [UNKNOWN] * 4


def test_who_holds_as_many_as_the_others_takes_from_nobody(head):
    engine = make_engine(head, max_num_seqs=4)
    streams = [connect(engine) for _ in range(2)]
    for stream in streams:
        fill(stream, 2)
    for stream in streams:
        assert stream.step([Rows(9, Text(9), 0, 3, 1)], [opened(9)])[9].status == NO_CAPACITY
        assert ask_all(stream, range(1, 3)) == [OK] * 2


def test_of_several_sessions_the_one_that_holds_most_gives(head):
    engine = make_engine(head, max_num_seqs=6)
    large, small, newcomer = (connect(engine) for _ in range(3))
    fill(large, 4)
    fill(small, 2)
    fill(newcomer, 2)
    assert ask_all(small, range(1, 3)) == [OK] * 2
    assert ask_all(large, range(1, 5)) == [OK, OK, UNKNOWN, UNKNOWN]


def test_a_newcomer_takes_blocks_from_the_largest_session(head):
    engine = make_engine(head, kv_cache_tokens=8 * BLOCK_SIZE)
    flood, newcomer = connect(engine), connect(engine)
    fill(flood, 4, num_rows=2 * BLOCK_SIZE)
    assert flood.answers[-1].load.kv_cache_usage == 1
    answered = newcomer.step([Rows(1, Text(1), 0, 3 * BLOCK_SIZE, 1)], [opened(1)])
    assert answered[1] == draft_alone(head, Text(1), 3 * BLOCK_SIZE, 1)
    flood.step(closed=[1])  # room to grow
    assert ask_all(flood, range(2, 5), 2 * BLOCK_SIZE) == [OK, UNKNOWN, UNKNOWN]


def test_slots_that_a_step_frees_are_taken_from_no_other(head):
    engine = make_engine(head, max_num_seqs=8)
    streams = turning, other = connect(engine), connect(engine)
    for stream in streams:
        fill(stream, 4)
    ids = range(5, 9)
    answered = turning.step([Rows(i, Text(i), 0, 5, 1) for i in ids], [opened(i) for i in ids], closed=range(1, 5))
    assert [answered[i].status for i in ids] == [OK] * 4
    assert engine.num_evictions == 0
    assert ask_all(other, range(1, 5)) == [OK] * 4


def test_blocks_that_a_step_frees_are_taken_from_no_other(head):
    engine = make_engine(head, kv_cache_tokens=11 * BLOCK_SIZE)
    turning, other = connect(engine), connect(engine)
    fill(turning, 1, num_rows=3 * BLOCK_SIZE - 2)  # rows of the next step are reserved, too
    fill(other, 2, num_rows=4 * BLOCK_SIZE - 2)
    assert other.answers[-1].load.kv_cache_usage == 1
    assert turning.step([Rows(2, Text(2), 0, 48, 1)], [opened(2)], closed=[1])[2].status == OK
    assert engine.num_evictions == 0


def test_blocks_are_shared_evenly_among_sequences_of_one_step(head):
    engine = make_engine(head, kv_cache_tokens=16 * BLOCK_SIZE)
    flood, newcomer = connect(engine), connect(engine)
    fill(flood, 8, num_rows=2 * BLOCK_SIZE)
    ids = range(1, 7)
    answered = newcomer.step([Rows(i, Text(i), 0, 2 * BLOCK_SIZE, 1) for i in ids], [opened(i) for i in ids])
    assert [answered[i].status for i in ids] == [OK] * 4 + [NO_CAPACITY] * 2
    assert len(flood.session.slots) == 4


def test_two_sessions_do_not_take_blocks_from_each_other_in_turn(head):
    """Each session needs 3 blocks for one more sequence, and 2 are free."""
    engine = make_engine(head, kv_cache_tokens=12 * BLOCK_SIZE)
    streams = connect(engine), connect(engine)
    fill(streams[0], 2, num_rows=3 * BLOCK_SIZE - 2)
    fill(streams[1], 1, num_rows=4 * BLOCK_SIZE - 2)
    for new in range(3, 7):
        for stream in streams:
            if len(stream.session.slots) < 2:
                stream.step([Rows(new, Text(new), 0, 3 * BLOCK_SIZE, 1)], [opened(new)])
    assert engine.num_evictions == 0


def test_rows_of_an_unknown_sequence_take_no_blocks(head):
    engine = make_engine(head, kv_cache_tokens=8 * BLOCK_SIZE)
    flood, lost = connect(engine), connect(engine)
    fill(flood, 4, num_rows=2 * BLOCK_SIZE)
    assert lost.step([Rows(7, Text(7), 20, 3, 1)])[7].status == UNKNOWN
    assert engine.num_evictions == 0


def test_what_is_in_the_batch_is_answered_and_makes_room(head):
    engine = make_engine(head, max_num_seqs=2)
    flood, newcomer = connect(engine), connect(engine)
    fill(flood, 2)
    flood.send([Rows(i, Text(i), LENGTH, 1, 1) for i in (1, 2)])
    newcomer.send([Rows(1, Text(1), 0, 5, 1)], [opened(1)])
    engine.iterate()
    assert [reply.status for reply in replies(flood.answers[-1]).values()] == [OK, OK]
    assert not newcomer.answers
    flood.send([Rows(1, Text(1), LENGTH + 1, 1, 1)], [opened(9)])  # would take the freed slot
    engine.iterate()
    assert replies(newcomer.answers[-1])[1] == draft_alone(head, Text(1), 5, 1)


def test_waiting_rows_of_a_removed_sequence_are_unknown(head):
    engine = make_engine(head, max_num_seqs=2, max_batch_rows=8, max_sessions=4)
    flood, newcomer = connect(engine), connect(engine)
    flood.send([Rows(i, Text(i), 0, 30, 1) for i in (1, 2)], [opened(1), opened(2)])
    engine.iterate()
    newcomer.send([Rows(1, Text(1), 0, 5, 1)], [opened(1)])
    run(engine)
    answered = replies(flood.answers[-1])
    assert answered[2].status == UNKNOWN
    assert answered[1] == draft_alone(head, Text(1), 30, 1)
    assert replies(newcomer.answers[-1])[1] == draft_alone(head, Text(1), 5, 1)


def test_a_flood_of_steps_does_not_delay_another_sessions_drafts(head):
    """Drafts come within two iterations, for any backlog of the flood: one makes room, one computes."""
    engine = make_engine(head, max_num_seqs=8, max_batch_rows=32, max_sessions=4)
    flood, other = connect(engine), connect(engine)
    ids = range(1, 9)
    flood.send([Rows(i, Text(i), 0, 80) for i in ids], [opened(i) for i in ids])
    for _ in range(3):
        engine.iterate()
    for first_row in range(0, 20, 5):
        other.send([Rows(1, Text(1), first_row, 5, 2)], [opened(1)] if first_row == 0 else [])
        engine.iterate()
        engine.iterate()
        assert replies(other.answers[-1])[1].status == OK
        assert other.answers[-1].step_id == other.num_steps
    assert flood.session.waiting_steps
