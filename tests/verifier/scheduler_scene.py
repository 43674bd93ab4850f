"""A scheduler whose scheduled rows are computed by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from drafting_scene import make_request

from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.engine.prefix_cache import PrefixCache
from verifier_service.engine.scheduler import Scheduler

Ready = Callable[[Request], bool]


def request(
    prompt_length: int = 4, max_tokens: int = 8, prompt: list[int] | None = None, *, priority: int = 0
) -> Request:
    made = make_request(range(prompt_length) if prompt is None else prompt, k=4, max_tokens=max_tokens)
    made.priority = priority
    return made


def give_drafts(one: Request, tokens: list[int], length_off: int = 0, last_off: int = 0) -> None:
    """Give a request drafts; an offset makes their length or last token differ from the request's."""
    committed, last = len(one.tokens) + length_off, one.tokens[-1] + last_off
    one.drafts = ReadyDrafts(committed, last, tokens)


@dataclass
class Batch:
    """A scheduler and a fake of the engine around it."""

    blocks: int = 100
    max_num_seqs: int = 4
    max_queue: int = 2
    max_prefill_rows: int = 1000
    max_logit_rows: int = 20
    prefix_caching: bool = False
    preempted: list[Request] = field(default_factory=list)
    useless: set[int] = field(default_factory=set)  # cached blocks that no request can use

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.blocks + 1, is_enabled=self.prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            self.max_num_seqs,
            self.max_queue,
            self.max_prefill_rows,
            self.max_logit_rows,
            self.preempted.append,
            lambda _, block: block not in self.useless,
        )

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Request]:
        return list(self.scheduler.waiting)

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)

    def schedule(self, is_ready: Ready = lambda _: True) -> list[ScheduledRows]:
        return self.scheduler.schedule(is_ready)

    def run(self, works: list[ScheduledRows], num_accepted: int = 0) -> None:
        """Compute the rows of `works`; each sampled request accepts up to `num_accepted` drafts and samples 99."""
        for work in works:
            one = work.request
            accepted = [] if work.drafts is None else work.drafts.tokens[:num_accepted]
            one.num_computed = work.start + len(work.tokens) - work.num_drafts + len(accepted)
            if work.samples:
                one.tokens += [*accepted, 99]

    def step(self, is_ready: Ready = lambda _: True) -> list[Request]:
        """Run a step that accepts no drafts; return its requests."""
        works = self.schedule(is_ready)
        self.run(works)
        return [work.request for work in works]

    def start(self, *prompt_lengths: int, max_tokens: int = 100) -> list[Request]:
        """Return new requests that have sampled their first token."""
        requests = [request(length, max_tokens) for length in prompt_lengths]
        self.add(*requests)
        self.step()
        assert all(one.is_decoding for one in requests)
        return requests
