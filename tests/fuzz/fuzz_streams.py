"""The permitted answers to a verifier's stream, and verifiers with known answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any

import grpc
import numpy as np
from fuzz_steps import DENSE, Writer, hello

from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import draft_pb2_grpc

OWNER_STEPS = 6
OK, UNKNOWN = pb.SEQUENCE_STATUS_OK, pb.SEQUENCE_STATUS_UNKNOWN


class FindingError(AssertionError):
    """A bug that the fuzzing found."""


class Ledger:
    """The open sequences of one stream. They alone determine the permitted answers to the stream.

    Attributes
    ----------
    rows
        Number of accepted rows of each open sequence, by id.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def judge(self, step: pb.DraftStep, drafts: pb.Drafts) -> None:
        """Check the answer to a step, and record the step.

        Raises
        ------
        FindingError
            If the answer does not follow from this stream alone. Sequences of other streams must be UNKNOWN.
        """
        ids = list(drafts.sequence_ids)
        foreign = set(ids) - {*step.sequence_ids, *step.opened.ids}
        if foreign or len(set(ids)) < len(ids) or drafts.step_id != step.step_id:
            raise FindingError(f"step {step.step_id} has the answer {drafts.step_id} for {ids}: foreign {foreign}")
        for sequence_id in step.closed_ids:
            self.rows.pop(sequence_id, None)
        self.rows.update(zip(step.opened.ids, step.opened.first_rows, strict=True))
        columns = (drafts.statuses, drafts.committed_lengths, drafts.last_tokens, drafts.num_drafts)
        answers = dict(zip(ids, zip(*columns, strict=True), strict=True))
        tokens = np.frombuffer(step.tokens.data, np.int32)
        asked = (step.sequence_ids, step.first_rows, step.num_rows, step.num_drafts, accumulate(step.num_rows))
        for sequence_id, first, count, wanted, end in zip(*asked, strict=True):
            answer = answers.get(sequence_id, (OK, first + count + 1, tokens[end - 1], 0))
            follows = self.rows.get(sequence_id) == first
            expected = (OK, first + count + 1, tokens[end - 1]) if follows else (UNKNOWN, 0, 0)
            is_right = answer[:3] == expected and answer[3] <= (wanted if follows else 0)
            is_silent = sequence_id not in answers
            # The stream's own sequence may have got no room, or may have been evicted for another stream's.
            may_fail = (follows or sequence_id in step.opened.ids) and answer[0] != OK and not any(answer[1:])
            if not (is_right or may_fail) or (is_silent and wanted):
                got = "nothing" if is_silent else answer
                raise FindingError(f"rows {first} to {first + count} of {sequence_id}, {self.rows} open: got {got}")
            if answer[0] == OK:
                self.rows[sequence_id] = first + count
        for sequence_id, answer in answers.items():
            if answer[0] != OK:
                self.rows.pop(sequence_id, None)


class Owner:
    """A verifier whose steps never change, so its drafts must not change either.

    Attributes
    ----------
    rows
        Number of accepted rows of each open sequence, by id.
    """

    def __init__(self, channel: grpc.aio.Channel, which: int, timeout_s: float) -> None:
        self._which = which
        self._writer = Writer(Random(which), last_id=which * 1_000_000)
        self._ledger = Ledger()
        self._call: Any = draft_pb2_grpc.DraftingStub(channel).Draft(timeout=timeout_s)

    @property
    def rows(self) -> dict[int, int]:
        """Return the rows; see the class."""
        return self._ledger.rows

    async def open(self) -> None:
        """Send the hello; it must be accepted."""
        await self._call.write(pb.DraftRequest(hello=hello(DENSE)))
        if not isinstance(await self._call.read(), pb.DraftResponse):
            raise FindingError(f"owner {self._which} was refused: {await self._call.details()}")

    async def step(self) -> pb.Drafts:
        """Send the next step and return its answer."""
        step = self._writer.step()
        await self._call.write(pb.DraftRequest(step=step))
        response = await self._call.read()
        if not isinstance(response, pb.DraftResponse):
            raise FindingError(f"owner {self._which} was ended: {await self._call.details()}")
        self._ledger.judge(step, response.drafts)
        return response.drafts

    async def close(self) -> None:
        """End the stream, which closes its sequences."""
        self.rows.clear()
        await self._call.done_writing()
        await self._call.code()

    def compare(self, answers: Sequence[pb.Drafts], known: Sequence[pb.Drafts]) -> None:
        """Check that the answers are the `known` ones.

        Raises
        ------
        FindingError
            If they differ.
        """
        names = ("sequence_ids", "statuses", "committed_lengths", "last_tokens", "num_drafts")
        for answer, expected in zip(answers, known, strict=True):
            same = all(list(getattr(answer, name)) == list(getattr(expected, name)) for name in names)
            same = same and answer.tokens.data == expected.tokens.data
            if not same or not alike(logits_of(answer), logits_of(expected)):
                raise FindingError(f"owner {self._which} was answered {_shown(answer)}, expected {_shown(expected)}")


def logits_of(drafts: pb.Drafts) -> np.ndarray:
    """Return the draft logits as a flat array."""
    return np.frombuffer(drafts.logits.data, np.float32)


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether logits are equal within rounding, which depends on the other sequences in the batch."""
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-3)


def _shown(drafts: pb.Drafts) -> str:
    tokens = np.frombuffer(drafts.tokens.data, np.int32).tolist()
    return f"{list(drafts.sequence_ids)} {list(drafts.statuses)} {list(drafts.committed_lengths)} {tokens}"
