"""The training-side Llama is transformers' Llama, and its exported directory loads there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from draftwire.contract.errors import CheckpointError
from training.export import bf16_exact, export_target
from training.generate import continuations
from training.llama import Llama, LlamaShape, load_llama

SHAPE = LlamaShape(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)


@pytest.fixture
def pair(tmp_path):
    torch.manual_seed(0)
    model = Llama(SHAPE).eval()
    for weight in model.parameters():
        weight.data *= 1 + torch.rand_like(weight)
    bf16_exact(model)
    export_target(model, tmp_path, end=0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    return load_llama(tmp_path, "cpu"), reference


@torch.no_grad()
def test_states_and_logits_are_those_of_transformers(pair):
    model, reference = pair
    tokens = torch.randint(97, (2, 40))
    expected = reference(tokens, output_hidden_states=True)
    states = model.states(tokens)
    torch.testing.assert_close(model.logits_of(states[-1]), expected.logits, rtol=1e-4, atol=1e-5)
    for layer in range(3):
        torch.testing.assert_close(states[layer], expected.hidden_states[layer], rtol=1e-4, atol=1e-5)


def test_greedy_continuations_are_those_of_transformers(pair):
    model, reference = pair
    prompts = torch.randint(1, 97, (3, 10))
    expected = reference.generate(prompts, max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(continuations(model, prompts, 20, 0.0), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2' is not computed here; must be 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type = 'llama3' (rope_parameters)"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear' (rope_scaling)"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not computed here"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False: an untied lm_head.weight"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings = None"),
        ({"vocab_size": 65537}, "vocab_size = 65537: token ids are 16 bits here, so at most 65536"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_a_config_that_is_not_computed_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    change_config(exported(tmp_path), changes)
    with pytest.raises(CheckpointError) as caught:
        load_llama(tmp_path, "cpu")
    assert message in str(caught.value)


def test_sizes_that_a_config_leaves_out_are_transformers(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("head_dim", "rms_norm_eps", "rope_theta", "rope_parameters"))
    change_config(exported(tmp_path), left_out)
    shape = load_llama(tmp_path, "cpu").shape
    assert (shape.head_dim, shape.rms_norm_eps, shape.rope_theta) == (128 // 4, 1e-6, 10000.0)


def test_an_output_layer_of_its_own_is_refused(tmp_path: Path) -> None:
    file = only_file(exported(tmp_path))
    weights = load_file(file)
    tied = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": tied.clone()}, file)
    load_llama(tmp_path, "cpu")
    save_file({**weights, "lm_head.weight": tied + 1}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding"):
        load_llama(tmp_path, "cpu")


def test_quantised_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    file = only_file(exported(tmp_path))
    weights = load_file(file)
    save_file({**weights, "model.norm.weight": torch.ones(128, dtype=torch.int8)}, file)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is torch\.int8"):
        load_llama(tmp_path, "cpu")
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": torch.ones(128)}, file)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load_llama(tmp_path, "cpu")


def exported(directory: Path) -> Path:
    """The directory with a small model in it."""
    export_target(Llama(SHAPE), directory, end=0)
    return directory


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def only_file(directory: Path) -> Path:
    (file,) = directory.glob("*.safetensors")
    return file
