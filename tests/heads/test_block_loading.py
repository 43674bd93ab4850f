"""Loading of DFlash, DSpark and P-EAGLE heads, and refusal of heads that cannot be served."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from block_checkpoints import CASES, HIDDEN, VOCAB_SIZE, head_tensors
from pairs import CPU, Config, Pair

from drafter_service.heads import Head
from drafter_service.heads.block_config import BlockConfig, read_block_config
from drafter_service.heads.dflash import DFlashHead
from drafter_service.heads.layers import Span
from drafter_service.heads.reader import Reader
from draftwire.contract.errors import CheckpointError, MismatchError
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows

TARGET = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN}


def read(pair: Pair, num_layers: int = 8) -> BlockConfig:
    """Return the head's configuration for a target of `num_layers` layers."""
    return read_block_config(pair.config(), "head", Reader({**TARGET, "num_hidden_layers": num_layers}, "target"))


def block_states(head: Head) -> torch.Tensor:
    """Return the states of a block without context."""
    assert isinstance(head, DFlashHead)
    cache = KVCache(head.spec.layer_shapes, 2, torch.float32, CPU)
    size = head.spec.block_rows
    batch = RaggedBatch([SequenceRows([1], 0, size)], CPU)
    return head.forward(torch.tensor([3]), torch.arange(size), cache, batch)


@pytest.mark.parametrize(
    ("case", "method", "layers", "max_drafts"),
    [
        ("deepseek_dspark", "dspark", (2, 4, 6), 4),
        ("deepseek_dflash", "dflash", (2, 4, 6), 4),
        ("specforge_dflash", "dflash", (1, 5, 7), 3),
        ("specforge_dspark", "dspark", (1, 5, 7), 4),
        ("speculators_dflash", "dflash", (2, 4, 6), 3),
        ("speculators_windows_both_ways", "dspark", (2, 4, 6), 4),
        ("speculators_rnn_behind_the_anchor", "dspark", (2, 4, 6), 3),
        ("peagle", "peagle", (2, 4, 5), 16),
    ],
)
def test_spec(make: Callable[..., Pair], case: str, method: str, layers: tuple[int, ...], max_drafts: int) -> None:
    """`target_layer_ids` select the outputs of layers, `aux_hidden_state_layer_ids` the inputs."""
    spec = make(case).load().spec
    assert (spec.method, spec.feature_layers, spec.max_drafts) == (method, layers, max_drafts)
    assert (spec.target_num_layers, spec.feature_width) == (8, 3 * HIDDEN)


@pytest.mark.parametrize("case", CASES)
def test_random_weights_need_no_checkpoint(make: Callable[..., Pair], case: str) -> None:
    pair = make(case)
    (pair.head_dir / "model.safetensors").unlink()
    assert pair.load(dummy=True).spec == make(case, "other").load().spec


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        ({}, [Span(6), Span(causal=False)]),
        ({"causal": True}, [Span(6), Span()]),
        ({"causal": False}, [Span(6, causal=False), Span(causal=False)]),
        ({"is_causal": True}, [Span(6), Span()]),
        ({"layer_types": ["sliding_attention"] * 2}, [Span(6)] * 2),
        ({"layer_types": ["sliding_attention"] * 2, "use_swa": True}, [Span(6)] * 2),
        ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, [Span(6, causal=False)] * 2),
        ({"layer_types": ["full_attention"] * 2, "use_swa": True}, [Span(6, causal=False)] * 2),
        ({"layer_types": ..., "use_swa": True, "swa_window_size": 9}, [Span(9, causal=False)] * 2),
        ({"layer_types": ["full_attention"] * 2, "use_sliding_window": False}, [Span(causal=False)] * 2),
    ],
)
def test_what_layers_see(make: Callable[..., Pair], changes: Config, spans: list[Span]) -> None:
    pair = make("specforge_windows")
    pair.change(**changes)
    assert list(read(pair).spans) == spans


def test_what_layers_of_speculators_see(make: Callable[..., Pair]) -> None:
    """All rows of a block have the window of the anchor."""
    assert read(make("speculators_windows")).spans == (Span(7, causal=True, anchored=True), Span(causal=False))


def test_layers_that_specforge_takes_where_none_are_named(make: Callable[..., Pair]) -> None:
    pair = make("specforge_dflash")
    pair.change(target_layer_ids=...)
    assert read(pair).spec.feature_layers == (2, 6)


@pytest.mark.parametrize(
    ("case", "key", "layers"),
    [
        ("specforge_dflash", "target_layer_ids", r"\[1, 1\]: must not name a layer twice"),
        ("speculators_dflash", "aux_hidden_state_layer_ids", r"\[2, 2, 1\]: must not name a layer twice"),
    ],
)
def test_a_target_with_too_few_layers_for_those(make: Callable[..., Pair], case: str, key: str, layers: str) -> None:
    pair = make(case)
    pair.change(**{key: ..., "num_target_layers": 4})
    with pytest.raises(CheckpointError, match=f"the default of {key} = {layers}"):
        read(pair, 4)


@pytest.mark.parametrize("projector", ["dspark", "dflash"])
def test_the_projector_decides_what_the_anchor_predicts(make: Callable[..., Pair], projector: str) -> None:
    """`projector_type` may be in `dflash_config` or at the top level, like all keys of `dflash_config`."""
    inside, outside = make("specforge_dflash"), make("specforge_dflash", "outside")
    inside.change(dflash_config={**inside.config()["dflash_config"], "projector_type": projector})
    outside.change(projector_type=projector)
    assert read(inside).samples_anchor == read(outside).samples_anchor == (projector == "dspark")


def test_a_mask_embedding_of_its_own(make: Callable[..., Pair]) -> None:
    """A mask embedding, in the checkpoint or in the file that vLLM reads, replaces the mask token's embedding."""
    case = replace(CASES["specforge_dflash"], own_mask=True)
    as_tensor, as_file, without = make(case), make("specforge_dflash", "file"), make("specforge_dflash", "without")
    mask = head_tensors(case)["mask_embedding"]
    torch.save({"embedding": mask, "mask_token_id": 61}, as_file.head_dir / "mask_embedding.pt")
    assert torch.equal(block_states(as_tensor.load()), block_states(as_file.load()))
    assert not torch.allclose(block_states(as_tensor.load()), block_states(without.load()), atol=1e-2)
    assert as_file.load().fingerprint != without.load().fingerprint
    torch.save({"embedding": mask, "mask_token_id": 60}, as_file.head_dir / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"is of mask_token_id 60, config\.json has 61"):
        as_file.load()
    as_tensor.change(mask_token_id=...)
    block_states(as_tensor.load())
    without.change(mask_token_id=...)
    with pytest.raises(CheckpointError, match=r"neither a mask_token_id in its config\.json nor a mask"):
        without.load()


def test_names_of_older_checkpoints(make: Callable[..., Pair]) -> None:
    pair = make("specforge_dspark")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(("markov_head", "confidence_head"))]:
            tensors[f"logit_head.{name}"] = tensors.pop(name)

    pair.change_tensors(rename)
    assert pair.load().spec.method == "dspark"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek_dspark", {"expert_count": 8, "aux_loss": 1}, "unknown keys aux_loss, expert_count"),
        ("specforge_dflash", {"dflash_config": {"mask_token_id": 1, "emb_dim": 4}}, "unknown keys emb_dim"),
        ("speculators_dflash", {"draft_adapter_rank": 4}, "unknown keys draft_adapter_rank"),
        ("deepseek_dspark", {"architectures": ["Gemma4DSparkModel"]}, "architectures = .*Gemma4DSparkModel.* is not"),
        ("specforge_dflash", {"architectures": ["DominoDraftModel"]}, "DominoDraftModel.* is not supported"),
        ("specforge_dspark", {"projector_type": "domino"}, "projector_type = 'domino' is not supported; supported are"),
        ("specforge_dspark", {"projector_type": "dflash"}, "projector_type = 'dflash', but architectures name DSpark"),
        ("deepseek_dspark", {"projector_type": "dspark"}, "unknown keys projector_type"),
        ("specforge_dspark", {"attention_mode": "mla"}, "attention_mode = 'mla' is not supported; supported are gqa"),
        ("deepseek_dspark", {"rms_norm_eps": math.nan}, "rms_norm_eps = nan: must be a positive number"),
        ("deepseek_dspark", {"rope_theta": math.inf}, "rope_theta = inf: must be a positive number"),
        ("deepseek_dspark", {"markov_head_type": "lstm"}, "markov_head_type = 'lstm' is not supported"),
        ("deepseek_dspark", {"markov_rank": 0}, "confidence_head_with_markov = True needs markov_rank of at least 1"),
        ("deepseek_dspark", {"markov_rank": -1}, "markov_rank = -1: must be a positive integer"),
        ("deepseek_dspark", {"block_size": 33}, r"block_size = 33: allowed range \[1, 32\]"),
        ("specforge_dflash", {"block_size": 1}, r"block_size = 1: allowed range \[2, 32\]"),
        ("deepseek_dspark", {"block_size": ...}, "lacks block_size"),
        ("deepseek_dspark", {"mask_token_id": 64}, r"mask_token_id = 64: must be a token of the vocabulary, 0\.\.63"),
        ("deepseek_dspark", {"target_layer_ids": [1, 7]}, r"_ids = \[1, 7\]: must be layers of the target, -1\.\.6"),
        ("deepseek_dspark", {"target_layer_ids": [3, 1]}, r"target_layer_ids = \[3, 1\]: must be ascending"),
        ("speculators_dflash", {"aux_hidden_state_layer_ids": [2, 8]}, r"\[2, 8\]: must be layers .*, 0\.\.7"),
        ("deepseek_dspark", {"attention_sink_bias": True}, "attention_sink_bias = True is not supported"),
        ("deepseek_dspark", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ("specforge_dflash", {"shift_label": True}, "shift_label = True is not supported"),
        ("specforge_windows", {"use_sliding_window": False}, "use_sliding_window = False, but layer_types"),
        ("specforge_windows", {"sliding_window": ...}, "lacks sliding_window"),
        ("specforge_windows", {"causal": "both"}, "causal = 'both': must be true or false"),
        ("peagle", {"mask_token_id": ...}, "lacks mask_token_id"),
        ("peagle", {"mask_token_id": 64}, "mask_token_id = 64: must be a token of the vocabulary"),
    ],
)
def test_refused_options(make: Callable[..., Pair], case: str, changes: Config, message: str) -> None:
    pair = make(case)
    pair.change(**changes)
    with pytest.raises(CheckpointError, match=message):
        pair.load()


def test_unknown_keys_of_an_eagle_head_are_logged(
    make: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown keys are not refused, because the configuration is often a copy of the target's."""
    pair = make("peagle")
    pair.load()
    assert not caplog.messages
    pair.change(router_bias=True, use_moe=False)
    pair.load()
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "unknown keys router_bias, use_moe have no effect"
    ]


@pytest.mark.parametrize("case", ["deepseek_dspark", "specforge_dflash", "speculators_dflash", "peagle"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 65, "target of vocab_size 64, but .*config.json has 65"),
        ("hidden_size", 48, "target of hidden_size 32, but .*config.json has 48"),
        ("num_hidden_layers", 9, "target of num_hidden_layers 8, but .*config.json has 9"),
    ],
)
def test_a_head_of_another_target(make: Callable[..., Pair], case: str, key: str, value: int, message: str) -> None:
    pair = make(case)
    pair.change("target", **{key: value})
    if key == "num_hidden_layers" and case not in ("deepseek_dspark", "specforge_dflash"):
        assert pair.load().spec.target_num_layers == 9  # the head's configuration has no number of layers
        return
    with pytest.raises(MismatchError, match=message):
        pair.load()


@pytest.mark.parametrize(
    "name",
    [
        "hidden_norm.weight",
        "layers.1.self_attn.k_norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.gate_proj.bias",
        "confidence_head.proj.weight",
    ],
)
def test_a_missing_tensor_is_named(make: Callable[..., Pair], name: str) -> None:
    pair = make("deepseek_gated")
    pair.change_tensors(lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"the weights lack the tensor {name}"):
        pair.load()


def test_tensors_without_a_place_are_named(make: Callable[..., Pair]) -> None:
    pair = make("deepseek_dflash")
    pair.change_tensors(lambda tensors: tensors.update({"markov_head.markov_w1.weight": torch.zeros(64, 8)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensors markov_head\.markov_w1\.weight"):
        pair.load()


def test_a_reduced_vocabulary_needs_an_lm_head_of_its_own(make: Callable[..., Pair]) -> None:
    pair = make("speculators_dflash")
    pair.change_tensors(lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"the weights lack the tensor lm_head\.weight"):
        pair.load()
