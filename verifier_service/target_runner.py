"""Runs the target over an engine's steps: decode steps as CUDA graphs, the others compiled, all eagerly on a CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from draftwire.block_pool import blocks_for
from draftwire.carriers.segment import SegmentError
from draftwire.devices import record_event, upload
from draftwire.kv_cache import BLOCK_SIZE, BatchBuffers, KVCache, RaggedBatch, SequenceRows
from draftwire.stream_hold import StreamHold
from verifier_service.target import Target
from verifier_service.target_buckets import Bucket, Buckets

logger = logging.getLogger(__name__)

# Compiled code asks for at least so many rows' logits; more of them are thrown away.
_LEAST_LOGIT_ROWS = 2
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DrawnTokens:
    """Token ids of a step that the step before draws: the device alone has them."""

    rows: np.ndarray
    """[F] int64: rows of the step that have such a token."""
    places: np.ndarray
    """[F] int64: where it is in `tokens`."""
    tokens: Tensor
    """[B] int64 on the device, -1 where nothing was drawn."""

    def write(self, token_ids: Tensor) -> None:
        """Puts them into the step's token ids; a request that drew nothing goes on with any token until it is ended."""
        rows, places = upload([self.rows, self.places], token_ids.device)
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, places).clamp_(min=0))


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, on the host."""

    token_ids: np.ndarray
    """[T] int64, sequence after sequence."""
    positions: np.ndarray
    """[T] int64."""
    sequences: Sequence[SequenceRows]
    """Where they are written and what they attend to."""
    logit_rows: np.ndarray
    """[R] int64, ascending: the rows whose logits are wanted."""
    drawn: DrawnTokens | None = None
    """Token ids that `token_ids` has not."""


@dataclass(frozen=True)
class StepOutput:
    """What a step of T rows computes, on the device; valid until the next one."""

    logits: Tensor
    """[R, vocab_size] of the step's logit rows, in the target's dtype."""
    states: Sequence[Tensor]
    """num_layers + 1 of at least T rows of [hidden_size]: those entering each layer, and the last after the norm."""
    slots: Tensor
    """[T] int64, where the rows are in the cache."""
    slots_on_host: np.ndarray
    """The same on the host."""
    began: torch.cuda.Event | None = None
    """On a GPU: when it had the step's inputs."""

    def features(self, layers: Sequence[int]) -> Tensor:
        """[T, len(layers) * hidden_size]: the states entering `layers` side by side; num_layers is the last state."""
        return torch.cat([self.states[layer][: len(self.slots_on_host)] for layer in layers], dim=-1)

    def with_logits_of(self, rows: np.ndarray) -> StepOutput:
        """The same with the logits of some of the rows that it has them of, int64 [R]."""
        if np.array_equal(rows, np.arange(len(self.logits))):
            return self
        (index,) = upload([rows], self.logits.device)
        return replace(self, logits=self.logits.index_select(0, index))


@dataclass(frozen=True)
class HeldStep:
    """A step that has been launched without its token ids. One of its methods is called, once."""

    begin: Callable[[np.ndarray], StepOutput | None]
    """Computes it with these token ids, int64 [T]; None when it has been computed without them."""
    drop: Callable[[], object]
    """Lets the device go on: what it computes is of no use."""


class TargetRunner:
    """The target, its cache and the graphs that were captured over both.

    A graph covers everything from token ids to the logits of all rows and the states that features are made of. Graphs
    share their memory: what one computes lies there until the next is replayed, whichever features are read meanwhile.

    Attributes
    ----------
    cache
        Keys and values; of a split target, those of this rank's heads.
    pass_seconds
        Time of the graphs' forward passes by their rows, with no context; empty before they are captured.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        max_num_seqs: int,
        rows_per_sequence: int,
        max_blocks_per_sequence: int,
    ) -> None:
        """
        Parameters
        ----------
        max_num_seqs, rows_per_sequence
            Most sequences of a decode step, and most rows of one of them: its last token and the drafts.
        max_blocks_per_sequence
            Most blocks of the cache that a sequence has.
        """
        self._target = target
        self.cache = cache
        self._buckets = Buckets(max_num_seqs, rows_per_sequence)
        self._max_num_seqs = max_num_seqs
        self._max_blocks = max_blocks_per_sequence
        self._graphs: dict[Bucket, _Graph] = {}
        self._hold: StreamHold | None = None
        self.pass_seconds: dict[int, float] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the graphs, with a progress bar, and compiles what steps without one need; not on a CPU.

        The target is compiled by then.
        """
        if self._target.device.type != "cuda":
            return
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._target.device)[0]
        buckets = list(self._buckets)
        inputs = _Inputs(max(b.num_rows for b in buckets), self._max_num_seqs, self._max_blocks, self._target.device)
        self._hold = _make_hold(self._target.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._target.device)
        console = Console(stderr=True)
        for bucket in track(buckets, "capturing CUDA graphs", console=console, disable=not console.is_terminal):
            self._graphs[bucket] = _Graph(self._target, self.cache, inputs, bucket, pool, stream)
            self.pass_seconds[bucket.num_rows] = self._measured(bucket)
        for step in track(
            list(self._prompts()), "steps with prompts", console=console, disable=not console.is_terminal
        ):
            self.run(step)
        torch.cuda.synchronize(self._target.device)
        torch.cuda.empty_cache()  # what the runs outside of the captures took
        taken = free - torch.cuda.mem_get_info(self._target.device)[0]
        logger.info("%d CUDA graphs in %.1f s and %.2f GiB", len(self._graphs), time.monotonic() - began, taken / 2**30)

    def _measured(self, bucket: Bucket) -> float:
        """Seconds of a bucket's forward pass: the least of a few, since others may use the device."""
        taken = []
        for _ in range(3):
            output = self._graphs[bucket].run(_padding([(0, bucket.rows_each)] * bucket.num_sequences))
            ended = record_event(self._target.device)
            assert output.began is not None
            assert ended is not None
            ended.synchronize()
            taken.append(output.began.elapsed_time(ended) / 1000)
        return min(taken)

    def _prompts(self) -> Iterator[StepRows]:
        """Steps of padding that use the forms of the attention kernels that steps with prompts take: a short or a
        long piece of a prompt, at its begin or far into it, beside few and many sequences."""
        far = max(self._max_blocks - 1, 1) * BLOCK_SIZE
        counts = {min(2**i, self._max_num_seqs) for i in range(self._max_num_seqs.bit_length() + 1)}
        for count, rows in product(sorted(counts), sorted({min(rows, far) for rows in (8, 16, 32, 64, 256)})):
            for start in sorted({0, far - rows}):
                yield _padding([(start, rows)] + [(0, 1)] * (count - 1))

    # Here and not in the forward pass alone: a graph compiled for tensors of this mode serves no others.
    @torch.inference_mode()
    def run(self, step: StepRows) -> StepOutput:
        """Runs a step's rows and fills the cache."""
        graph = self._graph(step)
        if graph is not None:
            return graph.run(step)
        device = self._target.device
        batch = RaggedBatch(step.sequences, device)
        wanted = len(step.logit_rows)
        logit_rows = np.concatenate([step.logit_rows, np.zeros(max(_LEAST_LOGIT_ROWS - wanted, 0), np.int64)])
        token_ids, positions, rows = upload([step.token_ids, step.positions, logit_rows], device)
        if step.drawn is not None:
            step.drawn.write(token_ids)
        began = record_event(device)
        output = self._target.forward(token_ids, positions, self.cache, batch, rows)
        slots_on_host = batch.host.slot_mapping.numpy()
        return StepOutput(output.logits[:wanted], output.states, batch.slot_mapping, slots_on_host, began)

    @torch.inference_mode()
    def hold(self, step: StepRows) -> HeldStep | None:
        """Launches a step whose token ids are still to come and whose rows all have logits; None where that cannot be.

        On a GPU until then nothing may be called that waits for the current stream. A CPU computes when they are there.
        """
        if self._target.device.type != "cuda":
            return HeldStep(lambda token_ids: self.run(replace(step, token_ids=token_ids)), lambda: None)
        graph = self._graph(step)
        return None if graph is None or self._hold is None else graph.hold(step, self._hold)

    def _graph(self, step: StepRows) -> _Graph | None:
        max_rows = max((sequence.count for sequence in step.sequences), default=0)
        bucket = self._buckets.find(len(step.sequences), len(step.positions), max_rows)
        return None if bucket is None else self._graphs.get(bucket)


def _make_hold(device: torch.device) -> StreamHold | None:
    try:
        hold = StreamHold(device)
        hold.stop()
        hold.release(lambda: None)
    except SegmentError as error:
        logger.info("steps are not launched before their drafts are there: %s", error)
        return None
    return hold


def start_runner(target: Target, num_blocks: int, max_num_seqs: int, num_drafts: int) -> TargetRunner:
    """A runner with a cache of `num_blocks` blocks for steps of up to `num_drafts` drafts, its graphs captured."""
    cache = KVCache(target.layer_shapes, num_blocks, target.dtype, target.device)
    runner = TargetRunner(target, cache, max_num_seqs, num_drafts + 1, blocks_for(target.max_model_len))
    runner.capture()
    return runner


class _Loaded(NamedTuple):
    """A step in the memory that graphs read."""

    token_ids: Tensor  # [rows of the bucket] int64
    positions: Tensor
    batch: RaggedBatch
    slots_on_host: np.ndarray  # of the step's own rows


class _Inputs:
    """What graphs read, at fixed addresses."""

    def __init__(self, max_rows: int, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self._token_ids, self._positions = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self._batch = BatchBuffers(max_rows, max_num_seqs, max_blocks, device)

    def load(self, step: StepRows, bucket: Bucket) -> _Loaded:
        """Copies all but the token ids of a step that fits the bucket; rows of padding are at position 0."""
        padded = bucket.num_rows
        positions = self._positions[:padded]
        positions.copy_(_staged(step.positions, padded), non_blocking=True)
        own = RaggedBatch(step.sequences, _CPU)
        batch = self._batch.load(own, padded, bucket.num_sequences, max_rows=bucket.max_rows)
        return _Loaded(self._token_ids[:padded], positions, batch, own.slot_mapping.numpy())


def _staged(values: np.ndarray, padded: int) -> Tensor:
    """[padded] int64 in pinned memory, with zeros behind the values."""
    tensor = torch.zeros(padded, dtype=torch.int64, pin_memory=True)
    tensor.numpy()[: len(values)] = values
    return tensor


class _Graph:
    """The forward pass over one size of batch."""

    def __init__(
        self, target: Target, cache: KVCache, inputs: _Inputs, bucket: Bucket, pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self._inputs = inputs
        self._bucket = bucket
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            padding = _padding([(0, bucket.rows_each)] * bucket.num_sequences)
            token_ids, positions, batch, _ = inputs.load(padding, bucket)
            token_ids.zero_()
            rows = torch.arange(bucket.num_rows, device=target.device)
            target.forward(token_ids, positions, cache, batch, rows)  # kernels are built outside of the capture
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = target.forward(token_ids, positions, cache, batch, rows)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._rows = rows
        self._logits = _unowned(output.logits)
        self._states = [_unowned(state) for state in output.states]
        self._slots = batch.slot_mapping

    def run(self, step: StepRows) -> StepOutput:
        """Replays the graph over a step that fits the bucket."""
        loaded = self._inputs.load(step, self._bucket)
        return self._replay(step, loaded, _staged(step.token_ids, self._bucket.num_rows))

    def hold(self, step: StepRows, hold: StreamHold) -> HeldStep:
        """Launches the same, which begins when the token ids are there."""
        loaded = self._inputs.load(step, self._bucket)
        token_ids = _staged(step.token_ids, self._bucket.num_rows)
        hold.stop()
        try:
            output = self._replay(step, loaded, token_ids)
        except BaseException:
            hold.release(lambda: None)
            raise

        def begin(known: np.ndarray) -> StepOutput | None:
            return output if hold.release(lambda: np.copyto(token_ids.numpy()[: len(known)], known)) else None

        return HeldStep(begin, lambda: hold.release(lambda: None))

    def _replay(self, step: StepRows, loaded: _Loaded, token_ids: Tensor) -> StepOutput:
        """Token ids [rows of the bucket] are in pinned memory, and read when the stream comes to it."""
        loaded.token_ids.copy_(token_ids, non_blocking=True)
        if step.drawn is not None:
            step.drawn.write(loaded.token_ids)
        began = record_event(self._rows.device)
        self._graph.replay()
        num_rows = len(step.positions)
        slots, slots_on_host = self._slots[:num_rows], loaded.slots_on_host
        output = StepOutput(self._logits[:num_rows], self._states, slots, slots_on_host, began)
        return output.with_logits_of(step.logit_rows)


def _padding(sequences: Sequence[tuple[int, int]]) -> StepRows:
    """A step of sequences (start, rows) that is written to the block of padding."""
    placed = [SequenceRows([0] * blocks_for(start + rows), start, rows) for start, rows in sequences]
    num_rows = sum(rows for _, rows in sequences)
    rows = np.zeros(num_rows, np.int64)
    return StepRows(rows, rows, placed, np.arange(num_rows))


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
