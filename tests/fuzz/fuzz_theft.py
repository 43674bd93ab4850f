"""A hostile verifier that uses the ids of another verifier's open sequences."""

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
    """A hostile stream that knows the sequence ids and rows of another stream, the owner."""

    def __init__(self, channel: grpc.aio.Channel, rng: Random, owner: Owner, timeout_s: float) -> None:
        self._rng = rng
        self._owner = owner
        self._ledger = Ledger()
        self._step_id = 0
        self._begin = partial(draft_pb2_grpc.DraftingStub(channel).Draft, timeout=timeout_s)
        self._call: Any = None
        self.outcomes: Counter[str] = Counter()

    async def open(self) -> None:
        """Begin the stream and exchange hellos. Without a hello it would delay other streams of its connection."""
        self._call = self._begin()
        await self._call.write(pb.DraftRequest(hello=hello(DENSE)))
        await self._call.read()

    def cancel(self) -> None:
        """Cancel the stream."""
        if self._call is not None:
            self._call.cancel()

    async def name(self) -> None:
        """Send rows of the owner's sequences and request drafts. Every status must be UNKNOWN."""
        step = self._step(self._chosen())
        drafts = await self._say(step)
        own = [status for status in drafts.statuses if status != UNKNOWN]
        if len(drafts.statuses) != len(step.sequence_ids) or own:
            raise FindingError(f"sequences of another stream are {list(drafts.statuses)} to this one")
        self.outcomes["UNKNOWN"] += 1

    async def close(self) -> None:
        """Send a step that closes the owner's sequences."""
        step = self._step({})
        step.closed_ids.extend(self._chosen())
        await self._say(step)
        self.outcomes["accepted"] += 1

    async def namesake(self, later: Sequence[int] = ()) -> None:
        """Open two equal sequences, one with an id that the owner uses now or later. Their logits must be alike."""
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
        """Return a step with random rows from row `rows[id]` on; with `is_twin` all sequences get the same rows."""
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
    """Run an owner, with attacks of a thief between two of its steps; return the outcomes of the attacks.

    Raises
    ------
    FindingError
        If the thief gets data of the owner's sequences, or the owner's answers differ from `known`.
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
