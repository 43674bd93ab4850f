"""The forward pass over one batch size as a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwire.contract.errors import CheckpointError
from draftwire.model.devices import record_event
from draftwire.model.kv_cache import KVCache, SequenceRows
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.target.graph_inputs import GraphInputs, StagedInputs
from verifier_service.target.graph_sizes import Bucket
from verifier_service.target.stream_hold import StreamHold
from verifier_service.target.target import Target, TargetOutput

# Rows for which cuBLASLt is faster than cuBLAS, by 4 % of an 8B target's pass on an H200
# (docs/decisions/009-matrix-products.md).
LT_ROWS = range(32, 193)

# Takes token ids [T], and rows of each sequence [B] if they differ from the launch.
Release = Callable[[np.ndarray, np.ndarray | None], ForwardOutput | None]


def with_rows(step: ForwardInput, token_ids: np.ndarray, counts: np.ndarray | None) -> ForwardInput:
    """Return a step with these token ids, int64 [T], and counts of rows, int64 [B], if given; all rows have logits."""
    if counts is None:
        return replace(step, token_ids=token_ids)
    starts = np.array([sequence.start for sequence in step.sequences], np.int64)
    positions = np.arange(len(token_ids)) + np.repeat(starts + counts - counts.cumsum(), counts)
    sequences = [
        SequenceRows(sequence.blocks, sequence.start, count)
        for sequence, count in zip(step.sequences, counts.tolist(), strict=True)
    ]
    return ForwardInput(token_ids, positions, sequences, np.arange(len(token_ids)))


class StepGraph:
    """Runs steps of up to one size by a graph, padded to this size."""

    def __init__(self, inputs: GraphInputs, bucket: Bucket, slots: Tensor, replay: Callable[[], TargetOutput]) -> None:
        """
        Args:
            inputs: The memory that the graph reads.
            bucket: The size.
            slots: Slots of the cache that the graph writes, int64 [rows], on the device.
            replay: Launches the graph on the current stream, and returns the memory of its logits and states.
        """
        self._inputs = inputs
        self._bucket = bucket
        self._slots = slots
        self._replay = replay

    def seconds(self) -> float:
        """Return the time of one replay over the present inputs: the least of three, in case the device is shared."""
        taken = []
        for _ in range(3):
            self._replay()
            began = record_event(self._slots.device)
            for _ in range(2):
                self._replay()
            ended = record_event(self._slots.device)
            assert began is not None
            assert ended is not None
            ended.synchronize()
            taken.append(began.elapsed_time(ended) / 2000)
        return min(taken)

    def run(self, step: ForwardInput) -> ForwardOutput:
        """Replay the graph over a step that fits the bucket."""
        return self.launch(step, self._inputs.stage(self._bucket, step))

    def prelaunch(self, step: ForwardInput, hold: StreamHold, *, has_all_rows: bool = True) -> Release:
        """Replay the graph on a stopped stream, over a step whose rows all have logits.

        The returned function writes the token ids and lets the stream continue. Without `has_all_rows`, the function
        also writes the number of rows of each sequence, and only these rows must fit the bucket.
        """
        starts = np.array([sequence.start for sequence in step.sequences], np.int64)
        if not has_all_rows:
            step = with_rows(step, np.zeros(len(starts), np.int64), np.ones(len(starts), np.int64))
        staged = self._inputs.stage(self._bucket, step)
        hold.stop()
        try:
            computed, began = self._start(step, staged)
            output = self._output(step, staged.slots, computed, began)
        except BaseException:
            hold.release(lambda: None)
            raise

        def release(token_ids: np.ndarray, counts: np.ndarray | None) -> ForwardOutput | None:
            if counts is None:
                fill = partial(np.copyto, staged.token_ids[: len(token_ids)], token_ids)
                return output if hold.release(fill) else None
            slots = staged.slots

            def fill_rows() -> None:
                nonlocal slots
                slots = staged.set_rows(token_ids, starts, counts)

            if not hold.release(fill_rows):
                return None
            return self._output(with_rows(step, token_ids, counts), slots, computed, began)

        return release

    def launch(self, step: ForwardInput, staged: StagedInputs) -> ForwardOutput:
        """Send staged inputs to the device and replay the graph."""
        computed, began = self._start(step, staged)
        return self._output(step, staged.slots, computed, began)

    def _start(self, step: ForwardInput, staged: StagedInputs) -> tuple[TargetOutput, torch.cuda.Event | None]:
        inputs = self._inputs.send(self._bucket, staged)
        if step.future is not None:
            step.future.write(inputs.token_ids)
        began = record_event(self._slots.device)
        return self._replay(), began

    def _output(
        self, step: ForwardInput, slots_on_host: np.ndarray, computed: TargetOutput, began: torch.cuda.Event | None
    ) -> ForwardOutput:
        num_rows = len(step.positions)
        num_logit_rows = num_rows if self._bucket.has_all_logits else len(step.logit_rows)
        slots = self._slots[:num_rows]
        output = ForwardOutput(computed.logits[:num_logit_rows], computed.states, slots, slots_on_host, began)
        return output.with_logits_of(step.logit_rows) if self._bucket.has_all_logits else output


@contextlib.contextmanager
def _products_for(num_rows: int) -> Iterator[None]:
    """Let PyTorch compute matrix products with the library that is faster for this number of rows."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if num_rows in LT_ROWS else "cublas")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def capture_graph(
    target: Target, cache: KVCache, inputs: GraphInputs, bucket: Bucket, pool: Any, stream: torch.cuda.Stream
) -> StepGraph:
    """Capture the forward pass over one batch size.

    Raises:
        CheckpointError: If the forward pass reads numbers from the device, which graphs do not support.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), _products_for(bucket.num_rows):
        token_ids, positions, rows, batch = inputs.padding(bucket)
        # Build kernels before the capture, and free the memory of the build for the capture.
        target.forward(token_ids, positions, cache, batch, rows)
        torch.cuda.empty_cache()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = target.forward(token_ids, positions, cache, batch, rows)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the error that ended the capture is raised below
                graph.capture_end()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{target.name}: its forward pass cannot be a CUDA graph: {reason}") from error
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    computed = output._replace(logits=_unowned(output.logits), states=tuple(map(_unowned, output.states)))

    def replay() -> TargetOutput:
        graph.replay()
        return computed

    return StepGraph(inputs, bucket, batch.slot_mapping, replay)


class _Memory:
    """A tensor's memory without ownership, described by `__cuda_array_interface__`."""

    def __init__(self, tensor: Tensor) -> None:
        kind = {1: "|u1", 2: "<i2", 4: "<i4"}[tensor.itemsize]
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": kind,
            "version": 3,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """Return the tensor without ownership of its memory, which the next graph of the pool also uses."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
