"""The graphs of a target's runner, played on a CPU: batches are padded, copied and read back as on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from draftwire.model.kv_cache import RaggedBatch
from verifier_service.target import graph_inputs
from verifier_service.target import runner as target_runner
from verifier_service.target.runner import TargetRunner


class PlayedGraph(target_runner._Graph):
    """Computes from the memory that a graph reads. What all of them compute lies in one memory, which each replay
    overwrites."""

    def __init__(self, runner: TargetRunner, inputs: Any, bucket: Any, memory: list[torch.Tensor]) -> None:
        self._inputs, self._bucket = inputs, bucket
        self._target, self._cache, self._memory = runner._target, runner.cache, memory
        self._read = inputs.padding(bucket)
        self._slots = self._read.batch.slot_mapping
        self._graph: Any = self

    def replay(self) -> None:
        token_ids, positions, logit_rows, batch = self._read
        for tensor in self._memory:
            tensor.fill_(torch.nan)
        # Made anew, because what computes on a CPU reads the numbers once.
        now = RaggedBatch.from_tensors(
            *(batch.slot_mapping, batch.cu_rows, batch.lengths, batch.block_tables),
            max_rows=batch.max_rows,
            max_length=batch.max_length,
        )
        output = self._target.forward(token_ids, positions, self._cache, now, logit_rows)
        self._logits, self._states = output.logits, output.states
        self._memory[:] = [self._logits, *self._states]


@torch.inference_mode()
def play_graphs(runner: TargetRunner) -> None:
    """Has it compute every step by the graph that a GPU would."""
    memory: list[torch.Tensor] = []
    for buckets in (runner._buckets.with_prompts, runner._buckets.decoding):
        inputs = graph_inputs.GraphInputs(buckets, runner._max_blocks, torch.device("cpu"))
        runner._graphs |= {bucket: PlayedGraph(runner, inputs, bucket, memory) for bucket in buckets}
