"""The configuration of an EAGLE head, from any published layout, checked against its target.

Sources: SafeAILab/EAGLE (model/cnets.py, model/cnets1.py, model/ea_model.py), vLLM (models/llama_eagle3.py) for the
keys of `eagle_config`, and the library `speculators` (models/eagle3/config.py, models/eagle.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from drafter_service.heads.layers import LayerConfig
from drafter_service.heads.reader import (
    Reader,
    architectures,
    check_target,
    layer_kinds,
    read_layer_config,
    speculators_layer_values,
)
from drafter_service.heads.rope import RopeConfig, read_rope
from drafter_service.heads.spec import HeadSpec, Method
from draftwire.contract.errors import CheckpointError

logger = logging.getLogger(__name__)

# Options that change the head's arithmetic and are not implemented: refused when they differ from this value.
_REFUSED = {
    "eh_proj_before_attn": False,  # TensorRT-LLM
    "return_hidden_post_norm": False,  # TensorRT-LLM's norm_output
    "logit_scale": 1.0,
    "is_causal": True,  # vLLM
    "kv_lora_rank": None,  # latent attention
    "layernorms": False,  # speculators EAGLE: norms around the fusion
}
_SPECULATORS_KINDS: dict[str, Method] = {
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "EagleSpeculator": "eagle",
    "PEagleSpeculator": "peagle",
    "PEagleDraftModel": "peagle",
}
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # of speculators, and of vLLM
MAX_PARALLEL_DRAFTS = 16


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE head's arithmetic, in any layout.

    Attributes:
        windows: Size of each layer's sliding window, None for full attention.
        fc_bias: Whether the first projection has a bias; None if only the checkpoint defines this.
        norm_before_residual: EAGLE-3: the first layer's residual is the normed g.
        norm_before_fc, fc_norm: EAGLE-3: one norm over all features, or one for each feature layer.
        norm_output: EAGLE-3.1: the next g is the output of the final norm.
        mask_token_id: P-EAGLE: the token of rows whose token is unknown.
    """

    spec: HeadSpec
    layer: LayerConfig
    rope: RopeConfig
    windows: tuple[int | None, ...]
    fc_bias: bool | None = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int = 0


def read_eagle_config(
    raw: Mapping[str, Any], where: str, target: Reader, tensor_names: Collection[str] = ()
) -> EagleConfig:
    """Read and check the configuration of an EAGLE or P-EAGLE head.

    Args:
        raw, where: config.json of the head, and its name in errors.
        target: Configuration of the target.
        tensor_names: Canonical names of the checkpoint's tensors, which distinguish EAGLE-3 from EAGLE-1 if the
            configuration does not.

    Raises:
        CheckpointError: If the configuration is malformed or asks for something that is not supported.
        MismatchError: If the head was made for another target.
    """
    head = Reader(raw, where, nested="eagle_config")
    kind = _speculators_kind(raw, where)
    is_qwen3, layer = False, Reader(raw, where)
    if kind is not None:
        values = speculators_layer_values(raw, "llama" if kind == "eagle" else "qwen3", where)  # the library's defaults
        is_qwen3 = values["model_type"] == "qwen3"
        # EagleSpeculator has one layer, although the configuration, often a copy of the target's, may say more.
        one_layer = {"num_hidden_layers": 1, "layer_types": None} if kind == "eagle" else {}
        layer = Reader(values | one_layer, where)
    for key, allowed in _REFUSED.items():
        head.refuse(key, allowed)
        layer.refuse(key, allowed)
    layer.refuse("hidden_act", "silu")
    method = kind or _published_method(head, tensor_names)
    layer_config = read_layer_config(layer, qwen3=is_qwen3, qwen3_defaults=is_qwen3)
    rope = read_rope(layer.values, layer_config.head_dim, layer.integer("max_position_embeddings", 2048), where)
    kinds = layer_kinds(layer)
    if "sliding_attention" in kinds and not layer.flag("use_sliding_window", True):
        raise CheckpointError(f"{where}: use_sliding_window = False, but layer_types = {kinds!r}")
    windows = tuple(layer.integer("sliding_window") if one == "sliding_attention" else None for one in kinds)
    spec = _spec(method, head, layer, layer_config, rope, len(windows), target)
    if method == "eagle":
        fc_bias = _published_fc_bias(head) if kind is None else head.flag("fusion_bias")
        _warn_of_unknown_keys(head, layer, is_one=kind is None)
        return EagleConfig(spec, layer_config, rope, windows, fc_bias=fc_bias)
    flags = {name: head.flag(name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other, both are true")
    mask_token_id = 0
    if method == "peagle":
        key = next((key for key in _MASK_KEYS if head.get(key) is not None), _MASK_KEYS[0])
        mask_token_id = head.token(key, spec.target_vocab_size)
    _warn_of_unknown_keys(head, layer, is_one=kind is None)
    return EagleConfig(spec, layer_config, rope, windows, mask_token_id=mask_token_id, **flags)


def _warn_of_unknown_keys(head: Reader, layer: Reader, *, is_one: bool) -> None:
    """Log the keys that were not read; with `is_one` both readers have the same configuration.

    Configurations of EAGLE heads are often copies of their target's, so unknown keys are ignored.
    """
    unknown = set(head.unknown())
    unknown = unknown & set(layer.unknown()) if is_one else unknown | set(layer.unknown())
    if unknown:
        logger.warning("%s: unknown keys %s have no effect", head.where, ", ".join(sorted(unknown)))


def _speculators_kind(raw: Mapping[str, Any], where: str) -> Method | None:
    """Return the method of a head in the layout of speculators; None for other layouts."""
    kind = raw.get("speculators_model_type")
    if kind is None and "transformer_layer_config" in raw:
        kind = next((_SPECULATORS_KINDS[name] for name in architectures(raw) if name in _SPECULATORS_KINDS), "unknown")
    if kind not in (None, "eagle", "eagle3", "peagle"):
        raise CheckpointError(
            f"{where}: speculators_model_type = {kind!r} is not supported; must be eagle, eagle3, peagle, dflash or "
            "dspark"
        )
    return kind


def _published_method(head: Reader, tensor_names: Collection[str]) -> Method:
    """Return the method. SafeAILab's configurations do not name it, but only EAGLE-3 has certain keys and tensors."""
    names = " ".join(architectures(head.values)).lower()
    if "peagle" in names or head.flag("parallel_drafting"):
        return "peagle"
    keys = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    tensors = ("d2t", "layers.0.hidden_norm.weight")
    marked = any(key in head.values for key in keys) or any(name in tensor_names for name in tensors)
    return "eagle3" if marked or "eagle3" in names else "eagle"


def _published_fc_bias(head: Reader) -> bool | None:
    return None if head.get("bias") is None else head.flag("bias")


def _spec(
    method: Method,
    head: Reader,
    layer: Reader,
    layer_config: LayerConfig,
    rope: RopeConfig,
    num_layers: int,
    target: Reader,
) -> HeadSpec:
    vocab_size, target_hidden_size = layer.integer("vocab_size"), layer_config.hidden_size
    target_num_layers = target.integer("num_hidden_layers")
    draft_vocab_size = vocab_size
    if method != "eagle":
        target_hidden_size = head.integer("target_hidden_size", target_hidden_size)
        draft_vocab_size = head.integer("draft_vocab_size", vocab_size)
    check_target(head, target, vocab_size, target_hidden_size)
    feature_layers = (target_num_layers,) if method == "eagle" else _feature_layers(head, target_num_layers)
    if draft_vocab_size > vocab_size:
        raise CheckpointError(f"{head.where}: draft_vocab_size {draft_vocab_size} is more than vocab_size {vocab_size}")
    return HeadSpec(
        method=method,
        hidden_size=layer_config.hidden_size,
        target_vocab_size=vocab_size,
        target_hidden_size=target_hidden_size,
        target_num_layers=target_num_layers,
        feature_layers=feature_layers,
        feature_width=len(feature_layers) * target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        layer_shapes=((layer_config.num_kv_heads, layer_config.head_dim, layer_config.head_dim),) * num_layers,
        max_position_embeddings=rope.max_position_embeddings,
        max_drafts=MAX_PARALLEL_DRAFTS if method == "peagle" else None,
        block_rows=MAX_PARALLEL_DRAFTS - 1 if method == "peagle" else 0,
    )


def _feature_layers(head: Reader, num_layers: int) -> tuple[int, ...]:
    """Return ascending layer ids as in vLLM: L is the input state of layer L."""
    if not head.flag("use_aux_hidden_state", True):
        raise CheckpointError(f"{head.where}: use_aux_hidden_state = False is not supported; must be true or absent")
    key, default = "eagle_aux_hidden_state_layer_ids", [2, num_layers // 2, num_layers - 3]
    ids = head.layers(key, 0, num_layers - 1, default)
    for count in ("num_aux_hidden_states", "num_aux_layers"):
        if head.integer(count, len(ids)) != len(ids):
            raise CheckpointError(f"{head.where}: {count} = {head.values[count]}, but {key} = {ids!r}")
    return tuple(sorted(ids))
