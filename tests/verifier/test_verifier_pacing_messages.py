"""What an answer tells of a drafter and of the way to it, and what that lets be sent."""

from __future__ import annotations

from collections import deque

import pytest
from learnt_costs import FIXED_S, ROW_BYTES, learnt_target

from verifier_service.pacing import Load, Message, Output, Pace
from verifier_service.pacing.pace import FIRST_BACKLOG_BYTES, IDLE_BACKLOG_S, MOST_ROWS


def answer(pace: Pace, message: Message, received: float, compute_s: float, *, is_beside: bool = False) -> None:
    """Tells of one."""
    pace.note_answer(message, received)
    pace.take_answer(message, received, compute_s, is_beside=is_beside)


class NarrowLink:
    """Takes one message after another to a drafter that takes one after another, and says when each is answered."""

    def __init__(self, trip_s: float, row_s: float, compute_s: float) -> None:
        self.trip_s, self.row_s, self.compute_s = trip_s, row_s, compute_s
        self.free = 0.0
        self._done = 0.0

    def take(self, now: float, rows: int) -> float:
        """A message of so many rows is sent."""
        self.free = max(self.free, now) + rows * self.row_s
        self._done = max(self._done, self.free + self.trip_s / 2) + self.compute_s
        return self._done + self.trip_s / 2


class Answers:
    """Of a drafter that answers messages in order, told to its pace."""

    def __init__(self) -> None:
        self.pace = Pace(4, None)

    def tell(self, sent: float, received: float, compute_s: float, rows: int = 3) -> None:
        """A message that wants 4 drafts of a sequence was sent and answered then."""
        answer(self.pace, self.pace.send(sent, ROW_BYTES, rows, 4, 1), received, compute_s)

    @property
    def known(self) -> tuple[float, float]:
        """What it says of a message's way and of computing for it."""
        return self.pace.cost.transfer_s(ROW_BYTES), self.pace.cost.compute_s(3, 4, 1, is_beside=False)


def test_a_message_that_a_drafter_takes_together_with_a_longer_one_says_nothing_of_computing():
    answers = Answers()
    for i in range(50):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2e-3)
        answers.tell(0.1 * i + 50e-3, 0.1 * i + 71e-3, 20e-3, rows=512)
        answers.tell(0.1 * i + 50.1e-3, 0.1 * i + 71.1e-3, 20e-3)  # the drafter tells the time of both
    assert answers.known == pytest.approx((1e-3, 2e-3), rel=0.05)


def test_a_message_that_waits_for_the_drafter_says_nothing_of_its_way():
    """Each second one is sent when the drafter has just got another."""
    answers = Answers()
    for i in range(50):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2e-3)
        answers.tell(0.1 * i + 0.1e-3, 0.1 * i + 5.2e-3, 2e-3)
    assert answers.known == pytest.approx((1e-3, 2e-3), rel=0.05)
    assert answers.pace.cost.jitter < 0.1e-3


def test_what_stood_behind_other_bytes_tells_nothing_of_a_link_that_is_not_known():
    """One of 1 Gbit/s, 4 ms there and back: drafts are asked for behind long prompts."""
    pace, link = Pace(4, None), NarrowLink(4e-3, 65.5e-6, 1.5e-3)
    waiting = []

    def send(now: float, rows: int, drafts: int, sequences: int) -> None:
        waiting.append((link.take(now, rows), pace.send(now, rows * ROW_BYTES, rows, drafts, sequences)))

    def take() -> None:
        for received, message in waiting:
            answer(pace, message, received, 1.5e-3, is_beside=True)
        waiting.clear()

    for i in range(4):
        send(0.1 * i, 512, 0, 0)
        send(0.1 * i + 6e-3, 8, 4, 8)
        send(0.1 * i + 12e-3, 20, 4, 8)
        take()
    assert not pace.cost.is_known
    for i in range(20):
        send(1.0 + 0.02 * i, 20 + 3 * (i % 20), 4, 16)
        take()
    trip_s, byte_s = pace.cost.link
    assert trip_s == pytest.approx(4e-3, rel=0.1)
    assert byte_s * ROW_BYTES == pytest.approx(65.5e-6, rel=0.1)


def test_a_drafter_is_busy_while_histories_take_longer_than_a_step():
    pace, target = Pace(4, None, is_adaptive=True), learnt_target()
    for i in range(20):
        rows = (8, 24, 40)[i % 3]
        message = pace.send(0.1 * i, rows * ROW_BYTES, rows, 4, 8)
        answer(pace, message, 0.1 * i + 5e-3 + rows * 65e-6, 1e-3)
    pace.cost.observe_histories(3e-3, 100, 2.0)
    pace.make_plan(2.0, Load(8, ROW_BYTES, running=8), target, Output(), {})
    pace.send(2.0, 600 * ROW_BYTES, 600, 4, 8)  # 39 ms, of drafts
    assert not pace.is_busy(2.0)
    history = pace.send(3.0, 600 * ROW_BYTES, 600, 0, 0, has_histories=True)
    through = 39e-3 + pace.cost.histories_s(600)
    assert pace.is_busy(3.0 + through - 1.2 * FIXED_S)
    assert not pace.is_busy(3.0 + through - 0.8 * FIXED_S)
    pace.note_answer(history, 3.0 + 20e-3)  # sooner than it was thought
    assert not pace.is_busy(3.0 + 20e-3)
    pace.send(4.0, 600 * ROW_BYTES, 600, 0, 0, has_histories=True)
    pace.note_answer(history, 4.0)  # of another message
    assert pace.is_busy(4.0)


def test_a_drafter_of_which_nothing_is_known_is_busy_until_it_answers_histories():
    pace = Pace(4, None, is_adaptive=True)
    message = pace.send(0.0, 600 * ROW_BYTES, 600, 0, 0, has_histories=True)
    assert pace.is_busy(100.0)
    pace.note_answer(message, 100.0)
    assert not pace.is_busy(100.0)
    pace.send(200.0, FIRST_BACKLOG_BYTES // 4, 32, 0, 0, has_histories=True)  # few that hardly delay anything
    assert not pace.is_busy(200.0)


def test_few_rows_of_histories_are_sent_at_once_until_the_link_is_known():
    pace = Pace(4, None, is_adaptive=True)
    assert pace.backlog_rows(0.0, ROW_BYTES) * ROW_BYTES == pytest.approx(FIRST_BACKLOG_BYTES, abs=ROW_BYTES)
    for i in range(20):
        rows = (8, 24, 40)[i % 3]
        message = pace.send(0.1 * i, rows * ROW_BYTES, rows, 0, 0)
        answer(pace, message, 0.1 * i + 5e-3 + rows * 65e-6, 1e-3)
    per_row = 65e-6 + pace.cost.per_history_row
    assert pace.backlog_rows(2.0, ROW_BYTES) * per_row == pytest.approx(IDLE_BACKLOG_S, rel=0.05)  # no step is known
    pace.make_plan(2.0, Load(8, ROW_BYTES, running=8), learnt_target(), Output(), {})
    assert pace.backlog_rows(2.0, ROW_BYTES) * per_row == pytest.approx(FIXED_S, rel=0.1)
    assert pace.backlog_rows(2.0, ROW_BYTES, is_idle=True) * per_row == pytest.approx(4 * FIXED_S, rel=0.1)
    assert Pace(4, None).backlog_rows(0.0, ROW_BYTES) == MOST_ROWS


def test_a_way_that_grows_longer_than_the_time_between_messages_is_learnt():
    answers = Answers()
    for i in range(100):
        way_s = 1e-3 if i < 20 else 20e-3
        answers.tell(6e-3 * i, 6e-3 * i + 2e-3 + way_s, 2e-3)
    assert answers.known == pytest.approx((20e-3, 2e-3), rel=0.05)


def test_a_drafter_computes_for_no_longer_than_its_answer_took_whatever_it_says():
    answers = Answers()
    for i in range(50):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2.0)
    assert answers.known == pytest.approx((0.0, 3e-3), abs=0.1e-3)


def test_a_message_without_rows_says_nothing_of_computing():
    answers, others = Answers(), Answers()
    for i in range(50):
        message = answers.pace.send(0.1 * i, 0, 0, 0, 0)
        answers.pace.take_answer(message, 0.1 * i + 1e-3, 0.0, is_beside=False)
        for one in (answers, others):
            one.tell(0.1 * i + 50e-3, 0.1 * i + 53e-3, 2e-3)
    assert answers.pace.cost.compute == others.pace.cost.compute


class BulkAnswers:
    """Messages of histories over such a link, told to a pace as they are answered."""

    def __init__(self, link: NarrowLink) -> None:
        self.pace, self.link = Pace(4, None, is_adaptive=True), link
        self._waiting: deque[tuple[float, Message]] = deque()

    def send(self, now: float, rows: int) -> None:
        """Those that are answered by then are told before."""
        while self._waiting and self._waiting[0][0] <= now:
            received, message = self._waiting.popleft()
            answer(self.pace, message, received, self.link.compute_s, is_beside=True)
        message = self.pace.send(now, rows * ROW_BYTES, rows, 0, 0, has_histories=True)
        self._waiting.append((self.link.take(now, rows), message))

    @property
    def known(self) -> tuple[float, float]:
        """Seconds of the way and of each row."""
        trip_s, byte_s = self.pace.cost.link
        return trip_s, byte_s * ROW_BYTES


def known_wide_link() -> BulkAnswers:
    """One of 25 Gbit/s, 3 ms there and back, as it is known after 2 s."""
    answers = BulkAnswers(NarrowLink(3e-3, 3e-6, 3.5e-3))
    for i in range(20):
        answers.send(0.1 * i, (1, 60, 200)[i % 3])
    assert answers.known == pytest.approx((3e-3, 3e-6), rel=0.1)
    return answers


def test_a_link_that_has_become_narrow_is_known_by_messages_that_keep_each_other():
    """Of as many bytes each, of which one alone would not say whether it is the way or the bytes that take longer."""
    answers = known_wide_link()
    answers.link.row_s = 65.5e-6
    for i in range(8):
        answers.send(2.0 + 13e-3 * i, 218)
    answers.send(2.5, 0)
    assert answers.known == pytest.approx((3e-3, 65.5e-6), rel=0.15)


def test_what_keeps_a_link_is_worked_out_from_what_is_known_by_now():
    """As long as it was thought to be wide, much more was sent than goes through."""
    answers = known_wide_link()
    answers.link.row_s = 65.5e-6
    for i in range(12):
        answers.send(2.0 + 6e-3 * i, 218)
    now = 2.0 + 6e-3 * 12
    answers.send(now, 218)
    kept_s = answers.link.free - now
    assert kept_s > 0.1
    answers.pace.make_plan(now, Load(8, ROW_BYTES, running=8), learnt_target(), Output(), {})
    assert answers.pace.backlog_rows(now, ROW_BYTES) == 0
    assert answers.pace.backlog_rows(now, ROW_BYTES, is_idle=True) == 0
    message = answers.pace.send(now, 3 * ROW_BYTES, 3, 0, 0)
    assert message.expected - now == pytest.approx(kept_s + answers.link.trip_s, rel=0.15)
    assert answers.pace.is_busy(now + 0.8 * kept_s)
    assert not answers.pace.is_busy(now + kept_s)


def test_drafts_that_a_stall_has_held_up_say_nothing_of_what_bytes_take():
    """Three groups over 1 Gbit/s, as they were measured when something stood still for 10 ms: those that were sent
    meanwhile came one soon after another, but not as soon as their bytes alone would have."""
    pace = Pace(4, None)
    for i in range(60):
        rows = (33, 96, 30)[i % 3]
        way_s = 4.7e-3 + rows * 71e-6 + 0.4e-3 * (i % 2)
        answer(pace, pace.send(0.02 * i, rows * ROW_BYTES, rows, 3, 11), 0.02 * i + way_s + 1.3e-3, 1.3e-3)
    known = pace.cost.transfer_s(33 * ROW_BYTES)
    stalled = [(0.0, 18.72, 33), (8.6, 24.2, 33), (11.9, 29.2, 30), (27.9, 38.3, 33), (34.2, 44.0, 33)]
    messages = [pace.send(2.0 + sent * 1e-3, rows * ROW_BYTES, rows, 3, 11) for sent, _, rows in stalled]
    said = []
    for message, (_, received, _) in zip(messages, stalled, strict=True):
        answer(pace, message, 2.0 + received * 1e-3, 1.33e-3, is_beside=True)
        said.append(pace.cost.transfer_s(33 * ROW_BYTES))
    assert max(said) < 1.3 * known


def test_an_answer_that_comes_sooner_than_it_was_thought_lets_the_next_one_come_as_soon():
    answers = Answers()
    for i in range(20):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2e-3)
    late = answers.pace.send(2.0, 50_000 * ROW_BYTES, 3, 4, 1)
    assert late.expected > 2.0 + 20e-3
    answer(answers.pace, late, 2.0 + 3e-3, 2e-3)
    assert answers.pace.send(2.01, ROW_BYTES, 3, 4, 1).expected == pytest.approx(2.01 + 3e-3, abs=0.5e-3)
