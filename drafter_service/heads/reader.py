"""Typed access to a raw configuration, and the parts that configurations of all families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter_service.heads.layers import LayerConfig
from drafter_service.heads.rope import is_positive
from draftwire.contract.errors import CheckpointError, MismatchError

LAYER_MODEL_TYPES = ("llama", "qwen3")
# Keys without effect on a served head: names, training, generation, and additions of transformers.
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "attention_dropout"),
        *("num_anchors", "tie_word_embeddings", "confidence_head_alpha", "draft_arch"),
        *("embed_requires_grad", "speculators_version", "speculators_config", "speculators_model_type"),
        *("transformer_layer_config", "return_dict", "output_hidden_states", "output_attentions", "pretraining_tp"),
        *("is_encoder_decoder", "problem_type", "id2label", "label2id", "chunk_size_feed_forward"),
        *("attn_implementation", "_attn_implementation", "has_no_defaults_at_init", "max_window_layers"),
        # read by `read_rope` and `refuse_quantised_config`
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("original_max_position_embeddings", "quantization_config"),
    )
)
_QWEN3_HEAD_DIM = 128  # default of transformers' Qwen3Config


class Reader:
    """Reads values of a configuration, checks their types and records the keys that were read.

    Attributes:
        values: Raw values. Values of the nested object, if any, take precedence over the top level, as in vLLM.
        where: Name of the configuration in errors.
    """

    def __init__(self, config: Mapping[str, Any], where: str, nested: str | None = None) -> None:
        inner = None if nested is None else config.get(nested)
        if inner is None:
            inner = {}
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{where}: {nested} must be an object, not {inner!r}")
        self.values, self.where = {**config, **inner}, where
        self._read: set[str | None] = {nested}

    def get(self, key: str) -> Any:
        """Return the raw value, or None."""
        self._read.add(key)
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.where}: {key} = {value!r}: must be a positive integer")
        return value

    def count(self, key: str) -> int:
        """Return an integer of at least 0; default 0."""
        return 0 if self.get(key) in (None, 0) else self.integer(key)

    def number(self, key: str, default: float) -> float:
        """Return a positive number."""
        value = self.get(key)
        if value is None:
            return default
        if not is_positive(value):
            raise CheckpointError(f"{self.where}: {key} = {value!r}: must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} = {value!r}: must be true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        """Return one of the allowed words."""
        value = self.get(key)
        if value is None:
            return default
        if value not in allowed:
            supported = ", ".join(allowed)
            raise CheckpointError(f"{self.where}: {key} = {value!r} is not supported; supported are {supported}")
        return str(value)

    def token(self, key: str, vocab_size: int) -> int:
        """Return the id of a token of the target's vocabulary."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.where}: lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise CheckpointError(
                f"{self.where}: {key} = {value!r}: must be a token of the vocabulary, 0..{vocab_size - 1}"
            )
        return value

    def layers(self, key: str, lowest: int, highest: int, default: list[int]) -> list[int]:
        """Return different layers of the target; the default if there is no list, or, as in vLLM, an empty one."""
        ids, name = self.get(key), key
        if ids is None or ids == []:
            ids, name = default, f"the default of {key}"
        whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not whole or not all(lowest <= i <= highest for i in ids):
            raise CheckpointError(f"{self.where}: {name} = {ids!r}: must be layers of the target, {lowest}..{highest}")
        if len(set(ids)) != len(ids):
            raise CheckpointError(f"{self.where}: {name} = {ids!r}: must not name a layer twice")
        return list(ids)

    def refuse(self, key: str, allowed: object) -> None:
        """Refuse a value other than the allowed one."""
        value = self.get(key)
        if value is not None and value != allowed:
            raise CheckpointError(f"{self.where}: {key} = {value!r} is not supported; must be {allowed!r} or absent")

    def unknown(self) -> list[str]:
        """Return the keys that were not read and may have an effect."""
        return sorted(key for key in self.values if key not in self._read and key not in WITHOUT_EFFECT)

    def refuse_unknown(self) -> None:
        """Refuse unknown keys by name."""
        unknown = self.unknown()
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise CheckpointError(
                f"{self.where}: unknown keys {', '.join(unknown[:5])}{more}: they may change what the head computes"
            )


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the architectures; empty unless the value is a list."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a multimodal configuration, else the configuration."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def speculators_layer_values(raw: Mapping[str, Any], default: str, where: str) -> dict[str, Any]:
    """Return the layers' configuration in the layout of `speculators`; `default` is the default model type."""
    values = raw.get("transformer_layer_config")
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where}: transformer_layer_config must be an object, not {values!r}")
    model_type = values.get("model_type", default)
    if model_type not in LAYER_MODEL_TYPES:
        allowed = ", ".join(LAYER_MODEL_TYPES)
        raise CheckpointError(
            f"{where}: transformer_layer_config.model_type = {model_type!r} is not supported; supported are {allowed}"
        )
    return {**values, "model_type": model_type}


def read_layer_config(layer: Reader, *, qwen3: bool, qwen3_defaults: bool) -> LayerConfig:
    """Return the shapes of the layers.

    Args:
        qwen3: Whether queries and keys are normed, as in Qwen3.
        qwen3_defaults: Whether defaults are those of transformers' Qwen3Config.
    """
    hidden_size, num_heads = layer.integer("hidden_size"), layer.integer("num_attention_heads")
    num_kv_heads = layer.integer("num_key_value_heads", num_heads)
    head_dim = layer.integer("head_dim", _QWEN3_HEAD_DIM if qwen3_defaults else hidden_size // num_heads)
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


def layer_kinds(layer: Reader) -> list[str]:
    """Return full_attention or sliding_attention for each layer."""
    num_layers = layer.integer("num_hidden_layers", 1)
    kinds = layer.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * num_layers
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise CheckpointError(
            f"{layer.where}: layer_types = {kinds!r}: must be full_attention or sliding_attention for each of "
            f"{num_layers} layers"
        )
    return list(kinds)


def check_target(head: Reader, target: Reader, vocab_size: int, hidden_size: int) -> None:
    """Refuse a head for a target with another vocabulary, width or depth; the error has both values."""
    num_layers = head.integer("num_target_layers", target.integer("num_hidden_layers"))
    for key, own in (("vocab_size", vocab_size), ("hidden_size", hidden_size), ("num_hidden_layers", num_layers)):
        if own != target.integer(key):
            raise MismatchError(
                f"{head.where} is of a head for a target of {key} {own}, but {target.where} has {target.integer(key)}"
            )
