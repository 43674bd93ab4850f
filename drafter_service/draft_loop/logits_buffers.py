"""Fixed float32 buffers of the draft logits that are sent."""

from __future__ import annotations

import torch

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms


class LogitsBuffers:
    """One buffer [max_num_seqs, k, width] per width, at a fixed address, so that steps can be captured."""

    def __init__(self, max_num_seqs: int, draft_vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._draft_vocab_size = draft_vocab_size
        self._device = device
        self._logits: dict[int, torch.Tensor] = {}  # width -> float32 [max_num_seqs, k, width]
        self._token_ids: dict[int, torch.Tensor] = {}  # n -> int32 [max_num_seqs, k, n], only for top_n

    def keep(self, terms: list[SessionTerms]) -> None:
        """Allocate the buffers that sessions with these terms need, and free the others.

        Raises:
            RuntimeError: If there is no memory; the buffers are then unchanged.
        """
        widths: dict[int, int] = {}  # -> k
        top_ns: dict[int, int] = {}
        for mode, k in ((each.mode, each.num_speculative_tokens) for each in terms):
            if mode.sends_logits:
                width = mode.logits_width(self._draft_vocab_size)
                widths[width] = max(k, widths.get(width, 0))
            if mode.top_n:
                top_ns[mode.top_n] = max(k, top_ns.get(mode.top_n, 0))
        # Both or none: without memory for one, captured steps keep writing to the buffers that are read.
        logits = self._resized(self._logits, widths, torch.float32)
        token_ids = self._resized(self._token_ids, top_ns, torch.int32)
        self._logits, self._token_ids = logits, token_ids

    def _resized(
        self, buffers: dict[int, torch.Tensor], widths: dict[int, int], dtype: torch.dtype
    ) -> dict[int, torch.Tensor]:
        kept = {}
        for width, k in widths.items():
            buffer = buffers.get(width)
            if buffer is None or buffer.shape[1] < k:
                buffer = torch.zeros(self._max_num_seqs, k, width, dtype=dtype, device=self._device)
            kept[width] = buffer
        return kept

    @property
    def num_bytes(self) -> int:
        """Return the allocated memory in bytes."""
        return sum(buffer.nbytes for buffer in (*self._logits.values(), *self._token_ids.values()))

    def of(self, mode: SamplingMode) -> list[torch.Tensor]:
        """Return the allocated buffers of a mode: logits and, for top_n, token ids."""
        buffers = (self._logits.get(mode.logits_width(self._draft_vocab_size)), self._token_ids.get(mode.top_n))
        return [buffer for buffer in buffers if buffer is not None]

    def logits(self, mode: SamplingMode) -> torch.Tensor:
        """Return the logits buffer of a mode, float32 [max_num_seqs, k, width]."""
        return self._logits[mode.logits_width(self._draft_vocab_size)]

    def token_ids(self, mode: SamplingMode) -> torch.Tensor:
        """Return the buffer of target ids of a top_n mode, int32 [max_num_seqs, k, n]."""
        return self._token_ids[mode.top_n]
