"""Plan the next step, while another step may be in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from verifier_service.core.batch import UNKNOWN_TOKEN, ScheduledRows
from verifier_service.core.request import Request
from verifier_service.drafters.drafting import Drafting
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.step import Step, StepObserver


class Planner:
    """Plans steps from the scheduler's requests and the awaited drafts. Used only by the engine's thread.

    With asynchronous scheduling a step may be planned while another step is in flight: with other requests, with
    further rows of the same prompts, and, without drafts, with the tokens that the step in flight samples.

    Attributes:
        is_async: Whether steps are planned while another step is in flight.
    """

    def __init__(
        self, scheduler: Scheduler, drafting: Drafting, observer: StepObserver | None = None, *, is_async: bool
    ) -> None:
        """`observer` is passed to each planned step."""
        self.is_async = is_async
        self._scheduler = scheduler
        self._drafting = drafting
        self._observer = observer

    def plan(self, in_flight: Step | None, prelaunched: Step | None = None) -> Step | None:
        """Return the next step; None if there is nothing to compute, or if waiting for drafts is faster.

        Args:
            in_flight: The step that the device computes.
            prelaunched: The prelaunched step, whose drafts are awaited. The next step has its limit and no prompts.
        """
        waits = self._drafting.wait_policy
        following = self._following(in_flight) if in_flight is not None else {}
        drafted = [] if in_flight is None else [row.request for row in in_flight.rows if row.offered is not None]
        requests = [one for one in self._scheduler.running if not one.is_in_flight or one in following]
        if waits.is_held(requests, may_admit=self._scheduler.may_admit):
            return None

        def can_join(request: Request) -> bool:
            return waits.is_ready(request) and waits.may_run_beside(request, drafted)

        if in_flight is not None and not following and self._splits_batch(in_flight, can_join):
            return None
        prefills = {} if in_flight is None or waits.is_awaited else self._continuing_prefills(in_flight)
        rows = self._scheduler.schedule(
            *(can_join, following, prefills),
            takes_prompts=prelaunched is None,
            choose=partial(self._choose, prelaunched=prelaunched),
        )
        return Step(rows, self._observer) if rows else None

    def plan_awaited(self) -> Step | None:
        """Return the step in which all requests verify their awaited drafts; None if the next step differs.

        Draft rows have blocks but no tokens yet. If a request waits for admission, the next step computes its prompt.
        """
        if not self.is_async or self._scheduler.may_admit:
            return None
        running = self._scheduler.running
        num_drafts = self._drafting.wait_policy.expected_drafts(running)
        if num_drafts is None:
            return None
        rooms = [*map(self._scheduler.place_drafts, running, num_drafts)]
        if min(rooms) < 0:
            return None
        limit = self._drafting.budget.limit(rooms)
        return Step([*map(_awaited_rows, running, rooms)], self._observer, limit=limit)

    def _choose(self, decoding: Sequence[Request], *, prelaunched: Step | None) -> dict[Request, int]:
        """Return the number of verified drafts of each request with drafts."""
        if not any(one.drafts is not None for one in decoding):
            return {}
        if prelaunched is not None and prelaunched.chosen is not None:
            return prelaunched.chosen
        budget = self._drafting.budget
        offers = budget.offers(decoding)
        limit = budget.limit(offers.num_drafts.tolist()) if prelaunched is None else prelaunched.limit
        return dict(zip(decoding, budget.choose(limit, offers).tolist(), strict=True))

    @property
    def all_wait(self) -> bool:
        """Return whether all requests wait for drafts, so that nothing can be scheduled."""
        return not self._scheduler.may_admit and self._drafting.wait_policy.all_wait(self._scheduler.running)

    def _splits_batch(self, in_flight: Step, can_join: Callable[[Request], bool]) -> bool:
        """Return whether a step beside the step in flight would split the batch of the next step. Requests without a
        drafter would never share a step again, and a step of prompts only would delay requests whose drafts arrive
        soon."""
        waits, is_bound = self._drafting.wait_policy, self._drafting.placement.is_bound
        others = [one for one in self._scheduler.running if one.is_decoding and not one.is_in_flight]
        in_step = [row.request for row in in_flight.rows if row.is_current]
        decoding = [one for one in in_step if one.is_decoding]
        joining = [one for one in others if can_join(one)]
        if not joining:
            return any(one.drafts is not None for one in others) or waits.come_soon(decoding)
        if any(not is_bound(one) for one in others) and any(not is_bound(one) for one in in_step):
            return True
        # Sequences of two near drafters are faster in one step.
        return all(one.drafts is not None for one in joining) and waits.come_soon(decoding)

    def _following(self, in_flight: Step) -> dict[Request, int]:
        """Return the requests that continue before the step in flight has their tokens, and the indices of these tokens
        in its sample. Either all or no requests continue, so that they stay in one batch."""
        output = in_flight.sampler_output
        if output is None or output.first_tokens is None or self._drafting.wait_policy.is_awaited:
            return {}
        # A continuing request may be preempted; its sampled token must not have been announced to a drafter.
        if any(row.request.is_announced for row in output.rows):
            return {}
        if not self._drafting.placement.may_decode_ahead(row.request for row in output.rows):
            return {}
        following: dict[Request, int] = {}
        for place, row in enumerate(output.rows):
            request = row.request
            if not row.is_current or len(request.tokens) + 1 >= request.max_length:
                continue
            if row.num_drafts > 0:
                return {}
            following[request] = place
        return following

    def _continuing_prefills(self, in_flight: Step) -> dict[Request, int]:
        """Return the requests with further prompt rows after those in flight, and the position of the first."""
        return {
            row.request: row.start + len(row.tokens)
            for row in in_flight.rows
            if not row.samples and row.is_current and self._drafting.placement.may_prefill_ahead(row.request)
        }


def _awaited_rows(request: Request, num_drafts: int) -> ScheduledRows:
    """Return the rows of a request that waits for up to `num_drafts` drafts."""
    last = len(request.tokens) - 1
    return ScheduledRows(request, last, [request.tokens[last]] + [UNKNOWN_TOKEN] * num_drafts, None, samples=True)
