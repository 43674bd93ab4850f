"""CUDA graphs of whole draft steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.loop import DraftLoop, LoopShape
from drafter_service.draft_loop.sampling_mode import SamplingMode

Track = Callable[[list[LoopShape]], Iterable[LoopShape]]


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences that graphs are captured for; a step takes the next larger one."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class LoopGraphs:
    """Graphs of the step for each mode in use, every batch size and every number of drafts.

    A sequence has up to k + 1 rows, where k is the most drafts that the mode's sessions want.
    """

    def __init__(self, loop: DraftLoop, buffers: LogitsBuffers, max_num_seqs: int) -> None:
        self._loop = loop
        self._buffers = buffers
        self._sizes = batch_sizes(max_num_seqs)
        self._stream = torch.cuda.Stream()
        self._most_drafts: dict[SamplingMode, int] = {}
        self._graphs: dict[LoopShape, torch.cuda.CUDAGraph] = {}
        self._written: dict[SamplingMode, list[torch.Tensor]] = {}  # logits buffers that a mode's graphs write

    def capture(self, mode: SamplingMode, k: int, track: Track = iter) -> None:
        """Capture the steps of sessions of this mode with up to `k` drafts, unless they are captured.

        `track` wraps the shapes to capture, and shows the progress.
        """
        if self._most_drafts.get(mode, 0) >= k:
            return
        self._drop(mode)
        # The graphs share a pool of memory. The largest graph is captured first, so that its memory suffices for all.
        pool = torch.cuda.graph_pool_handle()
        shapes = [self._shape(mode, size, k, drafts) for size in reversed(self._sizes) for drafts in range(k, 0, -1)]
        graphs = {shape: self._captured(shape, pool) for shape in track(shapes)}
        self._graphs |= graphs
        self._most_drafts[mode] = k
        self._written[mode] = self._buffers.of(mode)

    @property
    def shapes(self) -> list[LoopShape]:
        """Return the captured shapes."""
        return list(self._graphs)

    def drop_stale(self) -> None:
        """Drop the graphs that write to freed logits buffers."""
        for mode, written in list(self._written.items()):
            current = self._buffers.of(mode)
            if [id(buffer) for buffer in written] != [id(buffer) for buffer in current]:
                self._drop(mode)

    def shape_for(self, mode: SamplingMode, num_sequences: int, num_rows: int, num_drafts: int) -> LoopShape | None:
        """Return the captured shape that a step fits into; None if there is none."""
        k = self._most_drafts.get(mode, 0)
        if num_drafts > k:
            return None
        least = max(num_sequences, -(-num_rows // (k + 1)))
        index = bisect_left(self._sizes, least)
        return None if index == len(self._sizes) else self._shape(mode, self._sizes[index], k, num_drafts)

    def replay(self, shape: LoopShape) -> None:
        """Run a captured step."""
        self._graphs[shape].replay()

    def _shape(self, mode: SamplingMode, size: int, k: int, num_drafts: int) -> LoopShape:
        return LoopShape(mode, size, size * (k + 1), k + 1, num_drafts)

    @torch.inference_mode()
    def _captured(self, shape: LoopShape, pool: Any) -> torch.cuda.CUDAGraph:
        """Capture a step over padding, which writes to block 0 only."""
        self._loop.inputs.clear(shape.num_sequences, shape.num_rows)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Compile kernels and set up libraries outside of the capture.
            self._loop.run(shape)
            # Other threads may use the device during the capture, and their calls must not end it.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._loop.run(shape)
            finally:
                graph.capture_end()
        self._stream.synchronize()  # the host may write its inputs again
        return graph

    def _drop(self, mode: SamplingMode) -> None:
        if self._most_drafts.pop(mode, None) is None:
            return
        self._written.pop(mode, None)
        self._graphs = {shape: graph for shape, graph in self._graphs.items() if shape.mode != mode}
        torch.cuda.empty_cache()  # no other graph can reuse the memory of the dropped graphs


def make_graphs(loop: DraftLoop, buffers: LogitsBuffers, max_num_seqs: int) -> LoopGraphs | None:
    """Return the graphs of a loop on a GPU; None on a CPU."""
    return LoopGraphs(loop, buffers, max_num_seqs) if loop.states.is_cuda else None
