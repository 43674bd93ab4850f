"""The forward pass over one size of batch as a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwire.contract.errors import CheckpointError
from draftwire.model.devices import record_event
from draftwire.model.kv_cache import KVCache
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.target.graph_inputs import GraphInputs, StagedInputs
from verifier_service.target.graph_sizes import Bucket
from verifier_service.target.stream_hold import StreamHold
from verifier_service.target.target import Target, TargetOutput


class StepGraph:
    """Run steps of up to one size by a graph, padded to this size."""

    def __init__(self, inputs: GraphInputs, bucket: Bucket, slots: Tensor, replay: Callable[[], TargetOutput]) -> None:
        """
        Parameters
        ----------
        inputs
            The memory that the graph reads.
        bucket
            The size.
        slots
            Slots of the cache that the graph writes, int64 [rows], on the device.
        replay
            Launches the graph on the current stream, and returns the memory of its logits and states.
        """
        self._inputs = inputs
        self._bucket = bucket
        self._slots = slots
        self._replay = replay

    def seconds(self) -> float:
        """Return the time of one replay over the present inputs: the least of three, because others use the device."""
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

    def prelaunch(self, step: ForwardInput, hold: StreamHold) -> Callable[[np.ndarray], ForwardOutput | None]:
        """Replay the graph behind a stopped stream over a step that fits the bucket and whose rows all have logits.

        The returned function writes the token ids and lets the stream continue.
        """
        staged = self._inputs.stage(self._bucket, step)
        hold.stop()
        try:
            output = self.launch(step, staged)
        except BaseException:
            hold.release(lambda: None)
            raise

        def release(token_ids: np.ndarray) -> ForwardOutput | None:
            fill = partial(np.copyto, staged.token_ids[: len(token_ids)], token_ids)
            return output if hold.release(fill) else None

        return release

    def launch(self, step: ForwardInput, staged: StagedInputs) -> ForwardOutput:
        """Send staged inputs to the device and replay the graph."""
        inputs = self._inputs.send(self._bucket, staged)
        if step.future is not None:
            step.future.write(inputs.token_ids)
        began = record_event(self._slots.device)
        computed = self._replay()
        num_rows = len(step.positions)
        num_logit_rows = num_rows if self._bucket.has_all_logits else len(step.logit_rows)
        slots = self._slots[:num_rows]
        output = ForwardOutput(computed.logits[:num_logit_rows], computed.states, slots, staged.slots, began)
        return output.with_logits_of(step.logit_rows) if self._bucket.has_all_logits else output


def capture_graph(
    target: Target, cache: KVCache, inputs: GraphInputs, bucket: Bucket, pool: Any, stream: torch.cuda.Stream
) -> StepGraph:
    """Capture the forward pass over one size of batch.

    Raises
    ------
    CheckpointError
        When the forward pass reads numbers from the device, which no graph can.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        token_ids, positions, rows, batch = inputs.padding(bucket)
        # Build kernels before the capture, and give the memory that building takes back to the capture.
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
    """A tensor's memory without its ownership, as `__cuda_array_interface__` describes it."""

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
    """Return the tensor without ownership of its memory: the next graph of the pool computes there too."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
