"""What the next step computes: which requests' rows go together, while another step may be in flight."""

from __future__ import annotations

from collections.abc import Callable

from verifier_service.core.batch import ScheduledRows
from verifier_service.drafting import Drafting
from verifier_service.flight import Flight
from verifier_service.pass_ahead import PassAhead
from verifier_service.request import Request
from verifier_service.scheduler import Scheduler


class NextStep:
    """Used by the engine's thread alone."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting, pass_ahead: PassAhead) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._pass_ahead = pass_ahead

    def choose(self, flight: Flight | None) -> list[ScheduledRows]:
        """Schedules rows, none where a step had better wait. `flight` is the step that runs."""
        gate = self._drafting.gate
        following = self._following(flight) if flight is not None else {}
        drafted = [] if flight is None else [work.request for work in flight.works if work.num_drafts > 0]
        requests = [one for one in self._scheduler.running if not one.is_in_flight or one in following]
        has_launched = flight is not None or self._pass_ahead.is_pending
        if gate.is_held(requests, has_launched=has_launched, may_admit=self._scheduler.may_admit):
            return []

        def can_go(request: Request) -> bool:
            return gate.is_ready(request) and gate.takes_turns(request, drafted)

        if flight is not None and not following and self._would_part(flight, can_go):
            return []
        going_on = {} if flight is None or gate.is_counted_on else self._going_on(flight)
        return self._scheduler.schedule(can_go, following, going_on, takes_prompts=not self._pass_ahead.is_pending)

    def _would_part(self, flight: Flight, can_go: Callable[[Request], bool]) -> bool:
        """Whether a step beside one that is in flight would part requests that a step after it has together: some
        without a drafter would never be in one again, and prompts alone would go before others that can go soon."""
        gate, is_bound = self._drafting.gate, self._drafting.is_bound
        others = [one for one in self._scheduler.running if one.is_decoding and not one.is_in_flight]
        flying = [work.request for work in flight.works if work.is_current]
        landing = [one for one in flying if one.is_decoding]
        going = [one for one in others if can_go(one)]
        if not going:
            return any(one.drafts is not None for one in others) or gate.come_soon(landing)
        if any(not is_bound(one) for one in others) and any(not is_bound(one) for one in flying):
            return True
        # Sequences of two drafters that are near are faster in one step.
        takes_no_turns = all(one.drafts is not None for one in going) and not any(map(gate.has_groups, going + flying))
        return takes_no_turns and gate.come_soon(landing)

    def _following(self, flight: Flight) -> dict[Request, int]:
        """The requests of a step that can go on before its tokens are known, and the tokens' places in its draw: all
        that go on, or none, so that they stay together, but for a few that look after a drafter."""
        if flight.pending is None or flight.pending.first_tokens is None or self._drafting.gate.is_counted_on:
            return {}
        held_back = self._drafting.held_back(flight.sampling)
        # Who goes on may give its blocks back, and with them what it draws, which a drafter must not have seen.
        if held_back is None or any(work.request.is_foretold for work in flight.sampling):
            return {}
        following: dict[Request, int] = {}
        for place, work in enumerate(flight.sampling):
            request = work.request
            if not work.is_current or len(request.tokens) + 1 >= request.max_length or request in held_back:
                continue
            if work.num_drafts > 0:
                return {}
            following[request] = place
        return following

    def _going_on(self, flight: Flight) -> dict[Request, int]:
        """The prompts that go on while a step is in flight that has rows of them and not the last one, and the first
        row after those."""
        return {
            work.request: work.start + len(work.tokens)
            for work in flight.works
            if not work.samples and work.is_current and self._drafting.may_go_on(work.request)
        }
