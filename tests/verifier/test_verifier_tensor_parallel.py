"""A target split over ranks gives the results of the whole target; parts that cannot be split are refused by name."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drafting_scene import rows_of
from engine_scene import HIDDEN, NUM_LAYERS, K, Served
from tiny_targets import random_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from draftwire.contract.errors import CheckpointError, InvalidArgumentError
from draftwire.contract.validation import parse_speculative_config
from draftwire.model.devices import choose_device
from draftwire.model.kv_cache import SequenceRows
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service import main, settings
from verifier_service.core.batch import ForwardInput
from verifier_service.host.ranks import Workers, last_words, rank_device
from verifier_service.host.target_start import start_target
from verifier_service.options import VerifierOptions
from verifier_service.target import tensor_parallel
from verifier_service.target.merged_linears import MergedProjection, find_projections, merge_projections
from verifier_service.target.runner import start_runner
from verifier_service.target.target import Target
from verifier_service.target.tensor_parallel import Rank, split_target

pytestmark = pytest.mark.xdist_group("tensor_parallel")

CPU = torch.device("cpu")
SIZE = 2
CONTEXT = 2048
MAX_PREFILL_ROWS = 20  # equal for all ranks, which capture the same graphs on GPUs
VOCAB = 21  # odd, so that the ranks' parts differ in size
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PLAIN = LlamaConfig(**COMMON)
CONFIGS = {
    "llama": PLAIN,
    "llama with biases": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama with one embedding": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "mistral": MistralConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    "gemma2": Gemma2Config(**COMMON),
    "gemma3": Gemma3TextConfig(**COMMON),
}
# Layers without a window have fewer KV heads.
GEMMA4 = COMMON | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
}


class Exchange:
    """Collectives of ranks that run as threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._barrier = threading.Barrier(SIZE, timeout=30)
        self._sent: dict[int, Tensor] = {}
        self.here = threading.local()
        monkeypatch.setattr(tensor_parallel, "exchange", self)

    def __call__(self, collective: Any, *args: Any) -> None:
        self._sent[self.here.index] = args[-1].clone()
        self._barrier.wait()
        sent = [self._sent[index] for index in range(SIZE)]
        self._barrier.wait()
        if collective is torch.distributed.all_reduce:
            args[0].copy_(sum(sent))
        else:
            for part, other in zip(args[0], sent, strict=True):
                part.copy_(other)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_split_model_computes_what_the_whole_one_does(name, monkeypatch):
    token_ids = torch.arange(1, 20)[None]
    whole = random_model(CONFIGS[name])
    with torch.no_grad():
        expected = whole(token_ids, use_cache=False).logits
    exchange = Exchange(monkeypatch)
    models = [random_model(CONFIGS[name]) for _ in range(SIZE)]
    logits: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(index: int) -> None:
        exchange.here.index = index
        model = models[index]
        split_target(model, name, Rank(index, SIZE), CPU)
        merge_projections(find_projections(model, lambda: model(token_ids, use_cache=False)))
        logits[index] = model(token_ids, use_cache=False).logits

    threads = [threading.Thread(target=run, args=(index,)) for index in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(SIZE):
        torch.testing.assert_close(logits[index], expected, rtol=1e-4, atol=1e-4)
    layer = models[1].model.layers[0]
    attention = whole.model.layers[0].self_attn
    assert isinstance(layer.self_attn.q_proj, MergedProjection)
    parts = [getattr(attention, f"{part}_proj").weight.chunk(SIZE)[1] for part in "qkv"]
    assert torch.equal(layer.self_attn.q_proj.weight, torch.cat(parts))
    assert isinstance(layer.mlp.gate_proj, MergedProjection)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> VerifierOptions:
    """Options for a Llama of random weights on disk."""
    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    LlamaForCausalLM(PLAIN).save_pretrained(directory)
    return VerifierOptions(
        target=str(directory),
        device="cpu",
        max_num_seqs=8,
        max_prefill_rows=MAX_PREFILL_ROWS,
        kv_cache_tokens=2 * CONTEXT,
        speculative_config=f'{{"num_speculative_tokens": {K}}}',
        tensor_parallel_size=SIZE,
    )


@pytest.fixture(scope="module")
def workers(options) -> Iterator[Workers]:
    with Workers(options, CPU) as started:
        yield started
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def split(options, workers) -> Target:
    """Rank 0's part of the target. Rank 1's part is in its own process."""
    config = parse_speculative_config(options.speculative_config)
    return start_target(options, config, CPU, workers.rank)[0]


@pytest.fixture(scope="module")
def whole(options) -> Target:
    config = parse_speculative_config(options.speculative_config)
    return start_target(options, config, CPU)[0]


def test_ranks_have_their_own_heads_and_the_whole_vocabulary(whole, split):
    assert [heads for heads, _, _ in whole.layer_shapes] == [2] * NUM_LAYERS
    assert [heads for heads, _, _ in split.layer_shapes] == [1] * NUM_LAYERS
    assert split.vocab_size == whole.vocab_size == VOCAB
    assert split.fingerprint == whole.fingerprint


def test_features_and_logits_are_those_of_one_rank(whole, split, workers):
    rng = np.random.default_rng(0)
    steps = []
    # Steps that share cached rows; the first is longer than one message.
    for start, counts in ((0, (1500, 3)), (0, (0, 0, 5)), (0, (0, 2))):
        rows = [
            SequenceRows(range(1 + 100 * index, 101 + 100 * index), start, count)
            for index, count in enumerate(counts)
            if count
        ]
        total = sum(counts)
        positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
        steps.append(ForwardInput(rng.integers(0, VOCAB, total), positions, rows, np.arange(total)))
    steps.append(
        ForwardInput(
            rng.integers(0, VOCAB, 5),
            np.array([1500, 1501, 1502, 1503, 2]),
            [SequenceRows(range(1, 101), 1500, 4), SequenceRows(range(101, 201), 2, 1)],
            np.array([3, 4]),
        )
    )
    run_whole, run_split = (start_runner(one, 2 * CONTEXT // 16 + 1, 8, K, CONTEXT).run for one in (whole, split))
    run_split = workers.lead(run_split)
    for step in steps:
        expected, found = run_whole(step), run_split(step)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        layers = range(NUM_LAYERS + 1)
        torch.testing.assert_close(found.features(layers), expected.features(layers), rtol=1e-4, atol=1e-4)


PREFIX = [(3 * i + i * i) % VOCAB for i in range(40)]
PROMPTS = [*([*PREFIX, i, 2 * i] for i in range(4)), *([i, 7] for i in range(4))]


class Outputs(NamedTuple):
    """Output tokens and number of verified drafts per request, and the engine's counters."""

    tokens: list[list[int]]
    drafted: list[int]
    counters: generate_pb2.EngineCounters


def outputs(target: Target, workers: Workers | None = None) -> Outputs:
    """Return the outputs of eight requests in a cache too small for all: the first alone, then the others at once."""
    own = Served(target, workers=workers, num_blocks=14, max_prefill_rows=MAX_PREFILL_ROWS)
    own.connect([5, 6, 7])
    with own:
        requests = [own.submit(PROMPTS[0], max_tokens=40)]
        tokens = [own.tokens(requests[0])]
        requests += [own.submit(prompt, keys=100 * i, max_tokens=40) for i, prompt in enumerate(PROMPTS[1:], 1)]
        tokens += [own.tokens(request) for request in requests[1:]]
    return Outputs(tokens, [sum(request.drafted) for request in requests], own.engine.counters())


def check_outputs(expected: Outputs, found: Outputs) -> None:
    """Check that tokens are as expected, and that there were drafts, prefix reuse and preemptions."""
    assert found.tokens == expected.tokens
    assert len(set(map(tuple, found.tokens))) == len(PROMPTS)
    assert found.counters.preemptions > 0
    assert found.counters.prefix_hit_rows > 0
    assert min(found.drafted) > 0


def test_greedy_tokens_are_those_of_one_rank(whole, split, workers):
    check_outputs(outputs(whole), outputs(split, workers))


def outputs_of_both(options: VerifierOptions) -> tuple[Outputs, Outputs]:
    """Return the outputs of the whole target and of the split target."""
    config, device = parse_speculative_config(options.speculative_config), choose_device(options.device)
    expected = outputs(start_target(options, config, device)[0])
    with Workers(options, device) as workers:
        return expected, outputs(start_target(options, config, device, workers.rank)[0], workers)


def send_outputs_of_both(options: VerifierOptions, connection: Connection) -> None:
    """Send the outputs, and end this process by `os._exit` as `Workers.close` requires."""
    try:
        connection.send(outputs_of_both(options))
    finally:
        os._exit(0)


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
def test_greedy_tokens_of_two_gpus_are_those_of_one(options):
    """The ranks run in a new process: a process joins only one group, and must end after a group with GPUs."""
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    on_gpus = replace(options, device="cuda:0", dtype="float32")
    process = context.Process(target=send_outputs_of_both, args=(on_gpus, sent))
    process.start()
    sent.close()
    check_outputs(*received.recv())
    process.join()


def test_accepted_drafts_leave_the_right_rows_in_every_rank(whole, split, workers):
    alone = Served(whole)
    (expected,) = alone.run(alone.submit(PREFIX, max_tokens=30))
    own = Served(split, workers=workers)

    def continuation(step: pb.DraftStep) -> list[int]:
        """Return correct drafts, except at every third step."""
        _, first, rows = rows_of(step)[0]
        begin = first + rows + 1 - len(PREFIX)
        drafts = expected[begin : begin + K] + [0] * K
        return [drafts[0], 0, 0] if step.step_id % 3 == 0 else drafts[:K]

    own.connect_with(continuation)
    request = own.submit(PREFIX, max_tokens=30)
    assert own.run(request) == [expected]
    assert own.engine.counters().accepted_drafts > 10


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 4, "tensor_parallel_size = 4: must divide the target's num_key_value_heads = 2; allowed: 1, 2"),
        (
            {"hidden_size": 48, "num_attention_heads": 6},
            4,
            "num_key_value_heads = 2, num_attention_heads = 6; allowed: 1, 2",
        ),
        ({"intermediate_size": 25}, 2, "intermediate_size = 25"),
        ({}, 3, "allowed: 1, 2"),
    ],
)
def test_a_size_that_divides_not_every_part_is_refused(changes, size, message, tmp_path):
    LlamaConfig(**{**COMMON, **changes}, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match=message):
        main.run(VerifierOptions(target=str(tmp_path), device="cpu", tensor_parallel_size=size))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20), "no tensor-parallel plan for GPT2LMHeadModel"),
        (
            Phi3Config(**{**COMMON, "pad_token_id": 0}),
            r"splits model\.layers\.\*\.self_attn\.o_proj \(Linear\) as 'rowwise_split_input'",
        ),
        (MixtralConfig(**COMMON), "is not served; use --tensor-parallel-size 1"),
        (Gemma4TextConfig(**GEMMA4), "that layers do not have in common .* use --tensor-parallel-size 1"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(config, message):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(CheckpointError, match=message):
        split_target(model, "target", Rank(0, SIZE), torch.device("meta"))


@pytest.mark.parametrize("sent", [b"", (1000).to_bytes(4, "big") + b"half of an error"])
def test_a_worker_killed_while_it_says_why_has_no_last_words(sent):
    failures, own_end = multiprocessing.Pipe(duplex=False)
    os.write(own_end.fileno(), sent)
    own_end.close()
    assert last_words(failures) == ""


@pytest.mark.parametrize("option", ["async_scheduling", "engine_process"])
def test_options_that_a_split_target_cannot_have_are_refused(option, monkeypatch):
    monkeypatch.setattr(settings, "choose_device", torch.device)
    given = {option: option == "async_scheduling"}
    whole = VerifierOptions("t", device="cuda:0", **given)
    settings.check_options(whole)
    with pytest.raises(InvalidArgumentError, match=f"{option} = .*: allowed: with tensor_parallel_size = 1"):
        settings.check_options(replace(whole, tensor_parallel_size=2))


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert rank_device(torch.device("cuda", 1), Rank(1, 2)) == torch.device("cuda", 2)
    message = "tensor_parallel_size = 3: needs one GPU per rank from cuda:1 on; this machine has 2; allowed: 1 to 2"
    with pytest.raises(InvalidArgumentError, match=message):
        rank_device(torch.device("cuda", 1), Rank(0, 3))
