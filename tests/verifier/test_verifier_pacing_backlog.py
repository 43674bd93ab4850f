"""Rows of prompts and backlogs: one message at a time, of a size that its answers allow."""

from __future__ import annotations

from verifier_service.pacing import Backlog
from verifier_service.pacing.backlog import CATCH_UP_EVERY_S, FIRST_BYTES, LEAST_BYTES, MOST_BYTES

ROW = 1024


def test_no_rows_go_before_the_last_ones_are_answered():
    backlog = Backlog(is_local=False)
    assert backlog.rows(ROW) == FIRST_BYTES // ROW
    backlog.count_sent(1.0, 7)
    backlog.note_answer(6)
    assert (backlog.rows(ROW), backlog.may_send(2.0)) == (0, False)
    backlog.note_answer(8)  # which answers those before it too
    backlog.learn(FIRST_BYTES, 0.01, in_time_s=0.02)
    assert backlog.rows(ROW) > FIRST_BYTES // ROW
    assert not backlog.may_send(1.0 + CATCH_UP_EVERY_S / 2)
    assert backlog.may_send(1.0 + CATCH_UP_EVERY_S)


def test_a_message_shrinks_while_answers_are_late():
    backlog = Backlog(is_local=True)
    assert backlog.rows(ROW) == MOST_BYTES // ROW
    for _ in range(40):
        backlog.learn(MOST_BYTES, 0.03, in_time_s=0.02)
    assert backlog.rows(ROW) == LEAST_BYTES // ROW
