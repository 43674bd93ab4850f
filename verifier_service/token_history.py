"""The tokens that penalties look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from draftwire.devices import upload
from draftwire.v1 import config_pb2
from draftwire_kernels import Penalties
from verifier_service.request import Request
from verifier_service.scheduler import Work


class TokenHistory:
    """Tokens seen by the requests that use penalties, in tables that are made when the first such request comes."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._slots: dict[Request, int] = {}
        self._free = list(range(max_num_seqs))
        self._prompt_mask: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def release(self, request: Request) -> None:
        """Drops what is kept of a request."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def penalties(self, works: Sequence[Work]) -> Penalties | None:
        """The penalties of a step, None when no request of it uses any."""
        users = [work.request for work in works if uses_penalties(work.request.params)]
        if not users:
            return None
        if self._prompt_mask is None or self._output_counts is None:
            self._prompt_mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        for request in users:
            if request not in self._slots:
                slot = self._slots[request] = self._free.pop()
                self._prompt_mask[slot] = False
                self._prompt_mask[slot, torch.tensor(request.prompt, device=self._device)] = True
                # A request that was preempted has output already.
                output = torch.tensor(request.tokens[len(request.prompt) :], dtype=torch.int64)
                self._output_counts[slot] = torch.bincount(output, minlength=self._shape[1]).to(self._device)
        params = [work.request.params for work in works]
        return Penalties(
            repetition=torch.tensor([p.repetition_penalty for p in params]),
            presence=torch.tensor([p.presence_penalty for p in params]),
            frequency=torch.tensor([p.frequency_penalty for p in params]),
            slot=torch.tensor([self._slots.get(work.request, -1) for work in works]),
            prompt_mask=self._prompt_mask,
            output_counts=self._output_counts,
        )

    def count(self, drawn: Iterable[tuple[Work, list[int]]]) -> None:
        """Adds the tokens drawn of each work to the outputs."""
        if not self._slots:
            return
        places = [
            (self._slots[work.request], token)
            for work, tokens in drawn
            if work.request in self._slots
            for token in tokens
        ]
        if places and self._output_counts is not None:
            slot, token = upload(list(np.array(places).T), self._device)
            self._output_counts.index_put_((slot, token), torch.ones_like(slot, dtype=torch.int32), accumulate=True)


def uses_penalties(params: config_pb2.SamplingParams) -> bool:
    """Whether any penalty is on."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
