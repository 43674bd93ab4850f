"""The scheduler: chooses the requests that run and the rows of the next step."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from draftwire.contract.errors import QueueFullError
from draftwire.model.block_pool import blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import UNKNOWN_TOKEN, ScheduledRows
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.core.request import Request
from verifier_service.core.retry_hint import RetryAfterEstimator
from verifier_service.engine.prefix_cache import PrefixCache

# Maximum number of rows of one prompt with log probabilities in a step, so that they fit into one message.
MOST_PROMPT_LOGIT_ROWS = 256


def queue_full(max_queue: int, retry_after_s: float) -> QueueFullError:
    """Return the error of a request that finds the queue full."""
    return QueueFullError(f"the queue is full: {max_queue} requests are waiting; try again later", retry_after_s)


class Scheduler:
    """Owns the queue, the running requests and the cache blocks.

    Waiting requests are admitted by priority, lower numbers first, then in order of arrival. A request is admitted if
    there are blocks for its tokens, and grows block by block. If no block is free, the last running request in this
    order is preempted: it releases its blocks, returns to the queue, and is computed again later. A waiting request
    never preempts a running one. A request of full length fits into the cache, so the first request in this order
    always continues. Requests with a common prefix and equal salts share full blocks; further outputs of a prompt wait
    until the first output has computed the prompt.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_seqs: int,
        max_queue: int,
        max_prefill_rows: int,
        max_logit_rows: int,
        on_preempt: Callable[[Request], None],
        is_usable: Callable[[Request, int], bool],
    ) -> None:
        """`max_logit_rows` are the most rows of a step with logits, at least max_num_seqs. `on_preempt` is called with
        each preempted request; `is_usable` returns whether a request can use a cached block.
        """
        self.waiting: list[Request] = []  # in the order of `_order`
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_reused_rows = 0
        # Tokens of admitted requests, and those of them found in the cache.
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self._arrivals = itertools.count()
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._retry_after = RetryAfterEstimator(max_queue)
        self._max_prefill_rows = max_prefill_rows
        self._max_logit_rows = max_logit_rows
        self._on_preempt = on_preempt
        self._is_usable = is_usable

    def add(self, *requests: Request) -> None:
        """Put all or none of the requests into the queue.

        Raises:
            QueueFullError: If there were more than max_num_seqs running and max_queue waiting requests.
        """
        if len(self.running) + len(self.waiting) + len(requests) > self._max_num_seqs + self._max_queue:
            raise queue_full(self._max_queue, self._retry_after.retry_after_s())
        for request in requests:
            request.arrival = next(self._arrivals)
            insort(self.waiting, request, key=_order)

    def remove(self, request: Request, *, has_failed: bool = False) -> None:
        """Forget a waiting or running request and release its blocks; rows of a failed request are not reused."""
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
                self._retry_after.count_end()
        if has_failed:
            self._cache.withdraw(request.blocks)
        else:
            self._publish(request)
        self._release(request)

    def schedule(
        self,
        is_ready: Callable[[Request], bool],
        following: Mapping[Request, int] = MappingProxyType({}),
        continuing_prefills: Mapping[Request, int] = MappingProxyType({}),
        *,
        takes_prompts: bool = True,
        choose: Callable[[Sequence[Request]], Mapping[Request, int]] = lambda _: {},
    ) -> list[ScheduledRows]:
        """Return the rows of the next step: all decoding requests that are ready, and at most max_prefill_rows rows of
        prompts.

        Rows of decoding requests take precedence over rows of prompts and over drafts.

        Args:
            is_ready: Returns False for a request that waits for its drafts.
            following: Requests in flight that get exactly one more token from the running step, and its index in the
                sample. They continue with a row of this token; other requests in flight are left out.
            continuing_prefills: Requests in flight with further rows of their prompts, and the first of these rows.
            takes_prompts: False leaves the rows of prompts to a later step.
            choose: Returns the number of verified drafts for decoding requests that verify fewer than arrived.
        """
        for request in self.running:
            if request.num_computed // BLOCK_SIZE > request.num_published:
                self._publish(request)
        decoding = [
            request
            for request in self.running
            if (request in following or (request.is_decoding and not request.is_in_flight)) and is_ready(request)
        ]
        lengths = [len(request.tokens) + (request in following) for request in decoding]
        missing = sum(
            max(0, blocks_for(length) - len(request.blocks)) for request, length in zip(decoding, lengths, strict=True)
        )
        if self._cache.num_free < missing:  # only if necessary, because a launched step may use these blocks
            self._take_back_draft_rows()
        for request, length in zip(decoding, lengths, strict=True):
            if length > len(request.blocks) * BLOCK_SIZE:
                self._grow(request, length)
        most = choose([request for request in decoding if request.blocks])
        scheduled = [
            self._decode(request, following.get(request), most.get(request)) for request in decoding if request.blocks
        ]
        room = self._max_prefill_rows if takes_prompts else 0
        for request in self.running:
            if room > 0 and not request.is_decoding and (request in continuing_prefills or not request.is_in_flight):
                start = continuing_prefills.get(request, request.num_computed)
                scheduled.append(self._prefill(request, start, room, scheduled))
                room -= len(scheduled[-1].tokens)
        while room > 0 and (admitted := self._admit()) is not None:
            scheduled.append(self._prefill(admitted, admitted.num_computed, room, scheduled))
            room -= len(scheduled[-1].tokens)
        return scheduled

    def _prefill(self, request: Request, start: int, room: int, scheduled: Sequence[ScheduledRows]) -> ScheduledRows:
        """Return at most `room` rows of a prompt from `start` on, beside `scheduled`.

        A prompt with log probabilities takes rows with logits, but leaves one for each other request.
        """
        if request.num_prompt_logprobs_left > 0:
            used = sum(one.num_logit_rows + one.num_prompt_logit_rows for one in scheduled)
            free = self._max_logit_rows - used - (self._max_num_seqs - len(scheduled) - 1)
            repeated = max(start, request.num_prompt_logprobs) - start  # after a preemption
            room = min(room, repeated + min(free, MOST_PROMPT_LOGIT_ROWS))
        tokens = request.tokens[start : start + room]
        return ScheduledRows(request, start, tokens, None, samples=start + len(tokens) == len(request.tokens))

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the cache blocks in use, [0, 1]."""
        return self._cache.usage

    @property
    def may_admit(self) -> bool:
        """Return whether the next step may admit a waiting request."""
        has_room = len(self.running) < min(self._max_num_seqs, self._cache.num_free)
        return has_room and any(not self._waits_for_prompt(request) for request in self.waiting)

    @property
    def num_admissible(self) -> int:
        """Return the number of waiting requests that max_num_seqs allows to run."""
        return min(len(self.waiting), self._max_num_seqs - len(self.running))

    def _waits_for_prompt(self, request: Request) -> bool:
        """Return whether another output of the same prompt still computes blocks that the request can share."""
        leader = request.leader
        if leader is None or leader.first_token is not None or not self._cache.is_enabled:
            return False
        return len(leader.prompt) > BLOCK_SIZE and (leader in self.running or leader in self.waiting)

    def _admit(self) -> Request | None:
        """Admit the first waiting request that can begin, if one block remains for each running request."""
        if not self.may_admit:
            return None
        request = next(request for request in self.waiting if not self._waits_for_prompt(request))
        known = self._take_known(request)
        num_missing = blocks_for(len(request.tokens)) - len(known)
        if num_missing + len(self.running) > self._cache.num_free:
            self._cache.release(known)
            return None
        request.blocks = known + (self._cache.allocate(num_missing) or [])
        request.num_published = len(known)
        request.num_computed = request.num_reused = len(known) * BLOCK_SIZE
        self.num_reused_rows += request.num_reused
        if request.started is None:
            request.started = time.monotonic()
            request.num_prefix_hits = request.num_reused
            if self._cache.is_enabled:
                self.prefix_cache_queries += len(request.tokens)
                self.prefix_cache_hits += request.num_reused
        self.waiting.remove(request)
        self.running.append(request)
        return request

    def _take_known(self, request: Request) -> list[int]:
        """Return the cached blocks of the request's first rows; the last token always runs, for its logits."""
        if not self._cache.is_enabled:
            return []
        most = (len(request.tokens) - 1) // BLOCK_SIZE
        if request.num_prompt_logprobs_left > 0:  # their rows must run for the logits
            most = min(most, request.num_prompt_logprobs // BLOCK_SIZE)
        self._cache.extend_hashes(request.block_hashes, request.tokens, most, request.cache_salt)
        return self._cache.take_known(request.block_hashes[:most], lambda block: self._is_usable(request, block))

    def _publish(self, request: Request) -> None:
        """Publish the blocks filled with computed rows of committed tokens."""
        full = min(request.num_computed, len(request.tokens)) // BLOCK_SIZE
        if full > request.num_published and self._cache.is_enabled:
            self._cache.extend_hashes(request.block_hashes, request.tokens, full, request.cache_salt)
            for i in range(request.num_published, full):
                if self._cache.publish(request.blocks[i], request.block_hashes[i]):
                    self._record_stored(request, i)
            request.num_published = full

    def flush_cache(self) -> int:
        """Forget the prefixes that no request uses, and return how many blocks can still be found."""
        return self._cache.drop_unused()

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """Call `deliver` with the blocks of the prefix cache, and with every change.

        Unused blocks are forgotten, because their tokens are no longer known.
        """
        self._cache.drop_unused()
        self._cache.events.start(deliver)
        recorded: set[bytes] = set()
        for request in self.running:
            for i, block_hash in enumerate(request.block_hashes[: request.num_published]):
                if block_hash not in recorded:
                    recorded.add(block_hash)
                    self._record_stored(request, i)

    def deliver_cache_events(self) -> None:
        """Deliver the changes of the prefix cache, if they are recorded."""
        self._cache.events.flush()

    def _record_stored(self, request: Request, index: int) -> None:
        if self._cache.events.is_recording:
            hashes, tokens = request.block_hashes, request.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            parent = hashes[index - 1] if index else None
            self._cache.events.stored(parent, hashes[index], tokens, request.cache_salt)

    def _grow(self, request: Request, length: int) -> None:
        """Give a decoding request the blocks of `length` rows; if necessary, preempt the last unannounced request."""
        while request.blocks and length > len(request.blocks) * BLOCK_SIZE:
            block = self._cache.allocate(1)
            if block is None:
                self._preempt()
            else:
                request.blocks += block

    def _preempt(self) -> None:
        request = max((one for one in self.running if not one.is_announced), key=_order)
        self.running.remove(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._release(request)
        request.num_in_flight = 0  # its running steps' samples are dropped
        if request.grammar is not None:
            request.grammar.rewind(request.num_output)
        request.drafts = None
        insort(self.waiting, request, key=_order)
        self._on_preempt(request)

    def _release(self, request: Request) -> None:
        self._cache.release(request.blocks)
        request.blocks = []
        request.num_computed = 0

    def _decode(self, request: Request, follows: int | None, most: int | None) -> ScheduledRows:
        if follows is not None:
            return ScheduledRows(request, len(request.tokens), [UNKNOWN_TOKEN], None, samples=True, follows=follows)
        last = len(request.tokens) - 1
        drafts, request.drafts = request.drafts, None
        cause, offered = None, None
        if drafts is not None and (drafts.committed_length, drafts.last_token) == (last + 1, request.tokens[last]):
            offered = drafts
            wanted = len(drafts.tokens) if most is None else min(most, len(drafts.tokens))
            count = min(wanted, self.place_drafts(request, len(drafts.tokens)))
            if count < len(drafts.tokens):
                drafts = drafts.first(count) if count > 0 else None
            if drafts is None:
                cause = generate_pb2.FALLBACK_CAUSE_PACE if wanted == 0 else generate_pb2.FALLBACK_CAUSE_KV_CACHE
            elif request.grammar is not None:
                request.grammar.follow(request.tokens[len(request.prompt) + request.grammar.num_tokens :])
                count = request.grammar.num_verified(drafts.tokens, has_logits=drafts.logits is not None)
                drafts = drafts.first(count) if count > 0 else None
                cause = None if drafts else generate_pb2.FALLBACK_CAUSE_STRUCTURED_OUTPUT
        else:
            drafts = None
        tokens = [request.tokens[last], *(drafts.tokens if drafts is not None else ())]
        return ScheduledRows(request, last, tokens, drafts, samples=True, cause=cause, offered=offered)

    def place_drafts(self, request: Request, count: int) -> int:
        """Return how many of `count` draft rows have room; negative if the last token has no room.

        Dropping drafts for lack of room is unbiased, because `count` is independent of the drafts' values. So it is not
        the number of chosen drafts, which depends on values.
        """
        room = len(request.blocks) * BLOCK_SIZE - len(request.tokens)
        if room >= count:
            return count
        missing = blocks_for(len(request.tokens) + count) - len(request.blocks)
        request.blocks += self._cache.allocate(min(missing, self._cache.num_free)) or []
        return min(count, len(request.blocks) * BLOCK_SIZE - len(request.tokens))

    def _take_back_draft_rows(self) -> None:
        """Free the blocks that hold only draft rows of earlier steps."""
        for request in self.running:
            if request.is_in_flight:
                continue  # its draft rows may be accepted
            needed = blocks_for(len(request.tokens))
            self._cache.release(request.blocks[needed:])
            del request.blocks[needed:]


def _order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
