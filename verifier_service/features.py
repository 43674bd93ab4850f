"""The target's features beside its cache blocks, for heads that come later or lose their state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from draftwire.kv_cache import BLOCK_SIZE, RaggedBatch
from verifier_service.request import Request
from verifier_service.target import Target


class FeatureStore:
    """Features of every row in the cache, for one choice of layers: [num_blocks * BLOCK_SIZE, width].

    Rows written before the store was made have no features.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], num_blocks: int, running: Iterable[Request]) -> None:
        """`running` are the requests that have rows in the cache already."""
        self.layers = layers
        self._first_rows = {request: request.num_computed for request in running}
        self._target = target
        width = len(layers) * target.hidden_size
        self._rows = torch.zeros(num_blocks * BLOCK_SIZE, width, dtype=target.dtype, device=target.device)

    def first_row(self, request: Request) -> int:
        """First row of the request that has features."""
        return self._first_rows.get(request, 0)

    def forget(self, request: Request) -> None:
        """Drops what is kept of a request that has ended."""
        self._first_rows.pop(request, None)

    def capture(self, batch: RaggedBatch) -> None:
        """Keeps the features of the forward pass that has just run over `batch`."""
        self._rows.index_copy_(0, batch.slot_mapping, self._target.features(self.layers))

    def read(self, spans: Sequence[tuple[Sequence[int], int, int]], dtype: torch.dtype) -> torch.Tensor:
        """Features of rows first .. last - 1 of each (blocks, first, last), sequence after sequence, on the CPU."""
        slots = [
            blocks[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE
            for blocks, first, last in spans
            for row in range(first, last)
        ]
        index = torch.tensor(slots, dtype=torch.int64).to(self._rows.device, non_blocking=True)
        return self._rows.index_select(0, index).to(dtype).cpu()
