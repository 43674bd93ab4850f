"""P-EAGLE: an EAGLE-3 head that drafts all tokens after the first in one pass over mask rows."""

from __future__ import annotations

import torch

from drafter_service.heads.eagle3 import Eagle3Head
from drafter_service.heads.eagle_config import EagleConfig
from drafter_service.heads.spec import DraftContext, Rows
from drafter_service.heads.tensors import TensorSource


class PEagleHead(Eagle3Head):
    """A P-EAGLE head (arXiv 2602.01469).

    The last accepted row predicts the first draft. Each later draft is predicted by a row with the mask token and, in
    place of features, the trained `mask_hidden`. A row sees all rows before it.
    """

    def __init__(
        self, config: EagleConfig, source: TensorSource, fingerprint: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, source, fingerprint, dtype, device)
        self._mask_token_id = config.mask_token_id
        self._mask_state = self.fuse(source.vector("mask_hidden", config.spec.feature_width)[None])

    def draft(self, context: DraftContext, num_drafts: int) -> None:
        rows, cache = context.rows, context.cache
        states = self.forward(rows.tokens, context.states, rows.positions, cache, rows.batch)[context.last_rows]
        context.draw(0, self.logits(states))
        if num_drafts == 1:
            return
        block: Rows = context.block(num_drafts - 1)
        tokens = block.tokens + self._mask_token_id
        masks = self._mask_state.expand(len(tokens), -1)
        states = self.forward(tokens, masks, block.positions, cache, block.batch)
        logits = self.logits(states.unflatten(0, (-1, num_drafts - 1)).transpose(0, 1).flatten(0, 1))
        for offset, own in enumerate(logits.unflatten(0, (num_drafts - 1, -1)), 1):
            context.draw(offset, own)
