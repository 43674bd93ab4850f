"""What a CUDA graph of the target reads, and a step on its way there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwire.kv_cache import BLOCK_SIZE, BatchBuffers, RaggedBatch
from verifier_service.target_buckets import Bucket

if TYPE_CHECKING:
    from verifier_service.target_runner import StepRows

_CPU = torch.device("cpu")


class LoadedStep(NamedTuple):
    """A step in the memory that graphs read."""

    token_ids: Tensor  # [rows of the bucket] int64
    positions: Tensor
    logit_rows: Tensor  # [logit rows of the bucket] int64
    batch: RaggedBatch


class GraphInputs:
    """What the graphs of some buckets read, at fixed addresses."""

    def __init__(self, buckets: Sequence[Bucket], max_blocks: int, device: torch.device) -> None:
        most_rows = max(bucket.num_rows for bucket in buckets)
        most_sequences = max(bucket.num_sequences for bucket in buckets)
        self.max_blocks = max_blocks
        self.token_ids, self.positions, self.chosen_rows = torch.zeros(3, most_rows, dtype=torch.int64, device=device)
        self.all_rows = torch.arange(most_rows, device=device)
        self.batch = BatchBuffers(most_rows, most_sequences, max_blocks, device)


    def on_host(self, size: int) -> Tensor:
        """[size] int64 zeros that can be copied from; pinned for a GPU."""
        return torch.zeros(size, dtype=torch.int64, pin_memory=self.all_rows.is_cuda)


class StagedStep:
    """A step between the host and the memory that the graph of a bucket reads. It may be filled after it was sent,
    until the stream comes to that; unfilled it is padding, whose rows are at position 0.

    Attributes
    ----------
    token_ids
        int64 [rows of the bucket], on the host.
    """

    def __init__(self, inputs: GraphInputs, bucket: Bucket, num_sequences: int, num_blocks: int) -> None:
        """Of up to so many sequences with so many blocks each."""
        self._inputs = inputs
        self._bucket = bucket
        self._token_ids, self._positions = inputs.on_host(bucket.num_rows), inputs.on_host(bucket.num_rows)
        self._logit_rows = None if bucket.has_all_logits else inputs.on_host(bucket.num_logit_rows)
        self._batch = inputs.batch.stage(num_sequences, min(num_blocks, inputs.max_blocks))
        self.token_ids = self._token_ids.numpy()

    def fill(self, step: StepRows) -> np.ndarray | None:
        """Writes all of a step that fits the bucket but its token ids; where its rows go in the cache, or None where
        there is no room for it."""
        own = RaggedBatch(step.sequences, _CPU)
        if own.num_rows > self._bucket.num_rows or own.max_rows > self._bucket.max_rows or not self._batch.fits(own):
            return None
        self._batch.fill(own)
        self._positions.numpy()[: len(step.positions)] = step.positions
        if self._logit_rows is not None:
            self._logit_rows.numpy()[: len(step.logit_rows)] = step.logit_rows
        slots: np.ndarray = own.slot_mapping.numpy()
        return slots

    def send(self) -> LoadedStep:
        """Copies it, on the current stream."""
        inputs, bucket = self._inputs, self._bucket
        positions, token_ids = inputs.positions[: bucket.num_rows], inputs.token_ids[: bucket.num_rows]
        positions.copy_(self._positions, non_blocking=True)
        token_ids.copy_(self._token_ids, non_blocking=True)
        logit_rows = (inputs.all_rows if self._logit_rows is None else inputs.chosen_rows)[: bucket.num_logit_rows]
        if self._logit_rows is not None:
            logit_rows.copy_(self._logit_rows, non_blocking=True)
        batch = self._batch.send(
            *(bucket.num_rows, bucket.num_sequences),
            max_rows=bucket.max_rows,
            max_length=inputs.max_blocks * BLOCK_SIZE,
        )
        return LoadedStep(token_ids, positions, logit_rows, batch)
