"""The graphs of a target's runner, played on a CPU: batches are padded, copied and read back as on a GPU."""

from __future__ import annotations

import torch

from draftwire.model.kv_cache import RaggedBatch
from verifier_service.target.graph_inputs import GraphInputs
from verifier_service.target.graph_sizes import Bucket
from verifier_service.target.runner import TargetRunner
from verifier_service.target.step_graph import StepGraph
from verifier_service.target.target import Target, TargetOutput


def play_graph(
    target: Target, runner: TargetRunner, inputs: GraphInputs, bucket: Bucket, memory: list[torch.Tensor]
) -> StepGraph:
    """Return a graph that computes from the memory that a graph reads.

    The results of all graphs lie in one memory, which each replay overwrites.
    """
    token_ids, positions, logit_rows, batch = inputs.padding(bucket)

    def replay() -> TargetOutput:
        for tensor in memory:
            tensor.fill_(torch.nan)
        # Made anew, because a CPU reads the numbers once.
        now = RaggedBatch.from_tensors(
            *(batch.slot_mapping, batch.cu_rows, batch.lengths, batch.block_tables),
            max_rows=batch.max_rows,
            max_length=batch.max_length,
        )
        output = target.forward(token_ids, positions, runner.cache, now, logit_rows)
        memory[:] = [output.logits, *output.states]
        return output

    return StepGraph(inputs, bucket, batch.slot_mapping, replay)


@torch.inference_mode()
def play_graphs(target: Target, runner: TargetRunner) -> None:
    """Let a runner compute every step by the graph that a GPU would use."""
    memory: list[torch.Tensor] = []
    for buckets in (runner.buckets.with_prompts, runner.buckets.decoding):
        inputs = GraphInputs(buckets, runner.max_blocks, torch.device("cpu"))
        runner.graphs |= {bucket: play_graph(target, runner, inputs, bucket, memory) for bucket in buckets}
