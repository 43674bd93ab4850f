"""The target's features by cache slot, for drafters that connect later or lose their state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwire.model.devices import upload
from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import BLOCK_SIZE, zeros_for_cache
from draftwire_kernels import gather_accepted_rows
from verifier_service.core.batch import ForwardOutput
from verifier_service.core.request import Request
from verifier_service.target.target import Target


class FeatureKind(NamedTuple):
    """Kind of features: the states of a target's layers, or fused for one head."""

    layers: tuple[int, ...]
    fused_for: str = ""  # fingerprint of the head and digest of its fusion


class FeatureStore:
    """Features of one kind for the rows in the cache.

    Rows computed before the store was created, or in steps of requests without drafts, have no features. With a fusion
    the features are fused and have its dtype and width; otherwise they have the target's.

    Attributes:
        rows: The features by cache slot, [num_blocks * BLOCK_SIZE, width], on the target's device.
    """

    def __init__(
        self, target: Target, layers: tuple[int, ...], num_blocks: int, fusion: FeatureFusion | None = None
    ) -> None:
        self._layers = layers
        self._fusion = fusion
        # A slot's features are written with its keys and values, so they always belong together.
        self._is_written = np.zeros(num_blocks * BLOCK_SIZE, bool)
        width, dtype = len(layers) * target.hidden_size, target.dtype
        if fusion is not None:
            width, dtype = len(fusion.weight), fusion.weight.dtype
        self.rows = zeros_for_cache((num_blocks * BLOCK_SIZE, width), dtype, target.device)
        self._compile()

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return self.rows.nbytes

    def first_row(self, request: Request) -> int:
        """Return the first row of a request after its last row without features."""
        missing = np.flatnonzero(~self._is_written[slots_of([(request.blocks, 0, request.num_feature_rows)])])
        return int(missing[-1]) + 1 if len(missing) else 0

    def holds(self, block: int) -> bool:
        """Return whether all rows of a cache block have features."""
        return bool(self._is_written[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].all())

    def capture(self, output: ForwardOutput) -> None:
        """Store the features of the last forward pass."""
        features = output.features(self._layers)
        if self._fusion is not None:
            features = self._fusion(features.to(self.rows.dtype))
        self.rows.index_copy_(0, output.slots, features)
        self._is_written[output.slots_on_host] = True

    def drop(self, output: ForwardOutput) -> None:
        """Mark the rows of the last forward pass as having no features."""
        self._is_written[output.slots_on_host] = False

    def read(self, spans: Sequence[tuple[Sequence[int], int, int]], out: torch.Tensor) -> None:
        """Copy the features of rows first .. last - 1 of each (blocks, first, last), sequence after sequence.

        On a GPU's default stream, which runs the steps, one kernel gathers the rows. On another stream contiguous runs
        of rows are copied: kernels on a second stream would slow down all passes (docs/decisions/007-second-stream.md).

        Args:
            spans: The cache blocks and row range of each sequence.
            out: Output [rows, width] of any dtype, on the store's device, on another GPU or in host memory. On a GPU
                the current stream writes it, and the host does not wait.
        """
        slots = slots_of(spans)
        device = self.rows.device
        if device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
            (places,) = upload([slots], device)
            out.copy_(self.rows.index_select(0, places), non_blocking=True)
        else:
            copy_runs(self.rows, slots, out)

    def read_accepted_rows(
        self, slots: torch.Tensor, cu_rows: torch.Tensor, places: torch.Tensor, drawn: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Copy the features of verified rows, accepted rows first; `out` as for `read`, other arguments as for
        `gather_accepted_rows`, with `slots` of the cache."""
        is_direct = out.device == self.rows.device and out.dtype == self.rows.dtype
        gathered = out if is_direct else self.rows.new_empty(out.shape)
        gather_accepted_rows(self.rows, slots, cu_rows, places, drawn, gathered)
        if gathered is not out:
            out.copy_(gathered, non_blocking=True)

    def _compile(self) -> None:
        """Run the kernels once for this width and dtype, so that no step waits for compilation or loading."""
        zero, ends, one = np.zeros(1, np.int64), np.array([0, 1], np.int32), np.ones((1, 1), np.int64)
        slots, cu_rows, places, drawn = upload([zero, ends, zero, one], self.rows.device)
        self.read_accepted_rows(slots, cu_rows, places, drawn, self.rows.new_empty(1, self.rows.shape[1]))
        self.read([([0], 0, 1)], self.rows.new_empty(1, self.rows.shape[1]))


class FeatureStores:
    """Stores of features, one for each kind that drafters need.

    Attributes:
        by_kind: The stores, [kind].
    """

    def __init__(self, target: Target, num_blocks: int) -> None:
        self.by_kind: dict[FeatureKind, FeatureStore] = {}
        self._target = target
        self._num_blocks = num_blocks

    def need(self, kind: FeatureKind, fusion: FeatureFusion | None) -> None:
        """Create the store of a kind if it does not exist.

        Raises:
            RuntimeError, MemoryError: If memory is insufficient, as torch raises it.
        """
        if kind not in self.by_kind:
            self.by_kind[kind] = FeatureStore(self._target, kind.layers, self._num_blocks, fusion)

    def keep(self, used: Collection[FeatureKind]) -> None:
        """Free the features that no drafter needs; keep them if no drafter is left, because one may reconnect."""
        if used:
            self.by_kind = {kind: store for kind, store in self.by_kind.items() if kind in used}

    def capture(self, output: ForwardOutput, requests: Iterable[Request]) -> None:
        """Store the features of the last forward pass, whose rows belong to `requests`.

        Fusing a step's features reads about 100 MB of weights for an 8B target. So features are stored only if a
        request wants drafts.
        """
        is_wanted = any(request.num_speculative_tokens > 0 for request in requests)
        for store in self.by_kind.values():
            if is_wanted:
                store.capture(output)
            else:
                store.drop(output)

    def is_usable(self, request: Request, block: int) -> bool:
        """Return whether a request may reuse a cached block.

        A request with drafts needs features for its whole prompt. Blocks computed without drafts, or before a drafter
        connected, have none.
        """
        return request.num_speculative_tokens == 0 or all(store.holds(block) for store in self.by_kind.values())

    @property
    def num_bytes(self) -> int:
        """Allocated bytes; thread-safe."""
        return sum(store.num_bytes for store in list(self.by_kind.values()))


def copy_runs(rows: torch.Tensor, slots: np.ndarray, out: torch.Tensor) -> None:
    """Copy the rows at slots [n] int64 to `out` [n, width], with one copy per contiguous run and without kernels."""
    place = 0
    for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
        first, count = int(run[0]), len(run)
        out[place : place + count].copy_(rows[first : first + count], non_blocking=True)
        place += count


def slots_of(spans: Sequence[tuple[Sequence[int], int, int]]) -> np.ndarray:
    """Return the cache slots of rows first .. last - 1 of each (blocks, first, last), sequence after sequence."""
    shifts, counts = [], []  # for each piece in one block: slot minus place in the result, and number of rows
    num_rows = 0
    for blocks, first, last in spans:
        for block in range(first // BLOCK_SIZE, -(-last // BLOCK_SIZE)):
            begin = max(first, block * BLOCK_SIZE)
            count = min(last, (block + 1) * BLOCK_SIZE) - begin
            shifts.append((blocks[block] - block) * BLOCK_SIZE + begin - num_rows)
            counts.append(count)
            num_rows += count
    return np.arange(num_rows) + np.array(shifts, np.int64).repeat(np.array(counts, np.int64))
