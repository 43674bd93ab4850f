"""Targets: logits and features against transformers' models, refusals at load, and compiled code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    T5Config,
)

from draftwire.contract.errors import CheckpointError
from draftwire.model.block_pool import BlockPool, blocks_for
from draftwire.model.kv_cache import KVCache, SequenceRows
from draftwire_bench.served_targets import LATENT_SIZES
from verifier_service.cli import verifier
from verifier_service.core.batch import ForwardInput
from verifier_service.target.compile_cache import use_compile_cache
from verifier_service.target.runner import TargetRunner
from verifier_service.target.target import Target, has_experts, load_target

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
NUM_LAYERS = 4
CONTEXT = 128
TOLERANCE = {"rtol": 1e-4, "atol": 5e-5}

COMMON: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Keys of 24 elements and values of 12, both made from one latent of 16; experts after the first layer.
LATENT = LATENT_SIZES | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
# The window is off for attention, but not for the mask.
WINDOWS = {"use_sliding_window": False, "sliding_window": 6, "layer_types": NUM_LAYERS * ["sliding_attention"]}
GEMMA3N = {"head_dim": 16, "num_kv_shared_layers": 0, "laurel_rank": 4, "hidden_size_per_layer_input": 8}
GEMMA3N |= {"vocab_size_per_layer_input": 90, "activation_sparsity_pattern": None}
GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90, "sliding_window": 6}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "llama_llama3_rope": LlamaConfig(**COMMON, rope_parameters=LLAMA3, head_dim=16),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "mistral_window": MistralConfig(**COMMON, sliding_window=6),
    "gemma2": Gemma2Config(**COMMON, head_dim=16, sliding_window=6, attn_logit_softcapping=3.0),
    "gemma3_text": Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=6),
    "qwen3_128": Qwen3Config(**COMMON, head_dim=128),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(**{**COMMON, **LATENT}),
    "gemma4_text": Gemma4TextConfig(**COMMON, **GEMMA4, head_dim=16, global_head_dim=32),
    "gemma2_256": Gemma2Config(**COMMON, head_dim=256, sliding_window=6, attn_logit_softcapping=3.0),
}

EXPERTS = {"mixtral", "deepseek_v3"}


@pytest.fixture
def fresh_compiler() -> None:
    """Drop the compiled code of earlier models: torch accepts at most eight models per process."""
    torch.compiler.reset()


def save(config: Any, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def load(directory: Path, device: torch.device = CPU, **options: Any) -> Target:
    return load_target(directory, directory.name, torch.float32, device, **options)


class Served:
    """A target with a cache, and sequences that run in pieces."""

    def __init__(self, target: Target, lengths: list[int]) -> None:
        self.target = target
        generator = torch.Generator().manual_seed(5)
        self.tokens = [torch.randint(3, target.vocab_size, (length,), generator=generator) for length in lengths]
        pool = BlockPool(40)
        cache = KVCache(target.layer_shapes, 40, target.dtype, target.device)
        self._runner = TargetRunner(target, cache, 3, 8, CONTEXT, blocks_for(CONTEXT))
        self._runner.capture()
        self._blocks = [pool.allocate(blocks_for(length)) or [] for length in lengths]

    def step(self, pieces: list[tuple[int, int, int]], layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and features of rows start .. start + count - 1 of each (sequence, start, count)."""
        step = ForwardInput(
            np.concatenate([self.tokens[i][start : start + count] for i, start, count in pieces]),
            np.concatenate([np.arange(start, start + count) for _, start, count in pieces]),
            [SequenceRows(self._blocks[i], start, count) for i, start, count in pieces],
            np.arange(sum(count for _, _, count in pieces)),
        )
        output = self._runner.run(step)
        return output.logits.cpu(), output.features(layers).cpu()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("fresh_compiler")
@torch.inference_mode()
def test_logits_and_features_are_those_of_transformers(name, device, tmp_path):
    """On a GPU the model is compiled and runs as CUDA graphs."""
    directory = save(CONFIGS[name], tmp_path / name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert has_experts(model) == (name in EXPERTS)
    target = load(directory, device)
    if device.type == "cuda" and name in EXPERTS:
        with pytest.raises(CheckpointError, match="models with experts are served on a GPU only in bfloat16"):
            target.compile()
        return
    if device.type == "cuda":
        target.compile()
    served = Served(target, [30, 9, 21])
    layers = [0, 1, 3, NUM_LAYERS]
    expected = [model(tokens[None], output_hidden_states=True, use_cache=False) for tokens in served.tokens]
    states = [torch.cat([out.hidden_states[layer][0] for layer in layers], -1) for out in expected]
    steps = [
        [(0, 0, 12), (1, 0, 9)],
        [(2, 0, 20), (0, 12, 1)],
        [(0, 13, 8), (2, 20, 1)],  # rows from 16 on are rejected drafts, which run again
        [(0, 16, 14)],
    ]
    for pieces in steps:
        logits, features = served.step(pieces, layers)
        wanted_logits = torch.cat([expected[i].logits[0, start : start + count] for i, start, count in pieces])
        wanted_features = torch.cat([states[i][start : start + count] for i, start, count in pieces])
        torch.testing.assert_close(logits, wanted_logits, **TOLERANCE)
        torch.testing.assert_close(features, wanted_features, **TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("fresh_compiler")
def test_forward_pass_is_compiled_once_for_steps_of_any_size(name, tmp_path):
    directory = save(CONFIGS[name], tmp_path / name)
    eager, compiled = (Served(load(directory), [30, 9, 21]) for _ in range(2))
    compiled.target.compile(backend="eager")  # tracing and guards only
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pieces in ([(0, 0, 16)], [(1, 0, 9), (2, 0, 20)], [(0, 16, 1), (2, 20, 1)], [(0, 17, 8), (1, 4, 2)]):
            for output, expected in zip(compiled.step(pieces, [1, 3]), eager.step(pieces, [1, 3]), strict=True):
                torch.testing.assert_close(output, expected, **TOLERANCE)


def test_dummy_weights_need_no_checkpoint_and_are_finite(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    logits, _ = Served(load(tmp_path, dummy=True), [8]).step([(0, 0, 8)], [1])
    assert torch.isfinite(logits).all()


def rope(kind: str) -> dict[str, Any]:
    factors = {"long_factor": [1.0] * 6, "short_factor": [1.0] * 6} if kind == "longrope" else {}
    return {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        **factors,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "encoder-decoder models are not served"),
        (MambaConfig(), "not served|has no causal language model"),
        (LlamaConfig(**COMMON, rope_parameters=rope("dynamic")), "rotary type 'dynamic' is not served"),
        (LlamaConfig(**COMMON, rope_parameters=rope("longrope")), "rotary type 'longrope' is not served"),
        (Llama4TextConfig(**COMMON), "layers of type chunked_attention are not served"),
        (Gemma3TextConfig(**COMMON, use_bidirectional_attention=True), "attention of Gemma3Attention .* is not causal"),
        (NemotronConfig(**COMMON, is_causal=False), "attention is not causal"),
        (SmolLM3Config(**COMMON, **WINDOWS), "window of layer 0 is None to its attention and 6 by its config"),
        (Gemma3nTextConfig(**COMMON, **GEMMA3N), "do not take one state of 48 elements per row"),
        (GptOssConfig(**COMMON, num_local_experts=2), "attention of GptOssAttention is not served: it needs s_aux$"),
        (PhimoeConfig(**COMMON, sliding_window=6, num_local_experts=2), "served up to max_model_len = 6"),
        (OlmoeConfig(**COMMON, sliding_window=6, num_experts=8), "is 6 to its attention and None by its config"),
        (MistralConfig(**COMMON, sliding_window=-1), "window: got -1, expected at least 1 position"),
        (Gemma2Config(**COMMON, attn_logit_softcapping=-1.0), "softcap: got -1.0, expected a number above 0"),
        (GPT2Config(), "its layers are not laid out as `layers` and `norm`"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_models_that_cannot_be_served_exactly_are_refused(config, message, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, dummy=True)


def test_a_window_short_of_attention_is_served_up_to_its_length(tmp_path):
    config = PhimoeConfig(**COMMON, sliding_window=12, num_local_experts=2)
    served = Served(load(save(config, tmp_path / "phimoe"), max_model_len=12), [12])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "phimoe", attn_implementation="eager")
    with torch.inference_mode():
        expected = model.eval()(served.tokens[0][None], use_cache=False).logits[0]
    torch.testing.assert_close(served.step([(0, 0, 12)], [1])[0], expected, **TOLERANCE)


@pytest.mark.gpu
def test_heads_beyond_the_kernels_are_refused_at_load(tmp_path):
    LlamaConfig(**COMMON, head_dim=320).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="got heads of 320 elements, expected at most 256"):
        load(tmp_path, torch.device("cuda", 0), dummy=True)


def test_checkpoints_that_are_missing_or_wrong_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        load(tmp_path)
    directory = save(CONFIGS["llama"], tmp_path / "llama")
    with pytest.raises(CheckpointError, match=f"max_model_len = {CONTEXT + 1}"):
        load(directory, max_model_len=CONTEXT + 1)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS + 1}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=re.escape(f"model.layers.{NUM_LAYERS}")):
        load(directory)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(directory)


VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Inductor generates no kernel for a matrix product, so no C++ compiler is needed.
COMPILE = """
import sys
import torch
from torch._dynamo.utils import counters
from verifier_service.target.compile_cache import use_compile_cache

use_compile_cache(sys.argv[1])
torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""
START = """
import os
from verifier_service.host.target_start import use_compile_cache

use_compile_cache()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def output_of(code: str, *arguments: str, **variables: str) -> str:
    """Return the output of a Python process with these environment variables and without VARIABLE."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        ("/option", {"XDG_CACHE_HOME": "/cache"}, "/option"),
        (None, {"XDG_CACHE_HOME": "/cache"}, "/cache/draftwire/compile"),
        (None, {}, "/home/user/.cache/draftwire/compile"),
        (None, {VARIABLE: "/set/by/torch", "XDG_CACHE_HOME": ""}, "/home/user/.cache/draftwire/compile"),
    ],
    ids=["option", "user's cache directory", "home", "torch's own place"],
)
def test_the_option_goes_before_the_users_cache_directory(
    option: str | None, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/home/user", **environment})
    use_compile_cache(option)
    assert os.environ[VARIABLE] == expected


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([], None, None),
        ([], "", None),
        ([], "/torch", "/torch"),
        (["--compile-cache", "/option"], "/torch", "/option"),
    ],
)
def test_torchs_variable_is_the_options_default(
    arguments: list[str], variable: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, variable)
    context = verifier.make_context("verifier", ["--target", "any", *arguments])
    assert context.params["compile_cache"] == expected


def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    assert output_of(COMPILE, str(tmp_path)) == "1 0"  # misses, hits
    assert output_of(COMPILE, str(tmp_path)) == "0 1"


def test_a_start_without_settings_compiles_into_the_users_cache(tmp_path: Path) -> None:
    """Settings that torch and transformers make at import do not matter."""
    assert output_of(START, XDG_CACHE_HOME=str(tmp_path)) == str(tmp_path / "draftwire" / "compile")
