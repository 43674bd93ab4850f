"""The target's features beside its cache blocks, for heads that come later or lose their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwire.devices import StagedUpload
from draftwire.fusion import FeatureFusion
from draftwire.kv_cache import BLOCK_SIZE
from verifier_service.request import Request
from verifier_service.target import Target
from verifier_service.target_runner import StepOutput

# Rows that are read at a time without further memory: those of a step of 256 sequences with 15 drafts.
STAGED_ROWS = 4096


class FeatureKind(NamedTuple):
    """What features are: those of a target's layers, or what one head's fusion makes of them."""

    layers: tuple[int, ...]
    fused_for: str = ""  # fingerprint of that head and digest of its fusion


class FeatureStore:
    """Features of every row in the cache, of one kind: [num_blocks * BLOCK_SIZE, width].

    Rows written before the store was made have no features. With a fusion the rows are what it makes of the layers'
    features, in its type and width; without one they are as the target has them.
    """

    def __init__(
        self, target: Target, layers: tuple[int, ...], num_blocks: int, fusion: FeatureFusion | None = None
    ) -> None:
        self._layers = layers
        self._fusion = fusion
        # A slot is written together with its keys and values, so features never outlive those that they belong to.
        self._is_written = np.zeros(num_blocks * BLOCK_SIZE, bool)
        width, dtype = len(layers) * target.hidden_size, target.dtype
        if fusion is not None:
            width, dtype = len(fusion.weight), fusion.weight.dtype
        self._rows = torch.zeros(num_blocks * BLOCK_SIZE, width, dtype=dtype, device=target.device)
        self._upload = StagedUpload(STAGED_ROWS, target.device)

    @property
    def num_bytes(self) -> int:
        """Memory allocated, bytes."""
        return self._rows.nbytes

    def first_row(self, request: Request) -> int:
        """First row of the request from which on all have features."""
        missing = np.flatnonzero(~self._is_written[slots_of([(request.blocks, 0, request.num_feature_rows)])])
        return int(missing[-1]) + 1 if len(missing) else 0

    def holds(self, block: int) -> bool:
        """Whether all rows of a cache block have features."""
        return bool(self._is_written[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].all())

    def capture(self, output: StepOutput) -> None:
        """Keeps the features of the forward pass that has just run."""
        features = output.features(self._layers)
        if self._fusion is not None:
            features = self._fusion(features.to(self._rows.dtype))
        self._rows.index_copy_(0, output.slots, features)
        self._is_written[output.slots_on_host] = True

    def read(self, spans: Sequence[tuple[Sequence[int], int, int]], out: torch.Tensor) -> None:
        """Copies the features of rows first .. last - 1 of each (blocks, first, last), sequence after sequence.

        Parameters
        ----------
        out
            [rows, width] of any dtype, on the store's device or in host memory. On a GPU it is written in the order of
            the current stream, always the same, and the host does not wait.
        """
        self.read_slots(self._upload(slots_of(spans)), out)

    def read_slots(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """The same of rows at places in the cache, [rows] int64 on the store's device."""
        if out.device == self._rows.device and out.dtype == self._rows.dtype:
            torch.index_select(self._rows, 0, index, out=out)
        else:
            out.copy_(self._rows.index_select(0, index), non_blocking=True)


def slots_of(spans: Sequence[tuple[Sequence[int], int, int]]) -> np.ndarray:
    """Where rows first .. last - 1 of each (blocks, first, last) are in the cache, sequence after sequence."""
    shifts, counts = [], []  # of each piece in one block: from a row's place in the result to its slot, and its rows
    num_rows = 0
    for blocks, first, last in spans:
        for block in range(first // BLOCK_SIZE, -(-last // BLOCK_SIZE)):
            begin = max(first, block * BLOCK_SIZE)
            count = min(last, (block + 1) * BLOCK_SIZE) - begin
            shifts.append((blocks[block] - block) * BLOCK_SIZE + begin - num_rows)
            counts.append(count)
            num_rows += count
    return np.arange(num_rows) + np.array(shifts, np.int64).repeat(np.array(counts, np.int64))
