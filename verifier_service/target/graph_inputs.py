"""The inputs of the target's CUDA graphs, and the copy of a step's inputs to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwire.model.kv_cache import BLOCK_SIZE, BatchBuffers, RaggedBatch
from draftwire_kernels.ragged_batch import BatchStage
from verifier_service.core.batch import ForwardInput
from verifier_service.target.graph_sizes import Bucket

_NO_ROWS = np.zeros(0, np.int64)
_PADDING = ForwardInput(_NO_ROWS, _NO_ROWS, (), _NO_ROWS)


class GraphTensors(NamedTuple):
    """The memory that the graph of a bucket reads."""

    token_ids: Tensor  # [rows of the bucket] int64
    positions: Tensor
    logit_rows: Tensor  # [logit rows of the bucket] int64
    batch: RaggedBatch


class StagedInputs(NamedTuple):
    """A step's inputs in host memory. After `send`, token ids and rows may change until the stream copies them."""

    token_ids: np.ndarray  # [rows of the bucket] int64
    slots: np.ndarray  # [rows of the step] int64, slots of the cache
    token_ids_on_host: Tensor  # the memory of `token_ids`
    positions: Tensor  # [rows of the bucket] int64
    logit_rows: Tensor | None  # [logit rows of the bucket] int64; None for all rows
    batch: BatchStage

    def set_rows(self, token_ids: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Write the token ids int64 [T] and the rows of the sequences; see `BatchStage.set_rows`."""
        sums = counts.cumsum()
        self.token_ids[: len(token_ids)] = token_ids
        self.positions.numpy()[: len(token_ids)] = np.arange(len(token_ids)) + np.repeat(starts + counts - sums, counts)
        return self.batch.set_rows(starts, counts)


class GraphInputs:
    """The inputs of the graphs of some buckets, at fixed addresses."""

    def __init__(self, buckets: Sequence[Bucket], max_blocks: int, device: torch.device) -> None:
        most_rows = max(bucket.num_rows for bucket in buckets)
        most_sequences = max(bucket.num_sequences for bucket in buckets)
        self._max_blocks = max_blocks
        self._token_ids, self._positions, self._chosen = torch.zeros(3, most_rows, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(most_rows, device=device)
        self._batch = BatchBuffers(most_rows, most_sequences, max_blocks, device)

    def stage(self, bucket: Bucket, step: ForwardInput) -> StagedInputs:
        """Return the inputs of a step that fits the bucket, padded, in host memory."""
        token_ids = self._on_host(step.token_ids, bucket.num_rows)
        positions = self._on_host(step.positions, bucket.num_rows)
        logit_rows = None if bucket.has_all_logits else self._on_host(step.logit_rows, bucket.num_logit_rows)
        batch = self._batch.stage(step.sequences)
        # A copy, because the host's memory is reused after the step's inputs are copied.
        return StagedInputs(token_ids.numpy(), batch.slots.copy(), token_ids, positions, logit_rows, batch)

    def send(self, bucket: Bucket, staged: StagedInputs) -> GraphTensors:
        """Copy staged inputs to the graph's memory, on the current stream."""
        positions, token_ids = self._positions[: bucket.num_rows], self._token_ids[: bucket.num_rows]
        positions.copy_(staged.positions, non_blocking=True)
        token_ids.copy_(staged.token_ids_on_host, non_blocking=True)
        logit_rows = (self._all_rows if staged.logit_rows is None else self._chosen)[: bucket.num_logit_rows]
        if staged.logit_rows is not None:
            logit_rows.copy_(staged.logit_rows, non_blocking=True)
        max_length = self._max_blocks * BLOCK_SIZE
        batch = staged.batch.send(
            bucket.num_rows, bucket.num_sequences, max_rows=bucket.max_rows, max_length=max_length
        )
        return GraphTensors(token_ids, positions, logit_rows, batch)

    def padding(self, bucket: Bucket) -> GraphTensors:
        """Fill the inputs of a bucket's graph with padding, and return them."""
        return self.send(bucket, self.stage(bucket, _PADDING))

    def _on_host(self, values: np.ndarray, size: int) -> Tensor:
        """Return [size] int64: `values`, then zeros; pinned for a GPU."""
        padded = torch.zeros(size, dtype=torch.int64, pin_memory=self._all_rows.is_cuda)
        padded.numpy()[: len(values)] = values
        return padded
