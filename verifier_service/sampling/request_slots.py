"""Slots of requests in tables on the device."""

from __future__ import annotations

from collections.abc import Sequence

from verifier_service.core.request import Request


class RequestSlots:
    """Assigns rows of a table to requests."""

    def __init__(self, count: int) -> None:
        self._slots: dict[Request, int] = {}
        self._free = list(range(count))

    def __contains__(self, request: Request) -> bool:
        return request in self._slots

    def assign(self, request: Request) -> int:
        """Give a request a slot, and return the slot."""
        slot = self._slots[request] = self._free.pop()
        return slot

    def release(self, request: Request) -> None:
        """Take a request's slot back, if it has one."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def of(self, requests: Sequence[Request]) -> list[int]:
        """Return the slots of requests, -1 for none."""
        return [self._slots.get(request, -1) for request in requests]
