"""Which requests run, and which of their rows the next step computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from draftwire.errors import QueueFullError
from draftwire.kv_cache import BlockPool, blocks_for
from verifier_service.request import ReadyDrafts, Request


@dataclass
class Work:
    """Rows of one request in a step."""

    request: Request
    start: int  # position of the first row
    tokens: list[int]  # of the rows: committed tokens, then drafts
    drafts: ReadyDrafts | None
    samples: bool  # whether its last row, or each row of a decoding request, draws a token

    @property
    def num_drafts(self) -> int:
        """Draft rows."""
        return 0 if self.drafts is None else len(self.drafts.tokens)

    @property
    def num_logit_rows(self) -> int:
        """Rows whose logits are wanted."""
        return 1 + self.num_drafts if self.samples else 0


class Scheduler:
    """Owns the queue, the running requests and the cache blocks.

    A request is admitted when the blocks for its longest possible output are free, so that none runs out midway.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_queue: int, max_prefill_rows: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._max_prefill_rows = max_prefill_rows

    def add(self, request: Request) -> None:
        """Takes a request into the batch if there is room, else into the queue.

        Raises
        ------
        QueueFullError
            When max_queue requests are waiting.
        """
        self.waiting.append(request)
        self.admit()
        if len(self.waiting) > self._max_queue:
            self.waiting.pop()
            raise QueueFullError(f"the queue is full: {self._max_queue} requests are waiting; try again later")

    def admit(self) -> None:
        """Moves requests from the queue into the batch, first come first served, and gives them their blocks."""
        while self.waiting and len(self.running) < self._max_num_seqs:
            blocks = self._pool.allocate(blocks_for(self.waiting[0].max_length))
            if blocks is None:
                break
            request = self.waiting.popleft()
            request.blocks = blocks
            request.started = time.monotonic()
            self.running.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, wherever it is, takes its blocks back and gives its place to the next."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._pool.release(request.blocks)
        request.blocks = []
        self.admit()

    def schedule(self, is_ready: Callable[[Request], bool]) -> list[Work]:
        """Rows of the next step: every decoding request that is ready, and at most max_prefill_rows rows of prompts.

        `is_ready` is False for a request that still waits for its drafts.
        """
        works = [_decode(request) for request in self.running if request.is_decoding and is_ready(request)]
        room = self._max_prefill_rows
        for request in self.running:
            if not request.is_decoding and room > 0:
                works.append(_prefill(request, room))
                room -= len(works[-1].tokens)
        return works


def _decode(request: Request) -> Work:
    last = len(request.tokens) - 1
    drafts, request.drafts = request.drafts, None
    if drafts is not None and (drafts.committed_length, drafts.last_token) != (last + 1, request.tokens[last]):
        drafts = None
    tokens = [request.tokens[last], *(drafts.tokens.tolist() if drafts is not None else ())]
    return Work(request, last, tokens, drafts, samples=True)


def _prefill(request: Request, room: int) -> Work:
    start = request.num_computed
    tokens = request.prompt[start : start + room]
    return Work(request, start, tokens, None, samples=start + len(tokens) == len(request.prompt))
