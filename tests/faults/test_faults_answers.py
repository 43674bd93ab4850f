"""A drafter's answers that a relay makes wrong or late."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from draft_relay import Alter, DraftRelay, corrupt_logits, corrupt_tokens, hold_up
from exact_pair import VOCAB
from load import FaultRecord
from stage import Stage

from draftwire.v1 import generate_pb2

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Matrix = Callable[[FaultRecord], None]
BYTES = ("--carriers", "bytes")  # all tensors in messages, where the relay sees them
DENSE = {"draft_sample_method": "gumbel", "draft_logits": "dense"}


def test_half_of_the_answers_have_wrong_tokens(stage: Stage, matrix: Matrix) -> None:
    """Without logits no audit is possible, and the rejection test rejects wrong drafts one by one."""
    drafter = stage.drafter()
    with DraftRelay(drafter.address) as relay:
        load = stage.load([relay.address], *BYTES)
        with load.fault("half of the answers with wrong tokens, no logits", during_below=0.9) as record:
            relay.alter = corrupt_tokens(VOCAB)
            load.wait_for_rounds(3)
            relay.alter = None
    matrix(record)


@pytest.mark.parametrize(
    ("what", "alter"), [("tokens", corrupt_tokens(VOCAB)), ("logits", corrupt_logits)], ids=["tokens", "logits"]
)
def test_drafts_that_do_not_match_their_logits_expel(
    stage: Stage, matrix: Matrix, what: str, alter: Alter
) -> None:
    wrong, right = stage.drafter(), stage.drafter()
    with DraftRelay(wrong.address) as relay:
        load = stage.load([relay.address, right.address], *BYTES, **DENSE)
        with load.fault(f"half of one drafter's answers with wrong {what}, expelled") as record:
            relay.alter = alter
            load.wait_for(lambda: _is_expelled(load.drafters(), relay), "it is expelled")
            relay.alter = None
    matrix(record)


def _is_expelled(statuses: list[generate_pb2.DrafterStatus], relay: DraftRelay) -> bool:
    """Return whether the drafter behind the relay is expelled for drafts that do not match its logits."""
    status = _status(statuses, relay)
    is_expelled = status.state == generate_pb2.DRAFTER_STATE_EXPELLED
    return is_expelled and "are not what its logits sample" in status.detail


def _status(statuses: list[generate_pb2.DrafterStatus], relay: DraftRelay) -> generate_pb2.DrafterStatus:
    return next(one for one in statuses if one.address == relay.address)


def test_all_answers_come_a_second_late(stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter()
    with DraftRelay(drafter.address) as relay:
        load = stage.load([relay.address], *BYTES)
        with load.fault("answers 1 s late, for 5 s", during_below=0.5) as record:
            relay.alter = hold_up(1.0)
            time.sleep(5)
            relay.alter = None
    matrix(record)


def test_half_of_the_answers_come_a_second_late(stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter()
    with DraftRelay(drafter.address) as relay:
        load = stage.load([relay.address], *BYTES)
        with load.fault("half of the answers 1 s late, for 10 s", during_below=0.5) as record:
            relay.alter = hold_up(0.5)
            time.sleep(10)
            relay.alter = None
    matrix(record)


def test_one_of_two_drafters_late_with_half_its_answers_is_left(stage: Stage, matrix: Matrix) -> None:
    late, other = stage.drafter(), stage.drafter()
    with DraftRelay(late.address) as relay:
        load = stage.load([relay.address, other.address], *BYTES)
        with load.fault("half of one drafter's answers 1 s late, until it is left alone") as record:
            relay.alter = hold_up(0.5)
            slow = generate_pb2.DRAFTER_STATE_SLOW
            load.wait_for(lambda: _status(load.drafters(), relay).state == slow, "it is left alone")
            load.wait_for_rounds(3)
            relay.alter = None
    matrix(record)
