"""The tokens that penalties depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwire.model.devices import upload
from draftwire_kernels import Penalties
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.sampling.request_slots import RequestSlots
from verifier_service.sampling.sampling_spec import NO_PENALTIES, PenaltyStrengths


class TokenHistory:
    """Tokens of the requests with penalties, in tables that are allocated for the first such request.

    The tables are on the device and change in stream order: the next step reads a step's draw before the host does.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._slots = RequestSlots(max_num_seqs)
        self._prompt_mask: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def release(self, request: Request) -> None:
        """Drop the state of a request that has ended or was preempted. A preempted request draws its last tokens
        again."""
        self._slots.release(request)

    def penalties(self, requests: Sequence[Request], strengths: Sequence[PenaltyStrengths]) -> Penalties | None:
        """Return the penalties of a step's requests; None if no request has penalties."""
        users = [request for request, own in zip(requests, strengths, strict=True) if own != NO_PENALTIES]
        if not users:
            return None
        if self._prompt_mask is None or self._output_counts is None:
            self._prompt_mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        for request in users:
            if request not in self._slots:
                slot = self._slots.assign(request)
                _fill(self._prompt_mask[slot], self._output_counts[slot], request)
        repetition, presence, frequency = torch.tensor(strengths).unbind(1)
        return Penalties(
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            slot=torch.tensor(self._slots.of(requests)),
            prompt_mask=self._prompt_mask,
            output_counts=self._output_counts,
        )

    def count(self, batch: Sequence[ScheduledRows], drawn: torch.Tensor) -> None:
        """Add the drawn tokens of a batch to its requests' outputs.

        Args:
            drawn: [len(batch), 1 + k] int64 on the device, -1 for none.
        """
        slots = self._slots.of([item.request for item in batch])
        users = [(place, slot) for place, slot in enumerate(slots) if slot >= 0]
        if not users:
            return
        assert self._output_counts is not None
        place, slot = upload(list(np.array(users).T), self._device)
        tokens = drawn.index_select(0, place)
        cells = slot[:, None] * self._shape[1] + tokens.clamp(min=0)
        self._output_counts.view(-1).scatter_add_(0, cells.flatten(), (tokens >= 0).to(torch.int32).flatten())


def _fill(prompt_mask: torch.Tensor, output_counts: torch.Tensor, request: Request) -> None:
    """Write the tokens of a request into its rows of the tables; a preempted request already has output."""
    prompt = np.array(request.prompt, np.int64)
    tokens, counts = np.unique(np.array(request.tokens[len(prompt) :], np.int64), return_counts=True)
    prompt_ids, output_ids, output = upload([prompt, tokens, counts.astype(np.int32)], prompt_mask.device)
    prompt_mask.zero_().index_fill_(0, prompt_ids, True)
    output_counts.zero_().index_copy_(0, output_ids, output)
