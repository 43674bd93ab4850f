"""Draw one draft of each sequence, and keep the logits that are sent."""

from __future__ import annotations

import torch

from drafter_service.draft_loop.inputs import LoopInputs
from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.state import LoopState
from draftwire_kernels import gumbel_sample


class DraftSampler:
    """Argmax, or Gumbel-max at each sequence's temperature."""

    def __init__(
        self, max_num_seqs: int, draft_token_ids: torch.Tensor | None, buffers: LogitsBuffers, device: torch.device
    ) -> None:
        self._draft_token_ids = draft_token_ids
        self._buffers = buffers
        self._zeros = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)

    def draw(
        self, logits: torch.Tensor, mode: SamplingMode, offset: int, inputs: LoopInputs, state: LoopState
    ) -> torch.Tensor:
        """Draw the drafts at offset `offset` of the step from `logits` [N, V_draft].

        Returns:
            [N] int64, ids of the draft vocabulary; -1 for invalid logits.
        """
        if not mode.gumbel:
            temperatures = self._zeros[: len(logits)]
            return gumbel_sample(logits, temperatures, inputs.proposal_keys, state.draw_positions)
        if mode.dense:
            self._buffers.logits(mode)[: len(logits), offset] = logits
        elif mode.top_n:
            logits = self._keep_largest(logits, mode, offset)
        return gumbel_sample(
            logits,
            inputs.temperatures,
            inputs.proposal_keys,
            state.draw_positions,
            draft_offset=0 if mode.coupled else offset,
            token_ids=self._draft_token_ids,
            use_fp64=mode.use_fp64,
        )

    def _keep_largest(self, logits: torch.Tensor, mode: SamplingMode, offset: int) -> torch.Tensor:
        """Return the logits with -inf instead of those that are not sent."""
        largest, columns = logits.topk(mode.top_n, dim=-1)
        self._buffers.logits(mode)[: len(logits), offset] = largest
        ids = columns if self._draft_token_ids is None else self._draft_token_ids[columns]
        self._buffers.token_ids(mode)[: len(logits), offset] = ids.int()
        return torch.full_like(logits, -torch.inf).scatter_(-1, columns, largest)
