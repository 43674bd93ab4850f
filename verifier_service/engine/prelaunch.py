"""A forward pass that is launched before its drafts arrive, and released with the drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from draftwire.model.kv_cache import BLOCK_SIZE, SequenceRows
from verifier_service.core.batch import ForwardInput, ScheduledRows
from verifier_service.core.request import Request
from verifier_service.drafters.budgeting import DraftBudget, Offers
from verifier_service.drafters.session import AwaitedAnswer, UncheckedDrafts
from verifier_service.drafters.stream import Answered
from verifier_service.engine.step import Stage, Step
from verifier_service.target.runner import TargetRunner

# Seconds after which a prelaunched forward pass is abandoned, so that new requests are computed.
PATIENCE_S = 0.05


class Prelaunch:
    """At most one prelaunched step. Used only by the executor.

    The confirmed step may have fewer requests and fewer drafts: a row depends only on the rows before it, and surplus
    rows are overwritten before they are read, like rows of rejected drafts.

    The pass of a step with a limit has room for fewer rows than drafts may arrive. Its rows are written when the step
    is released.
    """

    def __init__(self, runner: TargetRunner, vocab_size: int, budget: DraftBudget) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._budget = budget
        self._step: Step | None = None
        self._deadline = 0.0  # monotonic time
        self._launched: dict[Request, _Place] = {}  # rows of the last prelaunched step, one for each possible draft
        self._places: dict[Request, _Place] = {}  # the same, or the released rows of a step with a limit
        self._firsts = self._most = np.zeros(0, np.int64)  # first row and number of rows of each place
        self._awaited: AwaitedAnswer | None = None  # the answer with all drafts of the step, if one has all
        self._template: _Template | None = None  # of the awaited answer's step
        self._token_ids: list[int] = []  # of the released step

    @property
    def pending(self) -> Step | None:
        """Return the prelaunched step that is neither confirmed nor abandoned, or None."""
        return self._step

    @property
    def is_released(self) -> bool:
        """Return whether the prelaunched step was released."""
        return self._step is not None and self._step.stage is Stage.RELEASED

    @property
    def deadline(self) -> float | None:
        """Return the monotonic time at which the prelaunched step is abandoned; None without a step."""
        return None if self._step is None else self._deadline

    def launch(self, step: Step) -> None:
        """Launch the forward pass of a planned step, if the runner can; all rows of the step have logits.

        A step with the rows of the previous prelaunched step is not launched: that step was abandoned.
        """
        self._awaited, places, first = None, {}, 0
        for row in step.rows:
            places[row.request] = _place(row, first)
            first += len(row.tokens)
        if places == self._launched:
            return
        self._launched = self._places = places
        self._template = None
        firsts, starts, counts = np.array([place[:3] for place in places.values()], np.int64).T
        self._firsts, self._most = firsts, counts
        forward = ForwardInput(
            np.zeros(first, np.int64),
            np.arange(first) + np.repeat(starts - firsts, counts),
            # A copy: the requests' blocks may change before the step is released.
            [SequenceRows(row.request.blocks.copy(), row.start, len(row.tokens)) for row in step.rows],
            np.arange(first),
        )
        most_rows = None if step.limit is None else len(places) + step.limit.most_drafts
        if self._runner.prelaunch(forward, most_rows):
            self._step, self._deadline = step, time.monotonic() + PATIENCE_S
            step.advance(Stage.PRELAUNCHED)

    def expect(self, awaited: AwaitedAnswer | None) -> None:
        """Prepare to release the step with the drafts of one answer, unless they do not fit."""
        self._awaited, places = awaited, self._places
        if self._step is None or awaited is None:
            return
        order = {request: index for index, request in enumerate(places)}
        counts = np.array(awaited.num_drafts, np.int64)
        indices = np.array([order.get(request, -1) for request in awaited.requests], np.int64)
        if indices.min(initial=0) < 0 or (self._most[indices] != 1 + counts).any():
            return
        token_ids = np.zeros(int(self._most.sum()), np.int64)
        token_ids[self._firsts] = [request.tokens[-1] for request in places]
        for request, place in places.items():
            if request.drafts is not None:
                known = request.drafts.tokens[: place.num_rows - 1]
                token_ids[place.first + 1 : place.first + 1 + len(known)] = known
        # Each awaited draft's request, as an index in the step, and its offset.
        owner = np.repeat(indices, counts)
        offset = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        is_limited = self._step.limit is not None
        offers = self._budget.offers(list(places), int(counts.max(initial=0))) if is_limited else None
        self._template = _Template(token_ids, self._firsts[owner] + 1 + offset, offers, (owner, offset))

    @property
    def _can_be_filled(self) -> bool:
        """Return whether the step waits for the drafts of one answer only."""
        return self._step is not None and self._step.stage is Stage.PRELAUNCHED and self._template is not None

    def read_answer(self, answer: Answered) -> UncheckedDrafts | None:
        """Return the drafts of an unchecked answer, if the step waits for that answer; else None.

        `confirm` abandons the step if the answer proves wrong.
        """
        awaited = self._awaited
        if awaited is None or awaited.stream is not answer.stream or not self._can_be_filled:
            return None
        return awaited.read_answer(answer.drafts, self._vocab_size)

    @property
    def has_early_drafts(self) -> bool:
        """Return whether the drafts are in shared memory before their answer."""
        return self._awaited is not None and self._can_be_filled and self._awaited.has_early_drafts()

    def read_early_drafts(self) -> UncheckedDrafts | None:
        """Return the drafts in shared memory; None if they are invalid. Call once."""
        assert self._awaited is not None
        return self._awaited.read_early_drafts(self._vocab_size)

    def release(self, drafts: UncheckedDrafts) -> None:
        """Release the step with the drafts of the awaited answer."""
        template = self._template
        assert template is not None
        template.token_ids[template.places] = drafts.tokens
        if self._step is None or self._step.limit is None:
            self._release(template.token_ids)
            return
        assert template.offers is not None
        self._release_chosen(template.token_ids, template.offers.with_more(*template.cells, drafts.confidences))

    def _release_chosen(self, token_ids: np.ndarray, offers: Offers) -> None:
        """Release a step with a limit with the chosen drafts; `token_ids` are for all rows that it may have."""
        step = self._step
        assert step is not None
        chosen = self._budget.choose(step.limit, offers)
        counts = np.minimum(1 + chosen, self._most)
        # Index of each possible row within its request.
        offsets = np.arange(len(token_ids)) - np.repeat(self._firsts, self._most)
        self._release_rows(token_ids[offsets < np.repeat(counts, self._most)], counts)
        # Afterwards, because the device waits for the release.
        pairs = zip(offers.requests, chosen.tolist(), offers.num_drafts.tolist(), strict=True)
        step.chosen = {request: count for request, count, num_drafts in pairs if num_drafts > 0}

    def _release_rows(self, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Release a step with a limit with `counts` rows of each request; abandon it if they do not fit."""
        assert self._step is not None
        assert self._step.limit is not None
        if counts.sum() > len(counts) + self._step.limit.most_drafts:
            self.abandon()
            return
        self._release(token_ids, counts)
        firsts, rows = (counts.cumsum() - counts).tolist(), counts.tolist()
        self._places = {
            request: place._replace(first=first, num_rows=num_rows)
            for (request, place), first, num_rows in zip(self._places.items(), firsts, rows, strict=True)
        }

    def has_all_drafts(self, is_waiting: Callable[[Request], bool]) -> bool:
        """Return whether the step is not released and none of its requests waits for drafts."""
        if self._step is None or self._step.stage is not Stage.PRELAUNCHED:
            return False
        return not any(map(is_waiting, [request for request in self._places if request.drafts is None]))

    def release_with_known_drafts(self) -> None:
        """Release the step with its requests' present drafts."""
        assert self._step is not None
        token_ids = self._padded({request: _known_tokens(request) for request in self._places})
        if self._step.limit is None:
            self._release(token_ids)
        else:
            self._release_chosen(token_ids, self._budget.offers(list(self._places)))

    def _release_with(self, tokens: Mapping[Request, list[int]]) -> None:
        """Release the step with the tokens of each request, cut or padded to the number of its rows."""
        if self._step is None or self._step.limit is None:
            self._release(self._padded(tokens))
            return
        own = [tokens.get(request, [0])[: place.num_rows] for request, place in self._places.items()]
        flat = [token for one in own for token in one]
        self._release_rows(np.array(flat, np.int64), np.array([len(one) for one in own], np.int64))

    def _padded(self, tokens: Mapping[Request, list[int]]) -> np.ndarray:
        """Return the token ids of all rows: the tokens of each request, cut or padded to the number of its rows."""
        token_ids: list[int] = []
        for request, place in self._places.items():
            own = tokens.get(request, [])
            missing = place.num_rows - len(own)
            token_ids += own if missing == 0 else own[: place.num_rows] + [0] * missing
        return np.array(token_ids, np.int64)

    def _release(self, token_ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        step = self._step
        assert step is not None
        self._template = None
        try:
            step.forward = self._runner.release(token_ids, counts)
            step.advance(Stage.RELEASED)
        except BaseException:
            self._step = None
            step.abandon()
            raise
        self._token_ids = token_ids.tolist()

    def confirm(self, rows: Sequence[ScheduledRows]) -> Step | None:
        """Return the released step with `rows` if its forward pass computes these rows; else abandon the step."""
        step, places = self._step, self._places
        if step is not None and all(row.request in places and _is_within(row, places[row.request]) for row in rows):
            if step.stage is Stage.PRELAUNCHED:
                self._release_with({row.request: row.tokens for row in rows})
                places = self._places
            ranges = [(places[row.request].first, len(row.tokens)) for row in rows]
            has_tokens = all(
                self._token_ids[first : first + count] == row.tokens
                for (first, count), row in zip(ranges, rows, strict=True)
            )
            if step.forward is not None and has_tokens:
                self._step = None
                logit_rows = np.concatenate([np.arange(first, first + count) for first, count in ranges])
                step.rows, step.forward = rows, step.forward.with_logits_of(logit_rows)
                return step
        self.abandon()
        return None

    def abandon(self) -> None:
        """Abandon the prelaunched step, if any, and let the device continue."""
        step, self._step = self._step, None
        self._awaited = None  # refers to a stream, and so to memory shared with a drafter
        if step is not None:
            if step.stage is Stage.PRELAUNCHED:
                self._runner.abandon()
            step.abandon()


class _Template(NamedTuple):
    """The rows of a prelaunched step that waits for D drafts of one answer."""

    token_ids: np.ndarray  # int64 [rows], without these drafts
    places: np.ndarray  # int64 [D], their indices in token_ids
    offers: Offers | None  # of the step's requests, without these drafts; None without a limit
    cells: tuple[np.ndarray, np.ndarray]  # int64 [D] each: the index of a draft's request, and its offset


class _Place(NamedTuple):
    """Location of a request's rows in a prelaunched step and in the cache."""

    first: int
    start: int  # position
    num_rows: int
    admission: int
    blocks: list[int]  # of the rows


def _known_tokens(request: Request) -> list[int]:
    """Return the tokens of a request's rows: its last token and its drafts."""
    return [request.tokens[-1], *(() if request.drafts is None else request.drafts.tokens)]


def _place(row: ScheduledRows, first: int) -> _Place:
    count = len(row.tokens)
    blocks = row.request.blocks[row.start // BLOCK_SIZE : -(-(row.start + count) // BLOCK_SIZE)]
    return _Place(first, row.start, count, row.request.num_preemptions, blocks)


def _is_within(row: ScheduledRows, place: _Place) -> bool:
    """Return whether the rows are among those of a prelaunched step."""
    if row.follows is not None or not row.is_decoding or len(row.tokens) > place.num_rows:
        return False
    own = _place(row, place.first)
    return own == place._replace(num_rows=own.num_rows, blocks=place.blocks[: len(own.blocks)])
