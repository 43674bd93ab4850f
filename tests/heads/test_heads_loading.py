"""Loading of EAGLE heads, and refusal of heads that cannot be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from head_checkpoints import CASES, DRAFT_VOCAB_SIZE, VOCAB_SIZE, inputs
from pairs import CPU, Config, Pair, Tensors
from safetensors.torch import load_file

from drafter_service.heads import Head
from draftwire.contract.errors import CheckpointError, MismatchError
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows


def states(head: Head, case: str = "eagle3") -> torch.Tensor:
    tokens, features = inputs(CASES[case])
    cache = KVCache(head.spec.layer_shapes, 2, torch.float32, CPU)
    batch = RaggedBatch([SequenceRows([1], 0, 4)], CPU)
    return head.forward(tokens[:4], head.fuse(features[:4]), torch.arange(4), cache, batch)


def test_spec_of_eagle3(make: Callable[..., Pair]) -> None:
    spec = make("speculators_options").load().spec
    assert (spec.method, spec.hidden_size, spec.feature_layers, spec.feature_width) == ("eagle3", 32, (1, 3, 5, 6), 128)
    assert (spec.target_vocab_size, spec.draft_vocab_size) == (VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    assert (spec.target_hidden_size, spec.target_num_layers, spec.max_position_embeddings) == (32, 8, 64)
    assert spec.layer_shapes == ((2, 16, 16), (2, 16, 16))


def test_spec_of_eagle1_reads_the_last_state_of_the_target(make: Callable[..., Pair]) -> None:
    head = make("eagle1").load()
    assert (head.spec.method, head.spec.feature_layers, head.spec.feature_width) == ("eagle", (8,), 32)
    assert head.draft_token_ids is None


def test_draft_ids_are_those_that_t2d_marks(make: Callable[..., Pair]) -> None:
    pair = make()
    marked = load_file(pair.head_dir / "model.safetensors")["t2d"].nonzero().flatten()
    ids = pair.load().draft_token_ids
    assert ids is not None
    assert ids.tolist() == marked.tolist()


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (1, 2, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [6, 1, 4]}, (1, 4, 6)),
    ],
    ids=["default", "top level", "eagle_config", "sorted"],
)
def test_feature_layers(make: Callable[..., Pair], config: Config, layers: tuple[int, ...]) -> None:
    pair = make()
    pair.change(**config)
    assert pair.load().spec.feature_layers == layers


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: name if name in ("lm_head.weight", "d2t", "t2d") else "model." + name,
        lambda name: "model." + name.replace("midlayer.", "layers.0."),
    ],
    ids=["layers.0", "model.midlayer", "model.layers.0"],
)
def test_names_that_vllm_accepts(make: Callable[..., Pair], rename: Callable[[str], str]) -> None:
    pair, other = make(), make(folder="other")

    def rename_all(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    pair.change_tensors(rename_all)
    assert torch.equal(states(pair.load()), states(other.load()))


def test_weights_in_a_bin_file(make: Callable[..., Pair]) -> None:
    pair, other = make(), make(folder="other")
    path = pair.head_dir / "model.safetensors"
    torch.save(load_file(path), pair.head_dir / "pytorch_model.bin")
    path.unlink()
    assert torch.equal(states(pair.load()), states(other.load()))


def test_rope_of_older_and_newer_configurations_is_the_same(make: Callable[..., Pair]) -> None:
    llama3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    older, newer, default = make(), make(folder="newer"), make(folder="default")
    older.change(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    newer.change(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert torch.equal(states(older.load()), states(newer.load()))
    assert not torch.equal(states(older.load()), states(default.load()))


def test_a_rope_parameter_of_null_counts_as_not_given(make: Callable[..., Pair]) -> None:
    plain, with_null = make(), make(folder="null")
    plain.change(rope_theta=5e5)
    with_null.change(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": None})
    assert torch.equal(states(plain.load()), states(with_null.load()))


def test_embedding_and_output_of_the_target(make: Callable[..., Pair]) -> None:
    """With equal vocabularies, lm_head may be the target's, or the target's embedding if it has no lm_head."""
    pair = make(replace(CASES["eagle3"], options={}))
    pair.change_tensors(lambda tensors: tensors.pop("lm_head.weight"))
    pair.change_tensors(lambda tensors: tensors.pop("lm_head.weight"), "target")
    head = pair.load()
    embedding = load_file(pair.target_dir / "model.safetensors")["model.embed_tokens.weight"]
    norm = load_file(pair.head_dir / "model.safetensors")["norm.weight"]
    out = states(head)
    normed = torch.nn.functional.rms_norm(out, (32,), norm, 1e-5)
    torch.testing.assert_close(head.logits(out), normed @ embedding.T)


def test_fc_bias_follows_the_checkpoint_if_the_config_is_silent(make: Callable[..., Pair]) -> None:
    for folder, case in (("with", "eagle1_biases"), ("without", "eagle1")):
        pair = make(case, folder)
        expected = states(pair.load(), case)
        pair.change(bias=...)
        assert torch.equal(states(pair.load(), case), expected)


@pytest.mark.parametrize("case", ["speculators_eagle3", "speculators_eagle1"])
def test_kind_of_a_speculators_head_from_its_architecture(make: Callable[..., Pair], case: str) -> None:
    pair = make(case)
    expected = pair.load().spec
    pair.change(speculators_model_type=...)
    assert pair.load().spec == expected


def test_speculators_eagle1_has_one_layer_of_its_targets_config(make: Callable[..., Pair]) -> None:
    pair = make("speculators_eagle1")
    pair.change_layer(num_hidden_layers=8)
    assert len(pair.load().spec.layer_shapes) == 1


def test_fingerprint_changes_with_weights_and_config(make: Callable[..., Pair]) -> None:
    pair = make()
    before = pair.load().fingerprint
    assert pair.load().fingerprint == before
    pair.change_tensors(lambda tensors: tensors["fc.weight"].mul_(2))
    weights_changed = pair.load().fingerprint
    pair.change(rms_norm_eps=1e-6)
    assert len({before, weights_changed, pair.load().fingerprint}) == 3


def test_half_precision_head_gives_half_precision_states(make: Callable[..., Pair]) -> None:
    pair = make()
    head, exact = pair.load(torch.bfloat16), pair.load()
    tokens, features = inputs(CASES["eagle3"])
    cache = KVCache(head.spec.layer_shapes, 2, torch.bfloat16, CPU)
    batch = RaggedBatch([SequenceRows([1], 0, 4)], CPU)
    out = head.forward(tokens[:4], head.fuse(features[:4].bfloat16()), torch.arange(4), cache, batch)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), states(exact), rtol=0.05, atol=0.05)


def test_dummy_weights_need_no_checkpoint(make: Callable[..., Pair]) -> None:
    for case in CASES:
        pair = make(case, case)
        expected = pair.load()
        for directory in (pair.head_dir, pair.target_dir):
            (directory / "model.safetensors").unlink()
        head = pair.load(dummy=True)
        assert head.spec == expected.spec
        assert head.logits(states(head, case)).shape == (4, head.spec.draft_vocab_size)
        assert (head.draft_token_ids is None) == (expected.draft_token_ids is None)
        assert torch.equal(states(head, case), states(pair.load(dummy=True), case))
        assert head.fingerprint != pair.load(dummy=True, seed=1).fingerprint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"hidden_size": "32"}, "hidden_size = '32': must be a positive integer"),
        ({"num_attention_heads": ...}, "lacks num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps = 'tiny'"),
        ({"attention_bias": 1}, "attention_bias = 1: must be true or false"),
        ({"is_causal": False}, "is_causal = False is not supported; must be True or absent"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 is not supported; must be 1.0 or absent"),
        ({"parallel_drafting": True}, "lacks mask_token_id"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights quantised by .fp8. .* are not served"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False is not supported"),
        ({"eagle_config": {"return_hidden_post_norm": True}}, "return_hidden_post_norm = True is not supported"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, r"\[2, 4, 4\]: must not name a layer twice"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, r"\[2, 4, 8\]: must be layers of the target, 0\.\.7"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 4, 5]}, r"\[-1, 4, 5\]: must be layers of the target, 0\.\.7"),
        ({"eagle_aux_hidden_state_layer_ids": [2.0, 4, 5]}, r"\[2.0, 4, 5\]: must be layers of the target"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states = 2, but"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic' is not supported; supported are"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "'llama3' with low_freq_factor = None: must be a positive number",
        ),
        ({"rope_theta": "1e6"}, "rope_theta = '1e6': must be a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "must be one set of parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"layer_types": ["chunked_attention"]}, "layer_types = .*: must be full_attention or sliding_attention"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 is more than vocab_size 64"),
        # Falsy values count as given.
        ({"eagle_config": []}, r"eagle_config must be an object, not \[\]"),
        ({"layer_types": []}, r"layer_types = \[\]: must be full_attention or sliding_attention"),
        ({"eagle_aux_hidden_state_layer_ids": 0}, "eagle_aux_hidden_state_layer_ids = 0: must be layers of the target"),
        ({"rope_scaling": []}, r"rope_parameters = \[\]: must be one set of parameters"),
        ({"rope_scaling": {"rope_type": ""}}, "rope_type = '' is not supported"),
        ({"rope_parameters": {}, "rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic' is not supported"),
        ({"rope_theta": 0}, "rope_theta = 0: must be a positive number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 0},
            "original_max_position_embeddings = 0: must be a positive number",
        ),
    ],
)
def test_refused_options(make: Callable[..., Pair], config: Config, message: str) -> None:
    pair = make()
    pair.change(**config)
    with pytest.raises(CheckpointError, match=message):
        pair.load()


@pytest.mark.parametrize(
    ("case", "config", "layer", "message"),
    [
        ("speculators_eagle3", {"speculators_model_type": "mtp"}, {}, "speculators_model_type = 'mtp'"),
        ("speculators_eagle3", {"speculators_model_type": ..., "architectures": ["X"]}, {}, "must be eagle, eagle3"),
        ("speculators_eagle3", {}, {"model_type": "gpt_oss"}, "transformer_layer_config.model_type = 'gpt_oss'"),
        ("speculators_eagle3", {}, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("speculators_window", {}, {"use_sliding_window": False}, "use_sliding_window = False, but layer_types = "),
        ("speculators_eagle1", {"layernorms": True}, {}, "layernorms = True is not supported"),
    ],
)
def test_refused_options_of_speculators(
    make: Callable[..., Pair], case: str, config: Config, layer: Config, message: str
) -> None:
    pair = make(case)
    pair.change(**config)
    pair.change_layer(**layer)
    with pytest.raises(CheckpointError, match=message):
        pair.load()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 65}, "target of vocab_size 64, but .*config.json has 65"),
        ({"hidden_size": 48}, "target of hidden_size 32, but .*config.json has 48"),
    ],
)
@pytest.mark.parametrize("case", ["eagle3", "eagle1", "speculators_eagle3"])
def test_a_head_of_another_target(make: Callable[..., Pair], case: str, config: Config, message: str) -> None:
    pair = make(case)
    pair.change("target", **config)
    with pytest.raises(MismatchError, match=message):
        pair.load()


def test_a_head_that_names_its_targets_depth(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.change(num_target_layers=8)
    pair.load()
    pair.change(num_target_layers=36)
    with pytest.raises(MismatchError, match=r"target of num_hidden_layers 36, but .*config.json has 8"):
        pair.load()


def test_too_few_target_layers_for_the_default_features(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.change("target", num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"the default of eagle_aux.*_ids = \[2, 2, 2\]: must not name"):
        pair.load()


def test_a_target_without_what_the_head_shares(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.pop("model.embed_tokens.weight"), "target")
    with pytest.raises(MismatchError, match=r"neither .* nor its target .* has embed_tokens.weight"):
        pair.load()


def test_a_target_whose_embedding_has_another_shape(make: Callable[..., Pair]) -> None:
    pair = make(replace(CASES["eagle3_wide_target"], own_embedding=False))
    with pytest.raises(MismatchError, match=r"needs one of shape \[64, 32\], but .* has shape \[64, 48\]"):
        pair.load()


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "midlayer.self_attn.k_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.hidden_norm.weight",
    ],
)
def test_missing_tensors(make: Callable[..., Pair], name: str) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name.replace("midlayer", r"layers\.0") + "|tensor d2t is missing"):
        pair.load()


def test_missing_bias(make: Callable[..., Pair]) -> None:
    pair = make("eagle1")
    pair.change(bias=True)
    with pytest.raises(CheckpointError, match=r"lack the tensor fc.bias, shape \[32\]"):
        pair.load()


@pytest.mark.parametrize(
    "name",
    [
        "fc.bias",
        "mask_hidden",
        "midlayer.self_attn.q_norm.weight",
        "layers.1.mlp.up_proj.weight",
        "midlayer.self_attn.q_proj.bias",
    ],
)
def test_unexpected_tensors(make: Callable[..., Pair], name: str) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.update({name: torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=f"unexpected tensors {name}"):
        pair.load()


def test_one_tensor_under_two_names(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.update({"model.fc.weight": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=r"are the same part of the head, fc.weight"):
        pair.load()


def test_wrong_shapes_name_the_tensor_and_both_shapes(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.update({"midlayer.self_attn.k_proj.weight": torch.zeros(8, 64)}))
    message = r"midlayer.self_attn.k_proj.weight has shape \[8, 64\], but its config.json asks for \[16, 64\]"
    with pytest.raises(CheckpointError, match=message):
        pair.load()


def test_quantised_weights(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"the tensor fc.weight is I8, which is not served"):
        pair.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: d2t[:-1], r"d2t is torch.int64 \[23\], must be integers of shape \[24\]"),
        (lambda d2t: d2t.float(), r"d2t is torch.float32 \[24\], must be integers"),
        (lambda d2t: d2t + VOCAB_SIZE, r"gives draft id 0 the target id \d+, not in 0..63"),
        (lambda d2t: d2t - torch.arange(len(d2t)), "gives two draft ids the same target id|not in 0..63"),
        (lambda d2t: -torch.arange(len(d2t)), "gives two draft ids the same target id"),
    ],
    ids=["short", "floats", "out of range", "absolute ids", "all the same"],
)
def test_bad_draft_vocabularies(
    make: Callable[..., Pair], change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    pair = make()
    pair.change_tensors(lambda tensors: tensors.update({"d2t": change(tensors["d2t"]).contiguous()}))
    with pytest.raises(CheckpointError, match=message):
        pair.load()


def test_draft_vocabulary_that_only_renames(make: Callable[..., Pair]) -> None:
    pair = make(replace(CASES["eagle3"], options={}))
    pair.change_tensors(lambda tensors: tensors.update({"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64)}))
    assert pair.load().draft_token_ids is None
    swap = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    swap[:2] = torch.tensor([1, -1])
    pair.change_tensors(lambda tensors: tensors.update({"d2t": swap}))
    with pytest.raises(CheckpointError, match="renames tokens, but draft_vocab_size is vocab_size, 64"):
        pair.load()


def test_truncated_weights(make: Callable[..., Pair]) -> None:
    pair = make()
    path = pair.head_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors: is damaged or not a checkpoint"):
        pair.load()


def test_weights_that_cannot_be_opened(make: Callable[..., Pair]) -> None:
    pair = make()
    path = pair.head_dir / "model.safetensors"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read: Too many levels of symbolic links"):
        pair.load()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(make: Callable[..., Pair], name: str) -> None:
    pair = make()
    (pair.head_dir / name).unlink()
    with pytest.raises(CheckpointError, match=r"config.json|there are no weights"):
        pair.load()
