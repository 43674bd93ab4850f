"""The target's features beside its cache blocks, for heads that come later or lose their state."""

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
    """What features are: those of a target's layers, or what one head's fusion makes of them."""

    layers: tuple[int, ...]
    fused_for: str = ""  # fingerprint of that head and digest of its fusion


class FeatureStore:
    """Features of rows in the cache, of one kind: [num_blocks * BLOCK_SIZE, width].

    Rows have none that were written before the store was made, or in steps of requests that want no drafts. With a
    fusion the rows are what it makes of the layers' features, in its type and width; without one they are as the target
    has them.

    Attributes
    ----------
    rows
        The features by slot of the cache, [num_blocks * BLOCK_SIZE, width], on the target's device.
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
        self.rows = zeros_for_cache((num_blocks * BLOCK_SIZE, width), dtype, target.device)
        self._compile()

    @property
    def num_bytes(self) -> int:
        """Memory allocated, bytes."""
        return self.rows.nbytes

    def first_row(self, request: Request) -> int:
        """First row of the request from which on all have features."""
        missing = np.flatnonzero(~self._is_written[slots_of([(request.blocks, 0, request.num_feature_rows)])])
        return int(missing[-1]) + 1 if len(missing) else 0

    def holds(self, block: int) -> bool:
        """Whether all rows of a cache block have features."""
        return bool(self._is_written[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].all())

    def capture(self, output: ForwardOutput) -> None:
        """Keeps the features of the forward pass that has just run."""
        features = output.features(self._layers)
        if self._fusion is not None:
            features = self._fusion(features.to(self.rows.dtype))
        self.rows.index_copy_(0, output.slots, features)
        self._is_written[output.slots_on_host] = True

    def drop(self, output: ForwardOutput) -> None:
        """Takes note that the rows of the forward pass that has just run have no features, whatever was there."""
        self._is_written[output.slots_on_host] = False

    def read(self, spans: Sequence[tuple[Sequence[int], int, int]], out: torch.Tensor) -> None:
        """Copies the features of rows first .. last - 1 of each (blocks, first, last), sequence after sequence.

        On a GPU's default stream, that of the steps, one kernel gathers them. Another stream takes copies alone, run by
        run of rows that lie side by side: kernels of a second one would make all passes slower
        (docs/decisions/007-second-stream.md).

        Parameters
        ----------
        out
            [rows, width] of any dtype, on the store's device, another GPU or in host memory. On a GPU it is written in
            the order of the current stream, and the host does not wait.
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
        """Copies the features of verified rows, accepted ones first; `out` as for `read`, the others as for
        `gather_accepted_rows`, where `slots` are places in the cache."""
        is_direct = out.device == self.rows.device and out.dtype == self.rows.dtype
        gathered = out if is_direct else self.rows.new_empty(out.shape)
        gather_accepted_rows(self.rows, slots, cu_rows, places, drawn, gathered)
        if gathered is not out:
            out.copy_(gathered, non_blocking=True)

    def _compile(self) -> None:
        """Runs the kernels for features of this width and type, so that no step waits for compilation or loading."""
        zero, ends, one = np.zeros(1, np.int64), np.array([0, 1], np.int32), np.ones((1, 1), np.int64)
        slots, cu_rows, places, drawn = upload([zero, ends, zero, one], self.rows.device)
        self.read_accepted_rows(slots, cu_rows, places, drawn, self.rows.new_empty(1, self.rows.shape[1]))
        self.read([([0], 0, 1)], self.rows.new_empty(1, self.rows.shape[1]))


class FeatureStores:
    """A store of each kind of features that drafters take.

    Attributes
    ----------
    by_kind
        The stores, [kind].
    """

    def __init__(self, target: Target, num_blocks: int) -> None:
        self.by_kind: dict[FeatureKind, FeatureStore] = {}
        self._target = target
        self._num_blocks = num_blocks

    def need(self, kind: FeatureKind, fusion: FeatureFusion | None) -> None:
        """Makes the store of a kind, unless there is one.

        Raises
        ------
        RuntimeError, MemoryError
            What torch raises on a CPU and on a GPU without memory.
        """
        if kind not in self.by_kind:
            self.by_kind[kind] = FeatureStore(self._target, kind.layers, self._num_blocks, fusion)

    def keep(self, used: Collection[FeatureKind]) -> None:
        """Frees the features that no drafter takes any more, but for the last ones: their drafter may come back."""
        if used:
            self.by_kind = {kind: store for kind, store in self.by_kind.items() if kind in used}

    def capture(self, output: ForwardOutput, requests: Iterable[Request]) -> None:
        """Keeps the features of the forward pass that has just run, of rows of `requests`.

        To fuse a step's features reads weights of several layers' width, some 100 MB of an 8B target. So nothing is
        kept where none of them wants drafts.
        """
        is_wanted = any(request.num_speculative_tokens > 0 for request in requests)
        for store in self.by_kind.values():
            if is_wanted:
                store.capture(output)
            else:
                store.drop(output)

    def is_usable(self, request: Request, block: int) -> bool:
        """Whether a request may begin with a cached block: one that drafts needs features, which blocks do not have
        that were computed before a drafter came or for requests without drafts, or its head would see a part of the
        prompt alone.
        """
        return request.num_speculative_tokens == 0 or all(store.holds(block) for store in self.by_kind.values())

    @property
    def num_bytes(self) -> int:
        """Memory allocated, bytes; from any thread."""
        return sum(store.num_bytes for store in list(self.by_kind.values()))


def copy_runs(rows: torch.Tensor, slots: np.ndarray, out: torch.Tensor) -> None:
    """Copies rows at int64 [n] places to `out` [n, width], those that lie side by side at once; no kernel runs."""
    place = 0
    for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
        first, count = int(run[0]), len(run)
        out[place : place + count].copy_(rows[first : first + count], non_blocking=True)
        place += count


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
