"""One description of a head, read from the configuration of any published layout and checked against its target.

Sources: SafeAILab/EAGLE (model/cnets.py, model/cnets1.py, model/ea_model.py), vLLM (models/llama_eagle3.py) for the
keys of `eagle_config`, and the library `speculators` (models/eagle3/config.py, models/eagle.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_service.heads.layers import LayerConfig
from drafter_service.heads.rope import RopeConfig, read_rope
from drafter_service.heads.spec import HeadSpec, Method
from draftwire.contract.errors import CheckpointError, MismatchError
from draftwire.model.checkpoints import read_config
from draftwire.model.quantised import refuse_quantised_config

# Options that change the head's arithmetic and are not implemented: refused when they differ from this value.
_REFUSED = {
    "parallel_drafting": False,  # P-EAGLE: several tokens a pass
    "eh_proj_before_attn": False,  # TensorRT-LLM
    "return_hidden_post_norm": False,  # TensorRT-LLM's norm_output
    "logit_scale": 1.0,
    "kv_lora_rank": None,  # latent attention
    "layernorms": False,  # speculators EAGLE: norms around the fusion
}
_LAYER_MODEL_TYPES = ("llama", "qwen3")
_SPECULATORS_KINDS: dict[str, Method] = {
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "EagleSpeculator": "eagle",
}
_QWEN3_HEAD_DIM = 128  # of transformers' Qwen3Config, when its configuration names none


@dataclass(frozen=True)
class HeadConfig:
    """A head's arithmetic, whatever its layout.

    Attributes
    ----------
    windows
        Size of each layer's sliding window, None for full attention.
    fc_bias
        None when the configuration does not say, which leaves it to the checkpoint.
    norm_before_residual
        EAGLE-3: the first layer's residual is the normed g.
    norm_before_fc, fc_norm
        EAGLE-3: one norm over all features, or one for each feature layer.
    norm_output
        EAGLE-3.1: the next g is the output of the final norm.
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


class _Reader:
    """Typed access to a raw configuration; `eagle_config` goes before the top level, as in vLLM."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        nested = config.get("eagle_config")
        if nested is None:
            nested = {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{where}: eagle_config must be an object, not {nested!r}")
        self.values, self.where = {**config, **nested}, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.where}: {key} = {value!r}: must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise CheckpointError(f"{self.where}: {key} = {value!r}: must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} = {value!r}: must be true or false")
        return value

    def refuse(self, key: str, allowed: object) -> None:
        value = self.values.get(key)
        if value is not None and value != allowed:
            raise CheckpointError(f"{self.where}: {key} = {value!r} is not supported; must be {allowed!r} or absent")


def read_head_config(head_dir: Path, target_dir: Path, tensor_names: Collection[str] = ()) -> HeadConfig:
    """Reads and checks config.json of a head.

    Parameters
    ----------
    tensor_names
        Canonical names of the checkpoint's tensors; they tell EAGLE-3 from EAGLE-1 where the configuration does not.

    Raises
    ------
    CheckpointError
        When the configuration is malformed or asks for something that is not supported.
    MismatchError
        When the head was made for another target.
    """
    raw = read_config(head_dir)
    where = str(head_dir / "config.json")
    head = _Reader(raw, where)
    speculators_kind = _speculators_kind(raw, where)
    layer_values = raw if speculators_kind is None else _speculators_layer_values(raw, speculators_kind, where)
    layer = _Reader(layer_values, where)
    for values in (raw, layer_values):
        refuse_quantised_config(values, where)
    for key, allowed in _REFUSED.items():
        head.refuse(key, allowed)
        layer.refuse(key, allowed)
    layer.refuse("hidden_act", "silu")
    target = _Reader(_text_config(read_config(target_dir)), str(target_dir / "config.json"))
    method = speculators_kind or _published_method(head, tensor_names)
    layer_config = _layer_config(layer, speculators=speculators_kind is not None)
    rope = read_rope(layer.values, layer_config.head_dim, layer.integer("max_position_embeddings", 2048), where)
    windows = _windows(layer)
    spec = _spec(method, head, layer, layer_config, rope, len(windows), target)
    if method == "eagle":
        fc_bias = _published_fc_bias(head) if speculators_kind is None else head.flag("fusion_bias")
        return HeadConfig(spec, layer_config, rope, windows, fc_bias=fc_bias)
    flags = {name: head.flag(name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other, both are true")
    return HeadConfig(spec, layer_config, rope, windows, **flags)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a multimodal configuration, else the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _speculators_kind(raw: Mapping[str, Any], where: str) -> Method | None:
    """What a head in the layout of speculators is; None for the published layouts."""
    kind = raw.get("speculators_model_type")
    if kind is None and "transformer_layer_config" in raw:
        kind = next((_SPECULATORS_KINDS[name] for name in _architectures(raw) if name in _SPECULATORS_KINDS), "unknown")
    if kind not in (None, "eagle", "eagle3"):
        raise CheckpointError(f"{where}: speculators_model_type = {kind!r} is not supported; must be eagle or eagle3")
    return kind


def _speculators_layer_values(raw: Mapping[str, Any], kind: Method, where: str) -> Mapping[str, Any]:
    values = raw.get("transformer_layer_config")
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where}: transformer_layer_config must be an object, not {values!r}")
    model_type = values.get("model_type", "qwen3" if kind == "eagle3" else "llama")  # the library's defaults
    if model_type not in _LAYER_MODEL_TYPES:
        allowed = ", ".join(_LAYER_MODEL_TYPES)
        raise CheckpointError(
            f"{where}: transformer_layer_config.model_type = {model_type!r} is not supported; supported are {allowed}"
        )
    # EagleSpeculator has one layer, whatever the configuration, often the target's own, says
    one_layer = {"num_hidden_layers": 1, "layer_types": None} if kind == "eagle" else {}
    return {**values, "model_type": model_type, **one_layer}


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the architectures; whatever is not a list of them names none."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _published_method(head: _Reader, tensor_names: Collection[str]) -> Method:
    """EAGLE-3 or EAGLE-1/2; SafeAILab's configurations do not say, but only EAGLE-3 has these keys and tensors."""
    architectures = " ".join(_architectures(head.values)).lower()
    keys = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    tensors = ("d2t", "layers.0.hidden_norm.weight")
    marked = any(key in head.values for key in keys) or any(name in tensor_names for name in tensors)
    return "eagle3" if marked or "eagle3" in architectures else "eagle"


def _layer_config(layer: _Reader, *, speculators: bool) -> LayerConfig:
    hidden_size, num_heads = layer.integer("hidden_size"), layer.integer("num_attention_heads")
    num_kv_heads = layer.integer("num_key_value_heads", num_heads)
    qwen3 = speculators and layer.values["model_type"] == "qwen3"
    default_head_dim = _QWEN3_HEAD_DIM if qwen3 else hidden_size // num_heads
    head_dim = layer.integer("head_dim", default_head_dim)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{layer.where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"{layer.where}: head_dim = {head_dim}: must be even")
    attention_bias = layer.flag("attention_bias")
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=layer.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=layer.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias or layer.flag("qkv_bias"),
        output_bias=attention_bias,
        mlp_bias=layer.flag("mlp_bias"),
        qk_norm=qwen3,
    )


def _windows(layer: _Reader) -> tuple[int | None, ...]:
    """Sliding windows of the layers; `layer_types` says which layers have one."""
    num_layers = layer.integer("num_hidden_layers", 1)
    kinds = layer.values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * num_layers
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise CheckpointError(
            f"{layer.where}: layer_types = {kinds!r}: must be full_attention or sliding_attention for each of "
            f"{num_layers} layers"
        )
    return tuple(layer.integer("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


def _published_fc_bias(head: _Reader) -> bool | None:
    return None if head.values.get("bias") is None else head.flag("bias")


def _spec(
    method: Method,
    head: _Reader,
    layer: _Reader,
    layer_config: LayerConfig,
    rope: RopeConfig,
    num_layers: int,
    target: _Reader,
) -> HeadSpec:
    vocab_size, target_hidden_size = layer.integer("vocab_size"), layer_config.hidden_size
    target_num_layers = target.integer("num_hidden_layers")
    draft_vocab_size = vocab_size
    feature_layers: tuple[int, ...] = (target_num_layers,)
    if method == "eagle3":
        target_hidden_size = head.integer("target_hidden_size", target_hidden_size)
        draft_vocab_size = head.integer("draft_vocab_size", vocab_size)
        feature_layers = _feature_layers(head, target_num_layers)
    for key, own in (("vocab_size", vocab_size), ("hidden_size", target_hidden_size)):
        if own != target.integer(key):
            raise MismatchError(
                f"{head.where} is of a head for a target of {key} {own}, but {target.where} has {target.integer(key)}"
            )
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
    )


def _feature_layers(head: _Reader, num_layers: int) -> tuple[int, ...]:
    """Ids as vLLM counts them: L is the state that enters layer L, features always in ascending order."""
    if not head.flag("use_aux_hidden_state", True):
        raise CheckpointError(f"{head.where}: use_aux_hidden_state = False is not supported; must be true or absent")
    ids = head.values.get("eagle_aux_hidden_state_layer_ids")
    key = "eagle_aux_hidden_state_layer_ids"
    if ids is None or ids == []:  # as in vLLM, for which an empty list names no layers
        ids, key = [2, num_layers // 2, num_layers - 3], f"the default feature layers of {num_layers} layers"
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not all(0 <= i < num_layers for i in ids):
        raise CheckpointError(f"{head.where}: {key} = {ids!r}: must be layers of the target, 0..{num_layers - 1}")
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{head.where}: {key} = {ids!r}: must not name a layer twice")
    for count in ("num_aux_hidden_states", "num_aux_layers"):
        if head.integer(count, len(ids)) != len(ids):
            raise CheckpointError(f"{head.where}: {count} = {head.values[count]}, but {key} = {ids!r}")
    return tuple(sorted(ids))
