"""Lists of tokens of requests, on the device from the first draw to the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwire.model.devices import upload
from verifier_service.core.request import Request
from verifier_service.sampling.request_slots import RequestSlots


class TokenLists:
    """One list of tokens per request, each token with a value, in two tables on the device.

    A list is copied to the device once. A step then names only its requests' slots.
    """

    def __init__(self, max_num_seqs: int, longest: int, device: torch.device) -> None:
        """`longest` is the most tokens of a list."""
        self._shape = (max_num_seqs, longest)
        self._device = device
        self._slots = RequestSlots(max_num_seqs)
        self._sizes: dict[Request, int] = {}
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # allocated for the first list

    def add(self, request: Request, tokens: np.ndarray, values: np.ndarray | None = None) -> None:
        """Copy a request's list to the device, if it is not there yet.

        Args:
            tokens: int64, at least one.
            values: float32, one for each token; 0 by default.
        """
        if request in self._slots:
            return
        if self._tables is None:
            self._tables = (
                torch.zeros(self._shape, dtype=torch.int64, device=self._device),
                torch.zeros(self._shape, dtype=torch.float32, device=self._device),
            )
        slot = self._slots.assign(request)
        self._sizes[request] = len(tokens)
        # The rest of the row repeats the first token with the value 0.
        row = np.full(self._shape[1], tokens[0], np.int64)
        row[: len(tokens)] = tokens
        row_values = np.zeros(self._shape[1], np.float32)
        if values is not None:
            row_values[: len(tokens)] = values
        for table, own in zip(self._tables, upload([row, row_values], self._device), strict=True):
            table[slot].copy_(own)

    def release(self, request: Request) -> None:
        """Drop the list of a request that has ended or was preempted."""
        self._slots.release(request)
        self._sizes.pop(request, None)

    def slots(self, requests: Sequence[Request]) -> list[int]:
        """Return the requests' rows of the tables, -1 for a request without a list."""
        return self._slots.of(requests)

    def tables(self, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return tokens [S, M] int64 and values [S, M] float32, where M is the longest list of `requests`.

        None if no request has a list.
        """
        longest = max((self._sizes.get(request, 0) for request in requests), default=0)
        if longest == 0 or self._tables is None:
            return None
        tokens, values = self._tables
        return tokens[:, :longest], values[:, :longest]
