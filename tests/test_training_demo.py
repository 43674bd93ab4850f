"""The shipped pair: small enough, loadable, and in the layouts that other engines read."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

DEMO = Path(__file__).resolve().parent.parent / "models" / "demo"
HEAD = DEMO / "head" / "model.safetensors"

pytestmark = pytest.mark.skipif(not HEAD.exists(), reason="models/demo is not in this checkout")


def test_both_directories_stay_within_32_megabytes():
    files = [file for part in ("target", "head") for file in (DEMO / part).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 32_000_000
    assert max(file.stat().st_size for file in files) <= 15 * 2**20


def test_the_target_loads_in_transformers_with_tied_embeddings():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "target")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.num_hidden_layers == 8


def test_the_head_has_the_published_layout():
    config = json.loads((DEMO / "head" / "config.json").read_text())
    hidden, draft = config["hidden_size"], config["draft_vocab_size"]
    with safe_open(HEAD, "pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        d2t, t2d = weights.get_tensor("d2t"), weights.get_tensor("t2d")
    assert shapes["fc.weight"] == (hidden, 3 * hidden)
    assert shapes["midlayer.self_attn.q_proj.weight"][1] == 2 * hidden
    assert shapes["lm_head.weight"] == (draft, hidden)
    ids = [row + offset for row, offset in enumerate(d2t.tolist())]
    assert ids == t2d.nonzero().flatten().tolist()
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
