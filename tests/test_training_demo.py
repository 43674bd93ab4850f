"""The shipped test pair: small enough, loadable, and in the layouts that other engines read."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

DEMO = Path(__file__).resolve().parent.parent / "models" / "demo"
PARTS = ("target", "eagle3", "dspark")


def shapes_of(part):
    with safe_open(DEMO / part / "model.safetensors", "pt") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118


def config_of(part):
    return json.loads((DEMO / part / "config.json").read_text())


def test_all_directories_stay_within_8_megabytes():
    assert sum(file.stat().st_size for part in PARTS for file in (DEMO / part).iterdir()) <= 8_000_000


def test_the_target_loads_in_transformers_with_tied_embeddings():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "target")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.num_hidden_layers == 4


def test_the_eagle3_head_has_the_published_layout():
    config, shapes = config_of("eagle3"), shapes_of("eagle3")
    hidden = config["hidden_size"]
    assert shapes["fc.weight"] == (hidden, 3 * hidden)
    assert shapes["midlayer.self_attn.q_proj.weight"][1] == 2 * hidden
    assert not {"lm_head.weight", "d2t", "t2d"} & set(shapes)  # the head uses the target's whole vocabulary and lm_head
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_the_dspark_head_has_the_published_layout():
    config, shapes = config_of("dspark"), shapes_of("dspark")
    hidden = config["hidden_size"]
    assert shapes["fc.weight"] == (hidden, len(config["target_layer_ids"]) * hidden)
    assert {name.split(".")[0] for name in shapes} >= {"markov_head", "confidence_head", "layers"}
    assert (config["block_size"], config["markov_head_type"]) == (7, "rnn")
