"""Heads that draft token by token: EAGLE-1, EAGLE-2, EAGLE-3 and EAGLE-3.1."""

from __future__ import annotations

from abc import abstractmethod

import torch

from drafter_service.heads.spec import DraftContext, Head, Rows
from draftwire.model.kv_cache import KVCache, RaggedBatch


class ChainHead(Head):
    """A head whose rows map a token and the state before it to the next token's logits and the next state.

    Row i of a sequence takes the token at position i + 1 and the state g at position i, at rotary position i. Its
    logits predict the token at position i + 2. The row of a draft takes the head's state of the previous row.
    """

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """Run one pass over the rows of `batch` and write their keys and values into `cache`.

        Args:
            tokens: [T] int64, ids of the target's vocabulary.
            g: [T, hidden], of `fuse` or of an earlier pass.
            positions: [T] int64, rotary positions.

        Returns:
            [T, hidden], the input of `logits`, and g of the next draft row.
        """

    @abstractmethod
    def logits(self, g: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token over the draft vocabulary: [N, hidden] of `forward` -> [N, V_draft]."""

    def enter(self, rows: Rows, states: torch.Tensor, cache: KVCache) -> None:
        self._pass(rows, states, cache)

    def draft(self, context: DraftContext, num_drafts: int) -> None:
        """Compute drafts: one pass over the accepted rows, then one row of each sequence for every further draft."""
        states = self._pass(context.rows, context.states, context.cache)[context.last_rows]
        for offset in range(num_drafts):
            if offset > 0:
                states = self._pass(context.next_rows(), states, context.cache)
            context.draw(offset, self.logits(states))

    def _pass(self, rows: Rows, states: torch.Tensor, cache: KVCache) -> torch.Tensor:
        return self.forward(rows.tokens, states, rows.positions, cache, rows.batch)
