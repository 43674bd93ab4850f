"""A step that is launched while its drafts are awaited, and begins when they are there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from draftwire.kv_cache import BLOCK_SIZE, SequenceRows
from verifier_service.core.batch import ForwardInput, ForwardOutput, ScheduledRows
from verifier_service.request import Request
from verifier_service.target_runner import TargetRunner

# It is given up after so long, so that what has come in the meantime is computed.
PATIENCE_S = 0.05


class _Span(NamedTuple):
    """Rows of a request in the step."""

    first: int  # its place in the step
    start: int  # position
    num_rows: int
    admission: int
    blocks: list[int]  # that hold them


class ExpectedStep:
    """A step of decoding requests with as many drafts as they can get.

    The step that is computed may have fewer requests and fewer drafts: what a row computes depends on the rows before
    it alone, and rows that nobody wants are overwritten before they are read, like those of refused drafts.
    """

    def __init__(self, expected: Sequence[tuple[Request, int]]) -> None:
        """`expected` are requests, which have the blocks, and their numbers of drafts."""
        self.until = math.inf  # monotonic time at which it is given up, once it is launched
        self._held: TargetRunner | None = None  # that has launched it
        self._output: ForwardOutput | None = None  # once it has begun, with these token ids
        self._token_ids: list[int] = []
        self._spans: dict[Request, _Span] = {}
        self._num_rows = 0
        # Token ids [rows] without the drafts that are still to come, and where those go.
        self._foreseen: tuple[np.ndarray, np.ndarray] | None = None
        for request, num_drafts in expected:
            self._spans[request] = _span(request, self._num_rows, 1 + num_drafts)
            self._num_rows += 1 + num_drafts

    @property
    def is_pending(self) -> bool:
        """Whether it has been launched, and neither taken nor dropped."""
        return self._held is not None or self._output is not None

    @property
    def has_begun(self) -> bool:
        """Whether it has begun, and was neither taken nor dropped."""
        return self._output is not None

    def is_same(self, other: ExpectedStep | None) -> bool:
        """Whether another one is of the very same rows."""
        return other is not None and self._spans == other._spans

    def launch(self, runner: TargetRunner) -> None:
        """Has `runner` launch it; without effect where that cannot be."""
        spans = self._spans.values()
        firsts, starts, counts = np.array([span[:3] for span in spans], np.int64).reshape(-1, 3).T
        step = ForwardInput(
            np.zeros(self._num_rows, np.int64),
            np.arange(self._num_rows) + np.repeat(starts - firsts, counts),
            # As they are now: the requests' blocks may change before it begins.
            [SequenceRows(one.blocks.copy(), span.start, span.num_rows) for one, span in self._spans.items()],
            np.arange(self._num_rows),
        )
        self._held = runner if runner.prelaunch(step) else None
        self.until = time.monotonic() + PATIENCE_S

    def has_all(self, is_awaited: Callable[[Request], bool]) -> bool:
        """Whether it can begin: it is held, and none of its drafts is awaited any more."""
        return self._held is not None and not any(map(is_awaited, [one for one in self._spans if one.drafts is None]))

    def foresee(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> None:
        """Prepares to begin with so many drafts of each of these requests, the only ones that are awaited; without
        effect where there is no room for all of them."""
        spans = self._spans
        if self._held is None or any(
            request not in spans or spans[request].num_rows != 1 + count
            for request, count in zip(requests, num_drafts, strict=True)
        ):
            return
        token_ids = np.zeros(self._num_rows, np.int64)
        for request, span in spans.items():
            token_ids[span.first] = request.tokens[-1]
            if request.drafts is not None:
                known = request.drafts.tokens[: span.num_rows - 1]
                token_ids[span.first + 1 : span.first + 1 + len(known)] = known
        counts = np.array(num_drafts, np.int64)
        firsts = np.array([spans[request].first for request in requests], np.int64)
        places = np.arange(counts.sum()) + np.repeat(firsts + 1 - counts.cumsum() + counts, counts)
        self._foreseen = token_ids, places

    @property
    def can_begin_with(self) -> bool:
        """Whether `begin_with` may be called."""
        return self._held is not None and self._foreseen is not None

    def begin_with(self, tokens: np.ndarray) -> None:
        """Begins it with drafts, int [D], of the requests that were foreseen, whatever these are given in the end;
        whether it is their step shows when it is taken."""
        assert self._held is not None
        assert self._foreseen is not None
        token_ids, places = self._foreseen
        token_ids[places] = tokens
        held, self._held, self._foreseen = self._held, None, None
        self._output = held.release(token_ids)
        self._token_ids = token_ids.tolist()

    def begin(self) -> None:
        """Begins it with the drafts that the requests have, before the step is scheduled; whether it is that step shows
        when it is taken."""
        if self._held is not None:
            tokens = []
            for request in self._spans:
                drafts = request.drafts
                tokens.append(request.tokens[-1:] if drafts is None else [request.tokens[-1], *drafts.tokens])
            self._begin(self._held, tokens)

    def take(self, works: Sequence[ScheduledRows]) -> ForwardOutput | None:
        """Its output as that of the step of `works`, logits in their order, for which it begins unless it has; None
        when it was not launched for their rows, or has begun with other tokens."""
        spans = self._spans
        if all(work.request in spans and _is_of(spans[work.request], work) for work in works):
            if self._held is not None:
                tokens = {work.request: work.tokens for work in works}
                self._begin(self._held, [tokens.get(request, []) for request in self._spans])
            output, self._output = self._output, None
            ranges = [(spans[work.request].first, len(work.tokens)) for work in works]
            is_it = all(
                self._token_ids[first : first + count] == work.tokens
                for (first, count), work in zip(ranges, works, strict=True)
            )
            if output is not None and is_it:
                return output.with_logits_of(np.concatenate([np.arange(first, first + n) for first, n in ranges]))
        self.drop()
        return None

    def _begin(self, held: TargetRunner, tokens: Sequence[list[int]]) -> None:
        """`tokens` are those of each span, which may have room for more or for fewer."""
        token_ids: list[int] = []
        for own, span in zip(tokens, self._spans.values(), strict=True):
            missing = span.num_rows - len(own)
            token_ids += own if missing == 0 else own[: span.num_rows] + [0] * missing
        self._token_ids, self._held = token_ids, None
        self._output = held.release(np.array(token_ids, np.int64))

    def drop(self) -> None:
        """Gives it up: the device computes rows that nobody wants."""
        if self._held is not None:
            self._held.abandon()
        self._held = self._output = None


def _span(request: Request, first: int, count: int) -> _Span:
    start = len(request.tokens) - 1
    blocks = request.blocks[start // BLOCK_SIZE : -(-(start + count) // BLOCK_SIZE)]
    return _Span(first, start, count, request.num_preemptions, blocks)


def _is_of(span: _Span, work: ScheduledRows) -> bool:
    """Whether a work's rows are among the span's."""
    count = len(work.tokens)
    if work.follows is not None or not work.is_decoding or count > span.num_rows:
        return False
    own = _span(work.request, span.first, count)
    return own == span._replace(num_rows=count, blocks=span.blocks[: len(own.blocks)])
