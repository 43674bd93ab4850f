"""A verifier that names sequences which another one has open at that moment, or opens such of the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import grpc
import numpy as np
from fuzz_steps import DENSE, WIDTH, K, hello, tensor
from fuzz_streams import OK, OWNER_STEPS, UNKNOWN, FindingError, Ledger, Owner, alike, logits_of

from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import draft_pb2_grpc
from models import VOCAB_SIZE

TWIN = 2**40


class Thief:
    """The hostile stream, which knows all ids, rows and numbers of steps of an owner."""

    def __init__(self, channel: grpc.aio.Channel, rng: Random, owner: Owner, timeout_s: float) -> None:
        self._rng = rng
        self._owner = owner
        self._ledger = Ledger()
        self._step_id = 0
        self._begin = partial(draft_pb2_grpc.DraftingStub(channel).Draft, timeout=timeout_s)
        self._call: Any = None
        self.outcomes: Counter[str] = Counter()

    async def open(self) -> None:
        """Begins the stream and shakes hands. A stream without a hello would hold up others of its connection."""
        self._call = self._begin()
        await self._call.write(pb.DraftRequest(hello=hello(DENSE)))
        await self._call.read()

    def cancel(self) -> None:
        """Goes."""
        if self._call is not None:
            self._call.cancel()

    async def name(self) -> None:
        """Sends the owner's next rows, and asks for drafts after them."""
        step = self._step(self._chosen())
        drafts = await self._say(step)
        own = [status for status in drafts.statuses if status != UNKNOWN]
        if len(drafts.statuses) != len(step.sequence_ids) or own:
            raise FindingError(f"sequences of another stream are {list(drafts.statuses)} to this one")
        self.outcomes["UNKNOWN"] += 1

    async def close(self) -> None:
        """Closes the owner's sequences."""
        step = self._step({})
        step.closed_ids.extend(self._chosen())
        await self._say(step)
        self.outcomes["accepted"] += 1

    async def namesake(self, later: Sequence[int] = ()) -> None:
        """Opens a sequence of the number of one that the owner has, or will have, and a twin of another number."""
        number = self._rng.choice([*self._owner.rows, *later])
        first = self._rng.choice((0, self._owner.rows.get(number, 0)))
        pair = {number: first, number + TWIN: first}
        key = self._rng.getrandbits(64) - 2**63
        opened = pb.OpenSequences(
            ids=pair, temperatures=[1.0] * 2, proposal_keys=[key] * 2, first_rows=pair.values()
        )
        for _ in range(2):
            step = self._step(pair, is_twin=True)
            step.opened.CopyFrom(opened)
            opened = pb.OpenSequences()
            drafts = await self._say(step)
            if list(drafts.sequence_ids) != list(pair) or list(drafts.statuses) != [OK, OK]:
                raise FindingError(f"own sequences {list(pair)} are {list(drafts.statuses)}")
            logits = logits_of(drafts).reshape(2, K, -1)[:, 0]
            if not alike(*logits):
                raise FindingError(f"{number} is drafted otherwise than its twin: another stream has that number")
            pair = {sequence_id: self._ledger.rows[sequence_id] for sequence_id in pair}
            self.outcomes["own of the same number"] += 1
        step = self._step({})
        step.closed_ids.extend(pair)
        await self._say(step)

    def _chosen(self) -> dict[int, int]:
        rows = self._owner.rows
        return {number: rows[number] for number in self._rng.sample(list(rows), self._rng.randint(1, len(rows)))}

    def _step(self, rows: dict[int, int], *, is_twin: bool = False) -> pb.DraftStep:
        """Any rows after the given numbers of them; the same ones for all sequences if they are twins."""
        self._step_id += 1
        count = self._rng.randrange(1, K + 2)
        step = pb.DraftStep(
            step_id=self._step_id,
            sequence_ids=rows,
            first_rows=rows.values(),
            num_rows=[count] * len(rows),
            num_drafts=[K] * len(rows),
        )
        if rows:
            generator = np.random.default_rng(self._rng.getrandbits(64))
            repeats = len(rows) if is_twin else 1
            total = count * len(rows) // repeats
            tokens = generator.integers(0, VOCAB_SIZE, total, np.int32)
            features = generator.standard_normal((total, WIDTH), np.float32)
            step.tokens.CopyFrom(tensor(np.tile(tokens, repeats)))
            step.features.CopyFrom(tensor(np.tile(features, (repeats, 1))))
        return step

    async def _say(self, step: pb.DraftStep) -> pb.Drafts:
        await self._call.write(pb.DraftRequest(step=step))
        answer = await self._call.read()
        if not isinstance(answer, pb.DraftResponse):
            raise FindingError(f"a step in order was ended: {await self._call.details()}")
        self._ledger.judge(step, answer.drafts)
        return answer.drafts


async def steal(
    channel: grpc.aio.Channel, rng: Random, which: int, known: Sequence[pb.Drafts], timeout_s: float
) -> Counter[str]:
    """Plays an owner with a thief between its steps; how the thief's messages ended.

    Raises
    ------
    FindingError
        When the thief gets anything of the owner's, or the owner other drafts than the `known` ones.
    """
    owner = Owner(channel, which, timeout_s)
    thief = Thief(channel, rng, owner, timeout_s)
    await owner.open()
    await thief.open()
    try:
        pause = rng.randrange(1, OWNER_STEPS)
        answers = [await owner.step() for _ in range(pause)]
        later = {number for drafts in known[pause:] for number in drafts.sequence_ids} - set(owner.rows)
        attacks: list[Callable[[], Any]] = [thief.name, thief.close, lambda: thief.namesake(sorted(later))]
        for attack in _some(rng, attacks):
            await attack()
        answers += [await owner.step() for _ in range(OWNER_STEPS - pause)]
        owner.compare(answers, known)
    finally:
        thief.cancel()
        await owner.close()
    return thief.outcomes


def _some(rng: Random, attacks: list[Callable[[], Any]]) -> Iterator[Callable[[], Any]]:
    yield from rng.sample(attacks, rng.randint(1, len(attacks)))
