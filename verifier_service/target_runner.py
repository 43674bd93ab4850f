"""Runs the target over an engine's steps: as CUDA graphs on a GPU, eagerly on a CPU."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from draftwire.block_pool import blocks_for
from draftwire.carriers.segment import SegmentError
from draftwire.devices import record_event, upload
from draftwire.errors import CheckpointError
from draftwire.kv_cache import BLOCK_SIZE, KVCache, RaggedBatch, SequenceRows, allocate_cache
from draftwire.stream_hold import StreamHold
from verifier_service.graph_inputs import GraphInputs, StagedStep
from verifier_service.graph_products import with_faster_products
from verifier_service.target import Target
from verifier_service.target_buckets import LEAST_ROWS, Bucket, Buckets

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class ReservedStep:
    """A pass that has been launched before anything is known of its step but how large it can be. One of its
    methods is called, once."""

    fill: Callable[[StepRows], HeldStep | None]
    """Makes it the pass of a step whose token ids are still to come; None where that does not fit, and it is dropped.
    """
    drop: Callable[[], object]
    """Lets the device go on: it computes padding."""


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
    def pass_seconds(self) -> dict[int, float]:
        """Time of decoding steps' forward passes by their rows, with no context; empty before graphs are captured."""
        measured = (bucket for bucket in self._buckets.decoding if bucket in self.seconds_by_library)
        return {bucket.num_rows: min(self.seconds_by_library[bucket].values()) for bucket in measured}

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
        logit_rows = np.concatenate([step.logit_rows, np.zeros(max(LEAST_ROWS - wanted, 0), np.int64)])
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
        blocks = max((len(sequence.blocks) for sequence in step.sequences), default=0)
        max_rows = max((sequence.count for sequence in step.sequences), default=0)
        reserved = self.reserve(len(step.sequences), len(step.positions), max_rows, blocks)
        return None if reserved is None else reserved.fill(step)

    @torch.inference_mode()
    def reserve(self, num_sequences: int, num_rows: int, max_rows: int, num_blocks: int) -> ReservedStep | None:
        """The same of a step that is still to come as a whole: of up to so many sequences, with so many rows in all, at
        most `max_rows` of one, and `num_blocks` blocks of one that hold them."""
        if self._target.device.type != "cuda":
            most = _Most(num_sequences, num_rows, max_rows, num_blocks)
            return ReservedStep(lambda step: self._held_on_cpu(step) if most.holds(step) else None, lambda: None)
        bucket = self._buckets.find(num_sequences, num_rows, max_rows, num_rows)
        graph = None if bucket is None else self._graphs.get(bucket)
        if graph is None or self._hold is None:
            return None
        return graph.reserve(num_sequences, max(num_blocks, 1), self._hold)

    def _held_on_cpu(self, step: StepRows) -> HeldStep:
        return HeldStep(lambda token_ids: self.run(replace(step, token_ids=token_ids)), lambda: None)

    def _graph(self, step: StepRows) -> _Graph | None:
        max_rows = max((sequence.count for sequence in step.sequences), default=0)
        bucket = self._buckets.find(len(step.sequences), len(step.positions), max_rows, len(step.logit_rows))
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


def start_runner(
    target: Target, num_blocks: int, max_num_seqs: int, num_drafts: int, max_prefill_rows: int
) -> TargetRunner:
    """A runner with a cache of `num_blocks` blocks, its graphs captured: for steps of up to `max_num_seqs` sequences
    with `num_drafts` drafts each and `max_prefill_rows` rows of prompts."""
    cache = allocate_cache(target.layer_shapes, num_blocks, target.dtype, target.device)
    longest = blocks_for(target.max_model_len)
    runner = TargetRunner(target, cache, max_num_seqs, num_drafts + 1, max_prefill_rows, longest)
    runner.capture()
    return runner


class _Most(NamedTuple):
    """Bounds of a step."""

    num_sequences: int
    num_rows: int
    max_rows: int
    num_blocks: int

    def holds(self, step: StepRows) -> bool:
        """Whether a step is within them."""
        sequences = step.sequences
        return (
            len(sequences) <= self.num_sequences
            and len(step.positions) <= self.num_rows
            and all(one.count <= self.max_rows and len(one.blocks) <= self.num_blocks for one in sequences)
        )


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
            token_ids, positions, rows, batch = StagedStep(inputs, bucket, 0, 1).send()
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

    def run(self, step: StepRows) -> StepOutput:
        """Replays the graph over a step that fits the bucket."""
        stage = self._stage(len(step.sequences), max((len(sequence.blocks) for sequence in step.sequences), default=1))
        slots = stage.fill(step)
        assert slots is not None
        stage.token_ids[: len(step.token_ids)] = step.token_ids
        began = self._launch(stage, step.drawn)
        return self._output(step, slots, began)

    def reserve(self, num_sequences: int, num_blocks: int, hold: StreamHold) -> ReservedStep:
        """Launches the graph for a step of up to so many sequences, of so many blocks each, whose rows all have logits:
        what that is may be told until its token ids are there, with which it begins."""
        stage = self._stage(num_sequences, num_blocks)
        hold.stop()
        try:
            began = self._launch(stage)
        except BaseException:
            hold.release(lambda: None)
            raise

        def drop() -> None:
            hold.release(lambda: None)

        def fill(step: StepRows) -> HeldStep | None:
            slots = output = None
            try:
                slots = stage.fill(step)
                output = None if slots is None else self._output(step, slots, began)
            finally:
                if output is None:
                    drop()
            if output is None:
                return None

            def begin(known: np.ndarray) -> StepOutput | None:
                return output if hold.release(lambda: np.copyto(stage.token_ids[: len(known)], known)) else None

            return HeldStep(begin, drop)

        return ReservedStep(fill, drop)

    def _stage(self, num_sequences: int, num_blocks: int) -> StagedStep:
        return StagedStep(self._inputs, self._bucket, num_sequences, num_blocks)

    def _launch(self, stage: StagedStep, drawn: DrawnTokens | None = None) -> torch.cuda.Event | None:
        """Launches what is staged, which is read when the stream comes to it; when the device had it."""
        loaded = stage.send()
        if drawn is not None:
            drawn.write(loaded.token_ids)
        began = record_event(self._slots.device)
        self._graph.replay()
        return began

    def _output(self, step: StepRows, slots_on_host: np.ndarray, began: torch.cuda.Event | None) -> StepOutput:
        num_rows = len(step.positions)
        num_logit_rows = num_rows if self._bucket.has_all_logits else len(step.logit_rows)
        slots = self._slots[:num_rows]
        output = StepOutput(self._logits[:num_logit_rows], self._states, slots, slots_on_host, began)
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
