"""Steps of the runner: eager on a CPU, as emulated graphs on a CPU, and as CUDA graphs on a GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwire.model.block_pool import BlockPool, blocks_for
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.target.graph_inputs import GraphInputs
from verifier_service.target.graph_sizes import Bucket
from verifier_service.target.runner import TargetRunner
from verifier_service.target.step_graph import StepGraph
from verifier_service.target.target import Target, TargetOutput, load_target

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
CONTEXT = 256
K = 4
MAX_NUM_SEQS = 10
PREFILL = 400
VOCAB_SIZE = 2048
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def play_graph(
    target: Target, runner: TargetRunner, inputs: GraphInputs, bucket: Bucket, memory: list[torch.Tensor]
) -> StepGraph:
    """Return an emulated graph that reads its inputs from the buffers of a CUDA graph.

    All graphs share the memory of results, which each replay overwrites.
    """
    token_ids, positions, logit_rows, batch = inputs.padding(bucket)

    def replay() -> TargetOutput:
        for tensor in memory:
            tensor.fill_(torch.nan)
        # Created for each replay, because a batch on the CPU reads its values only once.
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
    """Have a runner compute each step with an emulation of the graph that a GPU would use."""
    memory: list[torch.Tensor] = []
    for buckets in (runner.buckets.with_prompts, runner.buckets.decoding):
        inputs = GraphInputs(buckets, runner.max_blocks, torch.device("cpu"))
        runner.graphs |= {bucket: play_graph(target, runner, inputs, bucket, memory) for bucket in buckets}


@pytest.fixture(scope="module", params=["cpu", "played", GPU])
def kind(request) -> str:
    """How steps run: eager on the CPU, as emulated graphs on the CPU, or on a GPU."""
    return request.param


@pytest.fixture(scope="module")
def target(kind) -> Target:
    device = torch.device("cuda" if kind == "cuda" else "cpu")
    target = load_target(DEMO, "demo", torch.float32, device, max_model_len=CONTEXT)
    if device.type == "cuda":
        torch.compiler.reset()  # torch accepts at most eight models per process
        target.compile()
    return target


@pytest.fixture(scope="module")
def runner(kind, target) -> TargetRunner:
    cache = KVCache(target.layer_shapes, 200, target.dtype, target.device)
    runner = TargetRunner(target, cache, MAX_NUM_SEQS, K + 1, PREFILL, blocks_for(CONTEXT))
    if kind == "played":
        play_graphs(target, runner)
    runner.capture()
    return runner


@pytest.fixture(scope="module")
def model(target) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval().to(target.device)


@pytest.fixture
def no_recompilation():
    """Raise an error if anything is compiled again."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class Sequence:
    """Tokens with their blocks and the number of rows in the cache."""

    def __init__(self, tokens: list[int], pool: BlockPool) -> None:
        blocks = pool.allocate(blocks_for(CONTEXT))
        assert blocks is not None
        self.tokens, self.blocks, self.num_computed = tokens, blocks, 0


def step_of(pieces: list[tuple[Sequence, list[int]]], logit_rows: list[int] | None = None) -> ForwardInput:
    """Return a step of these tokens after the computed ones, with logits of every row, or of `logit_rows`."""
    num_rows = sum(len(tokens) for _, tokens in pieces)
    return ForwardInput(
        np.concatenate([np.array(tokens, np.int64) for _, tokens in pieces]),
        np.concatenate([np.arange(s.num_computed, s.num_computed + len(tokens)) for s, tokens in pieces]),
        [SequenceRows(s.blocks, s.num_computed, len(tokens)) for s, tokens in pieces],
        np.array(range(num_rows) if logit_rows is None else logit_rows, np.int64),
    )


def run(runner: TargetRunner, pieces: list[tuple[Sequence, list[int]]], *, all_logits: bool = True) -> ForwardOutput:
    """Run these tokens after the computed ones; return logits of every row, or of each piece's last."""
    lasts = np.cumsum([len(tokens) for _, tokens in pieces]) - 1
    return runner.run(step_of(pieces, None if all_logits else lasts.tolist()))


def prompts(count: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def prompted(runner: TargetRunner, count: int) -> list[Sequence]:
    """Return sequences whose prompts have run."""
    pool = BlockPool(200)
    sequences = [Sequence(prompt, pool) for prompt in prompts(count, 9, 30)]
    run(runner, [(s, s.tokens) for s in sequences])
    for sequence in sequences:
        sequence.num_computed = len(sequence.tokens)
    return sequences


@pytest.mark.usefixtures("no_recompilation")
@torch.inference_mode()
def test_greedy_output_through_ragged_steps_matches_transformers(model, runner):
    """Prompts run in one step, then drafts of which some are correct, in batches that shrink as sequences end."""
    rng = random.Random(1)
    pool = BlockPool(200)
    sequences = [Sequence(prompt, pool) for prompt in prompts(MAX_NUM_SEQS, 1, 30, 7, 60)]
    lengths = [30, 45, 20, 38, 25, 41, 12, 33, 29, 17]
    device = model.device
    expected = [
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, eos_token_id=None
        )
        for ids, length in (
            (torch.tensor([s.tokens], device=device), n) for s, n in zip(sequences, lengths, strict=True)
        )
    ]
    wanted = [ids[0].tolist() for ids in expected]
    first = run(runner, [(s, s.tokens) for s in sequences], all_logits=False).logits.argmax(-1).tolist()
    for sequence, token in zip(sequences, first, strict=True):
        sequence.num_computed = len(sequence.tokens)
        sequence.tokens = [*sequence.tokens, token]
    while True:
        left = [(s, full) for s, full in zip(sequences, wanted, strict=True) if len(s.tokens) < len(full)]
        if not left:
            break
        pieces = []
        for sequence, full in left:
            right = full[len(sequence.tokens) :][: rng.randrange(K + 1)]
            wrong = [rng.randrange(5, VOCAB_SIZE)] if len(right) < K and rng.random() < 0.5 else []
            pieces.append((sequence, [sequence.tokens[-1], *right, *wrong]))
        drawn = run(runner, pieces).logits.argmax(-1).tolist()
        for sequence, rows in pieces:
            own, drawn = drawn[: len(rows)], drawn[len(rows) :]
            accepted = next((i for i, draft in enumerate(rows[1:]) if draft != own[i]), len(rows) - 1)
            sequence.num_computed += accepted + 1
            sequence.tokens = [*sequence.tokens, *own[: accepted + 1]]
    assert [s.tokens[: len(full)] for s, full in zip(sequences, wanted, strict=True)] == wanted


@pytest.mark.parametrize(
    "counts",
    [
        *((1,), (5,), (1, 1), (1, 1, 1, 1, 1), (5, 1, 3), (2, 5, 5, 5, 5, 5)),
        *((1, 5, 1, 1, 1, 1, 1, 1, 1), (2,) * 10, (1, 3, 5, 1, 1, 5, 5, 5, 1, 3), (5,) * 10),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_recompilation")
@torch.inference_mode()
def test_a_steps_logits_and_features_are_each_sequences_alone(model, target, runner, counts):
    pool = BlockPool(200)
    sequences = [Sequence(prompt, pool) for prompt in prompts(len(counts), 20, 33)]
    starts = [len(s.tokens) - count for s, count in zip(sequences, counts, strict=True)]
    run(runner, [(s, s.tokens[:start]) for s, start in zip(sequences, starts, strict=True)])
    for sequence, start in zip(sequences, starts, strict=True):
        sequence.num_computed = start
    layers = [2, 3, target.num_layers]
    for _ in range(2):  # independent of earlier contents of a graph's memory
        output = run(runner, [(s, s.tokens[start:]) for s, start in zip(sequences, starts, strict=True)])
        begin = 0
        for sequence, start, count in zip(sequences, starts, counts, strict=True):
            ids = torch.tensor([sequence.tokens], device=model.device)
            alone = model(ids, output_hidden_states=True, use_cache=False)
            rows = slice(begin, begin + count)
            torch.testing.assert_close(output.logits[rows], alone.logits[0, start:], rtol=1e-3, atol=1e-3)
            states = torch.cat([alone.hidden_states[layer][0, start:] for layer in layers], -1)
            torch.testing.assert_close(output.features(layers)[rows], states, rtol=1e-3, atol=1e-3)
            slots = [sequence.blocks[i // 16] * 16 + i % 16 for i in range(start, start + count)]
            assert output.slots[rows].tolist() == output.slots_on_host[rows].tolist() == slots
            begin += count
        assert output.logits.shape[0] == begin


@pytest.mark.parametrize("kind", [GPU], indirect=True)
@pytest.mark.usefixtures("no_recompilation")
@torch.inference_mode()
def test_steps_with_prompts_are_graphs_with_compiled_kernels(target, runner, monkeypatch):
    from draftwire_kernels.gpu.paged_attention import attention_kernel, combine_kernel

    kernels = (attention_kernel, combine_kernel)

    def count_forms() -> int:
        return sum(len(forms) for kernel in kernels for forms, *_ in kernel.device_caches.values())

    monkeypatch.setattr(target, "forward", None)  # graphs do not call it
    rng = random.Random(5)
    before = count_forms()
    assert before > 0
    for _ in range(100):
        pool, room = BlockPool(200), PREFILL
        pieces = []
        for i in range(rng.randint(1, MAX_NUM_SEQS)):
            sequence = Sequence([], pool)
            has_prompt = room > 0 and (i == 0 or rng.random() < 0.3)
            count = min(rng.randint(6, 150), room) if has_prompt else rng.randint(1, K + 1)
            room -= count if has_prompt else 0
            sequence.num_computed = rng.randint(0, CONTEXT - count)
            pieces.append((sequence, [5] * count))
        run(runner, pieces, all_logits=False)
    assert count_forms() == before


@pytest.mark.usefixtures("no_recompilation")
@torch.inference_mode()
def test_steps_with_prompts_and_drafts_equal_sequences_alone(model, target, runner):
    """Prompts run in pieces with logits of the last row only; decoding sequences have logits of all rows."""
    pool = BlockPool(200)
    sequences = [Sequence(prompt, pool) for prompt in prompts(MAX_NUM_SEQS, 200, 33, 64, 90)]
    alone = [
        model(torch.tensor([s.tokens], device=model.device), output_hidden_states=True, use_cache=False)
        for s in sequences
    ]
    layers = [1, target.num_layers]
    rng = random.Random(7)
    while any(s.num_computed < len(s.tokens) for s in sequences):
        left = [s for s in sequences if s.num_computed < len(s.tokens)]
        pieces, logit_rows, num_rows, room = [], [], 0, PREFILL
        for sequence in rng.sample(left, rng.randint(1, len(left))):
            is_decoding = sequence.num_computed > 0 and rng.random() < 0.4
            count = rng.randint(1, K + 1) if is_decoding else min(rng.randint(1, 150), room)
            count = min(count, len(sequence.tokens) - sequence.num_computed)
            if count == 0:
                continue
            room -= 0 if is_decoding else count
            logit_rows += range(num_rows if is_decoding else num_rows + count - 1, num_rows + count)
            pieces.append((sequence, sequence.num_computed, count))
            num_rows += count
        tokens = [(s, s.tokens[start : start + count]) for s, start, count in pieces]
        output = runner.run(step_of(tokens, logit_rows))
        expected = [alone[sequences.index(s)] for s, _, _ in pieces]
        ranges = [slice(start, start + count) for _, start, count in pieces]
        logits = torch.cat([one.logits[0, rows] for one, rows in zip(expected, ranges, strict=True)])
        torch.testing.assert_close(output.logits, logits[logit_rows], rtol=1e-3, atol=1e-3)
        states = [
            torch.cat([one.hidden_states[layer][0, rows] for layer in layers], -1)
            for one, rows in zip(expected, ranges, strict=True)
        ]
        torch.testing.assert_close(output.features(layers), torch.cat(states), rtol=1e-3, atol=1e-3)
        slots = [s.blocks[i // 16] * 16 + i % 16 for s, start, count in pieces for i in range(start, start + count)]
        assert output.slots.tolist() == output.slots_on_host.tolist() == slots
        for sequence, _, count in pieces:
            sequence.num_computed += count


@torch.inference_mode()
def test_logits_come_for_the_rows_asked_for(runner):
    """For steps that decode, for steps with a prompt, and for no rows."""
    pool = BlockPool(200)
    for length in (5, 40):
        sequence = Sequence(prompts(1, length)[0], pool)
        every = run(runner, [(sequence, sequence.tokens)]).logits.clone()
        for rows in ([], [length - 1], [0, 2, 3]):
            step = step_of([(sequence, sequence.tokens)], rows)
            torch.testing.assert_close(runner.run(step).logits, every[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_recompilation")
@pytest.mark.parametrize("count", [1, 3, MAX_NUM_SEQS])
@torch.inference_mode()
def test_a_held_step_computes_what_it_computes_at_once(runner, count):
    sequences = prompted(runner, count)
    rng = random.Random(count)
    rows = [[rng.randrange(5, VOCAB_SIZE) for _ in range(1 + rng.randrange(1, K + 1))] for _ in sequences]
    pieces = list(zip(sequences, rows, strict=True))
    output = run(runner, pieces)
    expected, features = output.logits.clone(), output.features((1, 2)).clone()
    token_ids = np.concatenate([np.array(tokens, np.int64) for tokens in rows])
    step = step_of([(s, [0] * len(tokens)) for s, tokens in pieces])
    assert runner.prelaunch(step)
    runner.abandon()
    for _ in range(2):
        assert runner.prelaunch(step)
        found = runner.release(token_ids)
        assert found is not None
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=0)
        torch.testing.assert_close(found.features((1, 2)), features, rtol=0, atol=0)
        assert found.slots.tolist() == found.slots_on_host.tolist() == output.slots_on_host.tolist()
    some = np.arange(len(token_ids))[::2]
    torch.testing.assert_close(found.with_logits_of(some).logits, expected[some], rtol=0, atol=0)


@pytest.mark.usefixtures("no_recompilation")
@pytest.mark.parametrize("count", [1, 3, MAX_NUM_SEQS])
@torch.inference_mode()
def test_a_held_step_may_get_its_rows_when_it_starts(runner, count):
    """Each sequence may have fewer rows than the step was launched with."""
    sequences = prompted(runner, count)
    rng = random.Random(count)
    rows = [[rng.randrange(5, VOCAB_SIZE) for _ in range(1 + rng.randrange(K + 1))] for _ in sequences]
    output = run(runner, list(zip(sequences, rows, strict=True)))
    expected, features = output.logits.clone(), output.features((1, 2)).clone()
    step = step_of([(s, [0] * (K + 1)) for s in sequences])
    token_ids = np.concatenate([np.array(tokens, np.int64) for tokens in rows])
    for most_rows in (len(token_ids), count * (K + 1)):
        assert runner.prelaunch(step, most_rows)
        found = runner.release(token_ids, np.array([len(tokens) for tokens in rows]))
        assert found is not None
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.features((1, 2)), features, rtol=1e-4, atol=1e-4)
        assert found.slots.tolist() == found.slots_on_host.tolist() == output.slots_on_host.tolist()


def test_on_a_gpu_what_no_graph_computes_is_not_prelaunched(target, runner):
    num_rows = MAX_NUM_SEQS * (K + 1) + 1  # more logits than a step has
    rows = np.zeros(num_rows, np.int64)
    is_possible = runner.prelaunch(ForwardInput(rows, rows, [SequenceRows([1] * 4, 0, num_rows)], rows))
    assert is_possible == (target.device.type != "cuda")
    runner.abandon()


def test_on_a_gpu_the_time_of_a_pass_is_known_by_its_rows(target, runner):
    assert bool(runner.pass_seconds) == (target.device.type == "cuda")
    assert all(rows >= sequences for sequences, rows in runner.pass_seconds)
    assert all(seconds > 0 for seconds in runner.pass_seconds.values())
