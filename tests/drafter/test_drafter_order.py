"""Work of the engine's thread while drafts are computed, deferred work, and reservation of cache blocks."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from harness import Rows, Text, connect, make_engine, make_step, opened
from served import TIMEOUT_S
from tiny_head import TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.proposer import Proposer
from drafter_service.engine.sequence_table import SequenceTable
from drafter_service.limits import EngineLimits
from drafter_service.server import engine_thread
from drafter_service.server.engine_thread import EngineThread
from draftwire.model.block_pool import BlockPool
from draftwire.model.kv_cache import BLOCK_SIZE


def test_while_drafts_are_computed_the_answer_is_begun(head: TinyHead, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(head)
    stream = connect(engine)
    thread = EngineThread(engine, lambda: None)
    launch, take = Proposer.launch, Proposer.finish
    order: list[Any] = []

    def launched(*inputs: Any) -> Any:
        order.append("launched")
        return launch(*inputs)

    def taken(*step: Any) -> Any:
        drafts = begun.answer.drafts
        order.append(("taken", list(drafts.sequence_ids), list(drafts.committed_lengths), list(drafts.num_drafts)))
        return take(*step)

    monkeypatch.setattr(Proposer, "launch", launched)
    monkeypatch.setattr(Proposer, "finish", taken)
    stream.send([Rows(1, Text(1), 0, 5, drafts=4)], [opened(1)])
    begun = stream.session.waiting_steps[0]
    thread.later(lambda: order.append("counted"))
    thread.iterate()
    assert order == ["launched", "counted", ("taken", [1], [6], [])]
    assert list(stream.answers[0].drafts.num_drafts) == [4]


def test_what_could_wait_is_done_where_nothing_is_drafted(head: TinyHead) -> None:
    engine = make_engine(head)
    stream = connect(engine)
    thread = EngineThread(engine, lambda: None)
    done: list[int] = []
    stream.send([Rows(1, Text(1), 0, 5)], [opened(1)])
    thread.later(lambda: done.append(1))
    thread.iterate()
    assert done == [1]


def test_deferred_work_keeps_its_order_and_survives_errors(head: TinyHead, caplog: pytest.LogCaptureFixture) -> None:
    thread = EngineThread(make_engine(head), lambda: None)
    done, is_done = [], threading.Event()

    def fail() -> None:
        raise ValueError("no such counter")

    def post() -> None:
        for call in (lambda: done.append(1), fail, lambda: done.append(2), is_done.set):
            thread.later(call)

    thread.start()
    with caplog.at_level(logging.ERROR):
        thread.post(post)
        assert is_done.wait(TIMEOUT_S)
    thread.stop()
    assert done == [1, 2]
    assert "no such counter" in caplog.text


def test_blocks_for_drafts_go_to_the_first_sequences() -> None:
    limits = EngineLimits(max_num_seqs=4, max_model_len=96, kv_cache_tokens=1024, max_num_speculative_tokens=6)
    table = SequenceTable(limits, BlockPool(1 + 6))
    slots = []
    for sequence_id in range(4):
        slot = table.open(opened(sequence_id))
        assert slot is not None
        assert table.reserve(slot, 14)
        table.next_row[slot] = 14
        slots.append(slot)
    # Each block has two free rows: three drafts. The two free blocks go to the first two sequences that want more.
    found = table.reserve_drafts(np.array(slots), np.array([3, 6, 5, 4]))
    assert found.tolist() == [3, 6, 5, 3]
    assert table.num_free_blocks == 0
    assert [table.num_blocks[slot] for slot in slots] == [1, 2, 2, 1]
    assert table.end_row[slots].tolist() == [BLOCK_SIZE, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE, BLOCK_SIZE]
    blocks = [block for slot in slots for block in table.blocks_of(slot).tolist()]
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6]


def test_returned_blocks_lie_side_by_side_in_order() -> None:
    pool = BlockPool(1 + 8)
    first, second = pool.allocate(3), pool.allocate(5)
    assert (first, second) == ([1, 2, 3], [4, 5, 6, 7, 8])
    assert pool.allocate(1) is None
    assert (pool.num_free, pool.usage) == (0, 1)
    assert second is not None
    pool.release(second[::-1])
    assert (pool.num_free, pool.usage) == (5, 3 / 8)
    assert pool.allocate(5) == second


def test_drafts_end_with_the_context() -> None:
    limits = EngineLimits(max_num_seqs=4, max_model_len=20, kv_cache_tokens=1024, max_num_speculative_tokens=6)
    table = SequenceTable(limits, BlockPool(8))
    slot = table.open(opened(1))
    assert slot is not None
    assert table.reserve(slot, 16)
    table.next_row[slot] = 16
    assert table.reserve_drafts(np.array([slot]), np.array([6])).tolist() == [5]


def table_of(num_blocks: int, lengths: list[int]) -> tuple[SequenceTable, np.ndarray]:
    """Return a table of sequences with `lengths` accepted rows, over `num_blocks` blocks, and their slots."""
    limits = EngineLimits(max_num_seqs=4, max_model_len=96, kv_cache_tokens=1024, max_num_speculative_tokens=4)
    table = SequenceTable(limits, BlockPool(1 + num_blocks))
    slots = []
    for sequence_id, length in enumerate(lengths):
        slot = table.open(opened(sequence_id))
        assert slot is not None
        assert table.reserve(slot, length)
        table.next_row[slot] = length
        slots.append(slot)
    return table, np.array(slots)


def test_the_next_step_finds_the_blocks_that_it_needs() -> None:
    table, slots = table_of(16, [16, 9, 8, 96])
    table.reserve_ahead(slots, np.array([8, 8, 8, 8]))
    # The next step brings up to 5 rows, and 3 rows follow for drafts: from 9 and 8 on they end at 17 and 16.
    assert table.num_blocks[slots].tolist() == [2, 2, 1, 6]
    assert table.has_room(slots[:3], np.array([24, 17, 16])).all()


def test_blocks_taken_ahead_leave_one_for_each_sequence() -> None:
    table, slots = table_of(8, [16, 16, 16])
    table.reserve_ahead(slots, np.array([8, 8, 8]))
    assert table.num_free_blocks == 3
    assert table.num_blocks[slots].tolist() == [2, 2, 1]


def test_no_row_follows_in_a_sequence_that_there_is_not() -> None:
    table, _ = table_of(8, [])
    assert table.next_row[np.array([-1])].tolist() == [-1]


def test_the_thread_computes_without_autograd(head: TinyHead) -> None:
    engine, seen, answered = make_engine(head), [], threading.Event()
    head.logits = lambda g: seen.append(torch.is_inference_mode_enabled()) or g @ head.lm_head
    thread = EngineThread(engine, lambda: None)
    thread.start()
    terms = SessionTerms("test", SamplingMode(), 4, 4)
    session = thread.open_session(terms, lambda _: answered.set()).result(TIMEOUT_S)
    step = make_step(1, [Rows(1, Text(1), 0, 5, drafts=2)], [opened(1)])
    thread.post(lambda: thread.submit(session, step))
    assert answered.wait(TIMEOUT_S)
    thread.stop()
    assert seen == [True, True]


@pytest.mark.parametrize("is_lost", [False, True], ids=["no memory", "device lost"])
def test_a_lost_device_ends_the_engine_full_memory_its_sessions(
    is_lost: bool, head: TinyHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(head)
    stream = connect(engine)
    has_failed = threading.Event()
    thread = EngineThread(engine, has_failed.set)

    def iterate(*_: Any) -> None:
        raise RuntimeError("an illegal memory access" if is_lost else "not enough memory")

    def check(_: torch.device) -> None:
        if is_lost:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(engine, "iterate", iterate)
    monkeypatch.setattr(engine_thread, "check_context", check)
    stream.send([Rows(1, Text(1), 0, 5, drafts=4)], [opened(1)])
    thread.start()
    end = time.monotonic() + TIMEOUT_S
    while not stream.answers:
        assert time.monotonic() < end
        time.sleep(0.001)
    thread.stop()
    assert has_failed.is_set() == is_lost
    expected = "the draft engine failed" if is_lost else "the drafter is out of memory"
    assert str(stream.answers[0]).startswith(expected)
