"""Run the target over an engine's steps: as CUDA graphs on a GPU, eagerly on a CPU."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import record_event, upload
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache, RaggedBatch, allocate_cache, token_bytes
from draftwire.transport.segment import SegmentError
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.target.graph_inputs import GraphInputs
from verifier_service.target.graph_sizes import LEAST_ROWS, Bucket, Buckets
from verifier_service.target.step_graph import Release, StepGraph, capture_graph, with_rows
from verifier_service.target.stream_hold import StreamHold
from verifier_service.target.target import Target

logger = logging.getLogger(__name__)


class TargetRunner:
    """The target, its cache, and the graphs captured over both.

    A graph covers the pass from token ids to logits and hidden states. Graphs share their memory: a graph's results are
    valid until the next replay. A step that fits no graph runs eagerly.

    Attributes:
        cache: Keys and values; for a split target, those of this rank's heads.
        buckets: The sizes of steps with graphs.
        max_blocks: Maximum number of cache blocks of a sequence.
        graphs: The captured graphs by size.
        seconds: Time of each bucket's graph with padding only; empty before the capture.
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
        Args:
            max_num_seqs: Maximum number of sequences of a step.
            rows_per_sequence: Maximum number of rows of a decoding sequence: its last token and drafts.
            max_prefill_rows: Maximum number of rows of prompts in a step.
            max_blocks_per_sequence: Maximum number of cache blocks of a sequence.
        """
        self._target = target
        self.cache = cache
        most_rows = max_num_seqs * rows_per_sequence + max_prefill_rows
        most_rows = min(most_rows, max_num_seqs * max_blocks_per_sequence * BLOCK_SIZE)
        self.buckets = Buckets(max_num_seqs, rows_per_sequence, most_rows)
        self.max_blocks = max_blocks_per_sequence
        self.graphs: dict[Bucket, StepGraph] = {}
        self._hold: StreamHold | None = None
        self._release: Release | None = None  # releases the prelaunched forward pass
        self.seconds: dict[Bucket, float] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs, with a progress bar; do nothing on a CPU. Compile the target before.

        Raises:
            CheckpointError: If the forward pass reads numbers from the device, which graphs do not support.
        """
        if self._target.device.type != "cuda":
            return
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._target.device)[0]
        self._hold = _make_hold(self._target.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._target.device)
        console = Console(stderr=True)
        every = []
        for buckets in (self.buckets.with_prompts, self.buckets.decoding):
            # The buckets share their inputs' memory, with the size of the largest bucket.
            inputs = GraphInputs(buckets, self.max_blocks, self._target.device)
            every += [(bucket, inputs) for bucket in buckets]
        for bucket, inputs in track(every, "capturing CUDA graphs", console=console, disable=not console.is_terminal):
            graph = capture_graph(self._target, self.cache, inputs, bucket, pool, stream)
            self.graphs[bucket], self.seconds[bucket] = graph, graph.seconds()
        taken = free - torch.cuda.mem_get_info(self._target.device)[0]
        logger.info("%d CUDA graphs in %.1f s and %.2f GiB", len(every), time.monotonic() - began, taken / 2**30)

    @property
    def device(self) -> torch.device:
        """Return the target's device."""
        return self._target.device

    @property
    def pass_seconds(self) -> dict[tuple[int, int], float]:
        """Return the seconds of decoding forward passes without context by (sequences, rows) of their graph; empty
        before the capture."""
        measured = (bucket for bucket in self.buckets.decoding if bucket in self.seconds)
        return {(bucket.num_sequences, bucket.num_rows): self.seconds[bucket] for bucket in measured}

    # Inference mode here, not only in the forward pass: code is compiled for inference tensors only.
    @torch.inference_mode()
    def run(self, step: ForwardInput) -> ForwardOutput:
        """Run a step's rows and fill the cache."""
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
    def prelaunch(self, step: ForwardInput, most_rows: int | None = None) -> bool:
        """Launch a forward pass whose token ids are not known yet and whose rows all have logits; return False if this
        is not possible.

        With `most_rows` the pass has room for only `most_rows` rows, and `release` gets the rows of each sequence. Call
        `release` or `abandon` afterwards. On a GPU, call nothing in between that waits for the current stream. A CPU
        computes at `release`.
        """
        assert self._release is None
        if self._target.device.type != "cuda":
            self._release = lambda token_ids, counts: self.run(with_rows(step, token_ids, counts))
        elif self._hold is not None and (graph := self._graph(step, most_rows)) is not None:
            self._release = graph.prelaunch(step, self._hold, has_all_rows=most_rows is None)
        return self._release is not None

    def release(self, token_ids: np.ndarray, counts: np.ndarray | None = None) -> ForwardOutput | None:
        """Release the prelaunched forward pass with its token ids, int64 [T]. Return None if the device has already
        computed the pass without them.

        `counts`, int64 [B], are the rows of each sequence if the pass was launched with `most_rows`: at least one, and
        at most the rows at the launch.
        """
        release, self._release = self._release, None
        assert release is not None
        return release(token_ids, counts)

    def abandon(self) -> None:
        """Let the device continue, and drop the result of the prelaunched forward pass, if any."""
        if self._release is not None and self._hold is not None:
            self._hold.release(lambda: None)
        self._release = None

    def _graph(self, step: ForwardInput, most_rows: int | None = None) -> StepGraph | None:
        """Return the graph for a step; with `most_rows`, for that many of its rows, all with logits."""
        max_rows = max((sequence.count for sequence in step.sequences), default=0)
        num_rows, num_logit_rows = len(step.positions), len(step.logit_rows)
        if most_rows is not None:
            num_rows = num_logit_rows = min(num_rows, most_rows)
        bucket = self.buckets.find(len(step.sequences), num_rows, max_rows, num_logit_rows)
        if bucket is None or (most_rows is not None and not bucket.has_all_logits):
            return None
        return self.graphs.get(bucket)


def _make_hold(device: torch.device) -> StreamHold | None:
    try:
        hold = StreamHold(device)
        hold.stop()
        hold.release(lambda: None)
    except SegmentError as error:
        logger.info("no steps are launched before their drafts arrive: %s", error)
        return None
    return hold


def start_runner(
    target: Target, num_blocks: int, max_num_seqs: int, num_drafts: int, max_prefill_rows: int
) -> TargetRunner:
    """Return a runner with a cache of `num_blocks` blocks and captured graphs, for steps of up to `max_num_seqs`
    sequences with `num_drafts` drafts each and `max_prefill_rows` rows of prompts."""
    tokens = num_blocks * BLOCK_SIZE
    size = tokens * token_bytes(target.layer_shapes, target.dtype) / 2**30
    logger.info("allocating a cache of %d positions, %.2f GiB", tokens, size)
    with Console(stderr=True).status(f"allocating a cache of {tokens} positions, {size:.2f} GiB"):
        cache = allocate_cache(target.layer_shapes, num_blocks, target.dtype, target.device)
    longest = blocks_for(target.max_model_len)
    runner = TargetRunner(target, cache, max_num_seqs, num_drafts + 1, max_prefill_rows, longest)
    runner.capture()
    return runner
