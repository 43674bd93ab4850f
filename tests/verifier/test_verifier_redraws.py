"""Expulsion of drafters whose drafts do not match their logits: when, and which drafts are used before."""

from __future__ import annotations

import random

import pytest
import torch
from drafting_scene import VOCAB, Scene, answer_to

from draftwire.contract.errors import InvalidArgumentError
from draftwire_kernels import gumbel_sample
from verifier_service.core.request import AnswerLogits, ReadyDrafts
from verifier_service.drafters import audit

DENSE = {"draft_sample_method": "gumbel", "draft_logits": "dense"}
# Most mismatches per answer of a drafter that rounds differently from the verifier: 16 drafts, 1e-5 per draft.
HONEST_MISMATCHES = 1.6e-4


@pytest.fixture(autouse=True)
def choices(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Seed the choice of the answers that are sampled again."""
    made = random.Random(0)
    monkeypatch.setattr(audit, "random", made)
    return made


class Drafter:
    """A drafter whose answers have one draft of one sequence. The verifier's sampling of the drafts is not faked."""

    def __init__(self) -> None:
        self.scene = Scene(DENSE)
        self.stream = self.scene.connect()
        self.request = self.scene.decode(temperature=1.0)
        self.is_expelled = False
        self.answers = self.lies = self.lies_used = 0
        logits, length = torch.zeros(1, VOCAB), len(self.request.tokens)
        numbers = (torch.tensor([one]) for one in (1.0, self.request.keys.proposal, length))
        token = int(gumbel_sample(logits, *numbers, draft_offset=0))
        self._honest = ReadyDrafts(length, self.request.tokens[-1], [token], AnswerLogits(logits, None, None), 0)
        self._lie = self._honest._replace(tokens=[(token + 1) % VOCAB])

    @property
    def num_redrawn(self) -> int:
        return self.scene.drafting.answers.audit.record_of(self.stream.address).count

    def answer(self, *are_lies: bool) -> None:
        """Send one message with an answer for each flag."""
        assert not self.is_expelled
        answered = [(self.request, self._lie._replace() if is_lie else self._honest) for is_lie in are_lies]
        self.answers += len(are_lies)
        self.lies += sum(are_lies)
        try:
            answers = self.scene.drafting.answers
            mismatched = answers.audit.find_unusable(self.stream.address, answered, is_on_trial=False)
        except InvalidArgumentError:
            self.is_expelled = True
        else:
            assert all(drafts.tokens == self._lie.tokens for drafts in mismatched)
            self.lies_used += sum(are_lies) - len(mismatched)

    def lie_until_found(self) -> None:
        while self.lies == self.lies_used:
            self.answer(True)

    def be_honest(self, answers: int) -> None:
        """Send `answers` correct answers, at most a thousand per message."""
        for start in range(0, answers, 1000):
            self.answer(*[False] * min(1000, answers - start))

    def lie(self, share: float, draw: random.Random, *, at_most: int, together: int = 1) -> None:
        """Lie in a random share of the answers until expelled, with `together` answers per message."""
        end = self.answers + at_most
        while not self.is_expelled and self.answers < end:
            self.answer(*(draw.random() < share for _ in range(together)))


@pytest.fixture
def drafter() -> Drafter:
    return Drafter()


@pytest.mark.full
def test_a_liar_is_expelled_as_soon_after_a_long_honest_past(choices):
    def expel(history: int) -> list[tuple[int, int]]:
        """Return (answers until expulsion, lies used) of ten drafters that lie in half of their answers."""
        found = []
        for seed in range(10):
            drafter = Drafter()
            drafter.be_honest(history)
            choices.seed(seed)
            drafter.lie(0.5, random.Random(-seed), at_most=1000)
            assert drafter.is_expelled
            found.append((drafter.answers - history, drafter.lies_used))
        return found

    new = expel(0)
    assert expel(100_000) == new
    assert max(answers for answers, _ in new) <= 150  # true for 99.96 % of such liars
    assert sum(used for _, used in new) / len(new) < 15  # 7 are expected


def test_a_liar_in_nine_of_a_thousand_answers_is_expelled(choices):
    for seed in range(3):
        choices.seed(seed)
        drafter = Drafter()
        drafter.be_honest(20_000)
        drafter.lie(0.009, random.Random(seed), at_most=10_000, together=8)  # 99.99 % are expelled
        assert drafter.is_expelled
        assert drafter.lies_used < 60


def test_once_a_lie_was_found_none_is_used(choices):
    for seed in range(5):
        choices.seed(seed)
        drafter = Drafter()
        drafter.lie_until_found()
        used = drafter.lies_used
        for _ in range(audit.TOO_MANY_MISMATCHES - 2):
            drafter.answer(False, True, False)
            drafter.be_honest(100)
        assert not drafter.is_expelled
        assert drafter.lies_used == used


def test_of_a_message_with_a_lie_that_was_found_no_lie_is_used(drafter):
    while drafter.lies == drafter.lies_used:
        used = drafter.lies_used
        drafter.answer(*[True] * (audit.TOO_MANY_MISMATCHES - 1), *[False] * 10)
    assert drafter.lies_used == used
    assert not drafter.is_expelled


def test_a_message_with_too_many_lies_expels_and_is_not_used(monkeypatch):
    chances = iter([0.0, *[0.999] * 100])  # the first answer is sampled again, and then all
    monkeypatch.setattr(audit.random, "random", lambda: next(chances))
    scene = Scene(DENSE)
    stream = scene.connect()
    requests = [scene.decode(temperature=1.0) for _ in range(audit.TOO_MANY_MISMATCHES)]
    scene.flush()
    scene.answer(stream, answer_to(stream.last, logits=_mismatched_logits()))
    assert stream.is_expelled
    assert "are not what its logits sample" in str(stream.failure)
    assert all(request.drafts is None for request in requests)


def test_mismatches_as_frequent_as_rounding_do_not_expel(drafter):
    for _ in range(40):
        drafter.be_honest(round(1 / HONEST_MISMATCHES) - 1)
        drafter.answer(True)
    assert drafter.num_redrawn > 100_000
    assert not drafter.is_expelled


def test_fewer_than_too_many_mismatches_at_once_are_forgotten(drafter):
    for _ in range(3):
        for _ in range(audit.TOO_MANY_MISMATCHES - 1):
            drafter.scene.drafting.answers.audit.record_of(drafter.stream.address).add(1, 1)
        drafter.be_honest(audit.RECENT_REDRAWS)
    assert not drafter.is_expelled


def test_after_a_mismatch_every_answer_is_redrawn_for_long(drafter):
    drafter.lie_until_found()
    before = drafter.num_redrawn
    for _ in range(audit.RECENT_REDRAWS // 1000):
        drafter.be_honest(1000)
    assert drafter.num_redrawn == before + audit.RECENT_REDRAWS
    drafter.be_honest(8000)
    assert 900 < drafter.num_redrawn - before - audit.RECENT_REDRAWS < 1100


def test_a_new_stream_does_not_clear_a_drafter(drafter):
    drafter.lie_until_found()
    used = drafter.lies_used
    for _ in range(audit.TOO_MANY_MISMATCHES - 1):
        assert not drafter.is_expelled
        drafter.scene.disconnect(drafter.stream)
        drafter.stream = drafter.scene.connect()
        drafter.answer(True)
    assert drafter.is_expelled
    assert drafter.lies_used == used


def test_an_expelled_drafter_is_judged_by_what_it_does_later(drafter):
    drafter.answer(*[True] * 100)
    assert drafter.is_expelled
    drafter.is_expelled = False
    drafter.be_honest(8000)
    assert 900 < drafter.num_redrawn < 1100


def _mismatched_logits() -> torch.Tensor:
    """Return logits of three drafts that sample token 4; `answer_to` answers 5, 6, 7."""
    logits = torch.full((3, VOCAB), -100.0)
    logits[:, 4] = 100.0
    return logits
