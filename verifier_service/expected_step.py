"""A step that is launched while its drafts are awaited, and begins when they are there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from draftwire.kv_cache import BLOCK_SIZE, SequenceRows
from verifier_service.request import Request
from verifier_service.scheduler import Work
from verifier_service.target_runner import HeldStep, StepOutput, StepRows

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
        self._held: HeldStep | None = None
        self._spans: dict[Request, _Span] = {}
        self._num_rows = 0
        for request, num_drafts in expected:
            self._spans[request] = _span(request, self._num_rows, 1 + num_drafts)
            self._num_rows += 1 + num_drafts

    @property
    def is_held(self) -> bool:
        """Whether it has been launched and not begun."""
        return self._held is not None

    def is_same(self, other: ExpectedStep | None) -> bool:
        """Whether another one is of the very same rows."""
        return other is not None and self._spans == other._spans

    def launch(self, hold: Callable[[StepRows], HeldStep | None]) -> None:
        """Has `hold` launch it; without effect where that cannot be."""
        spans = self._spans.values()
        step = StepRows(
            np.zeros(self._num_rows, np.int64),
            np.concatenate([np.arange(span.start, span.start + span.num_rows) for span in spans]),
            [SequenceRows(request.blocks, span.start, span.num_rows) for request, span in self._spans.items()],
            np.arange(self._num_rows),
        )
        self._held = hold(step)
        self.until = time.monotonic() + PATIENCE_S

    def drop(self) -> None:
        """Gives it up: the device computes rows that nobody wants."""
        if self._held is not None:
            self._held.drop()
        self._held = None

    def begin(self, works: Sequence[Work]) -> StepOutput | None:
        """Computes it as the step of `works`, logits in their order; None when they are not of what was launched, or
        nothing is held."""
        held, self._held = self._held, None
        if held is None:
            return None
        if not all(work.request in self._spans and _holds(self._spans[work.request], work) for work in works):
            held.drop()
            return None
        token_ids = np.zeros(self._num_rows, np.int64)
        firsts = [self._spans[work.request].first for work in works]
        for first, work in zip(firsts, works, strict=True):
            token_ids[first : first + len(work.tokens)] = work.tokens
        output = held.begin(token_ids)
        rows = [np.arange(first, first + len(work.tokens)) for first, work in zip(firsts, works, strict=True)]
        return None if output is None else output.with_logits_of(np.concatenate(rows))


def _span(request: Request, first: int, count: int) -> _Span:
    start = len(request.tokens) - 1
    blocks = request.blocks[start // BLOCK_SIZE : -(-(start + count) // BLOCK_SIZE)]
    return _Span(first, start, count, request.num_preemptions, blocks)


def _holds(span: _Span, work: Work) -> bool:
    count = len(work.tokens)
    if work.follows is not None or not work.is_decoding or count > span.num_rows:
        return False
    own = _span(work.request, span.first, count)
    return own == span._replace(num_rows=count, blocks=span.blocks[: len(own.blocks)])
