"""Runs the target over an engine's steps: as CUDA graphs on a GPU, eagerly on a CPU."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from draftwire.contract.errors import CheckpointError
from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import record_event, upload
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache, RaggedBatch, allocate_cache, token_bytes
from draftwire.transport.segment import SegmentError
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.target.graph_inputs import GraphInputs, StagedInputs
from verifier_service.target.graph_products import with_faster_products
from verifier_service.target.graph_sizes import LEAST_ROWS, Bucket, Buckets
from verifier_service.target.stream_hold import StreamHold
from verifier_service.target.target import Target

logger = logging.getLogger(__name__)


class TargetRunner:
    """The target, its cache and the graphs that were captured over both.

    A graph covers everything from token ids to the logits and the states that features are made of. Graphs share their
    memory: what one computes lies there until the next is replayed, whichever features are read meanwhile. A step that
    fits none, which an engine does not have, is computed without.

    Attributes
    ----------
    cache
        Keys and values; of a split target, those of this rank's heads.
    seconds_by_library
        Of each bucket's graph, the time of padding alone with each library's products; empty before they are captured.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        max_num_seqs: int,
        rows_per_sequence: int,
        max_prefill_rows: int,
        max_blocks_per_sequence: int,
    ) -> None:
        """
        Parameters
        ----------
        max_num_seqs, rows_per_sequence
            Most sequences of a step, and most rows of one that decodes: its last token and the drafts.
        max_prefill_rows
            Most rows of prompts in a step.
        max_blocks_per_sequence
            Most blocks of the cache that a sequence has.
        """
        self._target = target
        self.cache = cache
        most_rows = max_num_seqs * rows_per_sequence + max_prefill_rows
        most_rows = min(most_rows, max_num_seqs * max_blocks_per_sequence * BLOCK_SIZE)
        self._buckets = Buckets(max_num_seqs, rows_per_sequence, most_rows)
        self._max_blocks = max_blocks_per_sequence
        self._graphs: dict[Bucket, _Graph] = {}
        self._hold: StreamHold | None = None
        self._release: Callable[[np.ndarray], ForwardOutput | None] | None = None  # of the prelaunched forward pass
        self.seconds_by_library: dict[Bucket, Mapping[str, float]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the graphs, with a progress bar; not on a CPU. The target is compiled by then.

        Raises
        ------
        CheckpointError
            When the forward pass asks the device for numbers, which no graph can.
        """
        if self._target.device.type != "cuda":
            return
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._target.device)[0]
        self._hold = _make_hold(self._target.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._target.device)
        console = Console(stderr=True)
        every = []
        for buckets in (self._buckets.with_prompts, self._buckets.decoding):
            inputs = GraphInputs(buckets, self._max_blocks, self._target.device)  # a step copies what the largest holds
            every += [(bucket, inputs) for bucket in buckets]
        libraries = Counter[str]()
        for bucket, inputs in track(every, "capturing CUDA graphs", console=console, disable=not console.is_terminal):
            capture = partial(_Graph, self._target, self.cache, inputs, bucket, pool, stream)
            chosen = with_faster_products(capture)
            self._graphs[bucket], self.seconds_by_library[bucket] = chosen.graph, chosen.seconds
            libraries[chosen.library] += 1
        taken = free - torch.cuda.mem_get_info(self._target.device)[0]
        counts = ", ".join(f"{count} with products of {library}" for library, count in sorted(libraries.items()))
        logger.info("CUDA graphs in %.1f s and %.2f GiB: %s", time.monotonic() - began, taken / 2**30, counts)

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self._target.device

    @property
    def pass_seconds(self) -> dict[int, float]:
        """Time of decoding steps' forward passes by their rows, with no context; empty before graphs are captured."""
        measured = (bucket for bucket in self._buckets.decoding if bucket in self.seconds_by_library)
        return {bucket.num_rows: min(self.seconds_by_library[bucket].values()) for bucket in measured}

    # Here and not in the forward pass alone: a graph compiled for tensors of this mode serves no others.
    @torch.inference_mode()
    def run(self, step: ForwardInput) -> ForwardOutput:
        """Runs a step's rows and fills the cache."""
        graph = self._graph(step)
        if graph is not None:
            return graph.run(step)
        device = self._target.device
        batch = RaggedBatch(step.sequences, device)
        wanted = len(step.logit_rows)
        logit_rows = np.concatenate([step.logit_rows, np.zeros(max(LEAST_ROWS - wanted, 0), np.int64)])
        token_ids, positions, rows = upload([step.token_ids, step.positions, logit_rows], device)
        if step.future is not None:
            step.future.write(token_ids)
        began = record_event(device)
        output = self._target.forward(token_ids, positions, self.cache, batch, rows)
        slots_on_host = batch.host.slot_mapping.numpy()
        return ForwardOutput(output.logits[:wanted], output.states, batch.slot_mapping, slots_on_host, began)

    @torch.inference_mode()
    def prelaunch(self, step: ForwardInput) -> bool:
        """Launch a forward pass whose token ids come later and whose rows all have logits; return whether it can be.

        `release` or `abandon` must follow. On a GPU nothing may be called until then that waits for the current stream.
        A CPU computes at `release`.
        """
        assert self._release is None
        if self._target.device.type != "cuda":
            self._release = lambda token_ids: self.run(replace(step, token_ids=token_ids))
        elif self._hold is not None and (graph := self._graph(step)) is not None:
            self._release = graph.prelaunch(step, self._hold)
        return self._release is not None

    def release(self, token_ids: np.ndarray) -> ForwardOutput | None:
        """Compute the prelaunched forward pass with these token ids, int64 [T]; None when the device has computed it
        without them."""
        release, self._release = self._release, None
        assert release is not None
        return release(token_ids)

    def abandon(self) -> None:
        """Let the device go on: nobody reads what the prelaunched forward pass, if any, computes."""
        if self._release is not None and self._hold is not None:
            self._hold.release(lambda: None)
        self._release = None

    def _graph(self, step: ForwardInput) -> _Graph | None:
        max_rows = max((sequence.count for sequence in step.sequences), default=0)
        bucket = self._buckets.find(len(step.sequences), len(step.positions), max_rows, len(step.logit_rows))
        return None if bucket is None else self._graphs.get(bucket)


def _make_hold(device: torch.device) -> StreamHold | None:
    try:
        hold = StreamHold(device)
        hold.stop()
        hold.release(lambda: None)
    except SegmentError as error:
        logger.info("steps are not launched before their drafts arrive: %s", error)
        return None
    return hold


def start_runner(
    target: Target, num_blocks: int, max_num_seqs: int, num_drafts: int, max_prefill_rows: int
) -> TargetRunner:
    """A runner with a cache of `num_blocks` blocks, its graphs captured: for steps of up to `max_num_seqs` sequences
    with `num_drafts` drafts each and `max_prefill_rows` rows of prompts."""
    tokens = num_blocks * BLOCK_SIZE
    size = tokens * token_bytes(target.layer_shapes, target.dtype) / 2**30
    logger.info("allocating a cache of %d positions, %.2f GiB", tokens, size)
    with Console(stderr=True).status(f"allocating a cache of {tokens} positions, {size:.2f} GiB"):
        cache = allocate_cache(target.layer_shapes, num_blocks, target.dtype, target.device)
    longest = blocks_for(target.max_model_len)
    runner = TargetRunner(target, cache, max_num_seqs, num_drafts + 1, max_prefill_rows, longest)
    runner.capture()
    return runner


class _Graph:
    """The forward pass over one size of batch."""

    def __init__(
        self, target: Target, cache: KVCache, inputs: GraphInputs, bucket: Bucket, pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self._inputs = inputs
        self._bucket = bucket
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            token_ids, positions, rows, batch = inputs.padding(bucket)
            # Kernels are built outside of the capture, and what that takes of memory is given back to it.
            target.forward(token_ids, positions, cache, batch, rows)
            torch.cuda.empty_cache()
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = target.forward(token_ids, positions, cache, batch, rows)
            except RuntimeError as error:
                with contextlib.suppress(RuntimeError):  # what ended the capture is told
                    self._graph.capture_end()
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = str(error).partition("\n")[0]
                raise CheckpointError(f"{target.name}: its forward pass cannot be a CUDA graph: {reason}") from error
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._logits = _unowned(output.logits)
        self._states = [_unowned(state) for state in output.states]
        self._slots = batch.slot_mapping

    def seconds(self) -> float:
        """Of one replay behind another, over the inputs as they are: the least of a few, since others may use the
        device."""
        taken = []
        for _ in range(3):
            self._graph.replay()
            began = record_event(self._slots.device)
            for _ in range(2):
                self._graph.replay()
            ended = record_event(self._slots.device)
            assert began is not None
            assert ended is not None
            ended.synchronize()
            taken.append(began.elapsed_time(ended) / 2000)
        return min(taken)

    def run(self, step: ForwardInput) -> ForwardOutput:
        """Replays the graph over a step that fits the bucket."""
        return self._launch(step, self._inputs.stage(self._bucket, step))

    def prelaunch(self, step: ForwardInput, hold: StreamHold) -> Callable[[np.ndarray], ForwardOutput | None]:
        """Replay the graph over a step that fits the bucket, whose rows all have logits, behind a stopped stream; the
        returned function writes the token ids and lets the stream go on."""
        staged = self._inputs.stage(self._bucket, step)
        hold.stop()
        try:
            output = self._launch(step, staged)
        except BaseException:
            hold.release(lambda: None)
            raise

        def release(token_ids: np.ndarray) -> ForwardOutput | None:
            fill = partial(np.copyto, staged.token_ids[: len(token_ids)], token_ids)
            return output if hold.release(fill) else None

        return release

    def _launch(self, step: ForwardInput, staged: StagedInputs) -> ForwardOutput:
        inputs = self._inputs.send(self._bucket, staged)
        if step.future is not None:
            step.future.write(inputs.token_ids)
        began = record_event(self._slots.device)
        self._graph.replay()
        num_rows = len(step.positions)
        num_logit_rows = num_rows if self._bucket.has_all_logits else len(step.logit_rows)
        slots = self._slots[:num_rows]
        output = ForwardOutput(self._logits[:num_logit_rows], self._states, slots, staged.slots, began)
        return output.with_logits_of(step.logit_rows) if self._bucket.has_all_logits else output


class _Memory:
    """Memory of a tensor that is not kept from others, as `__cuda_array_interface__` describes it."""

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
    """The tensor without a hold on its memory, which belongs to the graphs' pool: the next graph computes there too."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
