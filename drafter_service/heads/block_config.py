"""The configuration of a DFlash or DSpark head, from any published layout and checked against its target.

- deepseek-ai/DeepSpec, `Qwen3DSparkModel`: flat keys; DFlash is the same with markov_rank 0.
- SpecForge and z-lab, `DFlashDraftModel` and `DSparkDraftModel`: keys in `dflash_config`.
- `speculators`, dflash and dspark: `transformer_layer_config` beside the head's keys.

Attention masks: DeepSpec has only full attention. `dflash_config` layouts follow vLLM
(vllm/model_executor/models/qwen3_dflash.py): `is_causal` or `causal` applies to all layers; without them the layers
that `layer_types` names sliding are causal, as in z-lab's and SpecForge's models, and those of `use_swa` are not. In
speculators (models/dflash/attention.py) the window of a whole block is that of its anchor, and sliding layers are
causal unless `sliding_window_non_causal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drafter_service.heads.layers import LayerConfig, Span
from drafter_service.heads.reader import (
    Reader,
    architectures,
    check_target,
    layer_kinds,
    read_layer_config,
    speculators_layer_values,
)
from drafter_service.heads.rope import RopeConfig, read_rope
from drafter_service.heads.spec import HeadSpec
from draftwire.contract.errors import CheckpointError

Markov = Literal["vanilla", "gated", "rnn"]
MARKOV_TYPES = ("vanilla", "gated", "rnn")
MAX_BLOCK_SIZE = 32
_FLAT = ("Qwen3DSparkModel",)
_NESTED = ("DFlashDraftModel", "DSparkDraftModel")
_SPECULATORS = {"DFlashSpeculator": "dflash", "DSparkSpeculator": "dspark"}
# The library's defaults for missing keys.
_SPECULATORS_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 8},
    "dspark": {
        "block_size": 8,
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    },
}
# Options that change the head's arithmetic and are not implemented: refused when they differ from this value.
_REFUSED = {
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_aux_hidden_state": True,
    "is_neox_style": True,
    "shift_label": False,  # Domino
    "pure_draft_prefix_len": 0,  # Domino
    "kv_lora_rank": None,  # latent attention
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class BlockConfig:
    """A block head's arithmetic, in any layout.

    Attributes:
        spans: The rows that each layer sees.
        block_size: Query slots of a block, the anchor's included.
        samples_anchor: Whether slot i predicts the token at i + 1, so that the anchor predicts the first draft. Else
            slot i predicts the token at i, and the anchor predicts none.
        mask_token_id: Token of the slots after the anchor; None if the checkpoint has a mask embedding.
        markov_rank, markov_type: Rank and type of the Markov head; rank 0 for none.
        has_confidence, confidence_with_markov: Whether there is a confidence head, and whether it reads the Markov
            embedding of the previous token.
    """

    spec: HeadSpec
    layer: LayerConfig
    rope: RopeConfig
    spans: tuple[Span, ...]
    block_size: int
    samples_anchor: bool
    mask_token_id: int | None
    markov_rank: int
    markov_type: Markov
    has_confidence: bool
    confidence_with_markov: bool


def is_block_config(raw: Mapping[str, Any]) -> bool:
    """Return whether a raw configuration is that of a DFlash or DSpark head."""
    names = architectures(raw)
    known = (*_FLAT, *_NESTED, *_SPECULATORS, "DominoDraftModel", "Gemma4DSparkModel")
    return (
        raw.get("speculators_model_type") in ("dflash", "dspark")
        or "dflash_config" in raw
        or "target_layer_ids" in raw
        or any(name in known for name in names)
    )


def read_block_config(raw: Mapping[str, Any], where: str, target: Reader) -> BlockConfig:
    """Read and check the configuration of a DFlash or DSpark head.

    Args:
        raw, where: config.json of the head, and its name in errors.
        target: Configuration of the target.

    Raises:
        CheckpointError: If the configuration is malformed, has unknown keys or asks for something that is not
            supported.
        MismatchError: If the head was made for another target.
    """
    kind = _layout(raw, where)
    if kind == "speculators":
        is_dspark = raw.get("speculators_model_type") == "dspark" or "DSparkSpeculator" in architectures(raw)
        raw = {**_SPECULATORS_DEFAULTS["dspark" if is_dspark else "dflash"], **raw}
    head = Reader(raw, where, nested=None if kind == "speculators" else "dflash_config")
    layer = Reader(speculators_layer_values(raw, "qwen3", where), where) if kind == "speculators" else head
    for key, allowed in _REFUSED.items():
        head.refuse(key, allowed)
        layer.refuse(key, allowed)
    head.choice("attention_mode", ("gqa", "mha"), "gqa")  # follows from the numbers of heads
    layer_config = read_layer_config(layer, qwen3=True, qwen3_defaults=True)
    rope = read_rope(layer.values, layer_config.head_dim, layer.integer("max_position_embeddings"), where)
    spans = _speculators_spans(head, layer) if kind == "speculators" else _spans(head)
    markov_rank = head.count("markov_rank")
    markov_type = head.choice("markov_head_type", MARKOV_TYPES, "vanilla")
    has_confidence = head.flag("enable_confidence_head", bool(head.values.get("confidence_head_alpha")))
    with_markov = head.flag("confidence_head_with_markov") and has_confidence
    if with_markov and not markov_rank:
        raise CheckpointError(f"{where}: confidence_head_with_markov = True needs markov_rank of at least 1")
    block_size = head.integer("block_size")
    samples_anchor = head.flag("sample_from_anchor", _anchor_predicts(head, kind))
    least = 1 if samples_anchor else 2
    if not least <= block_size <= MAX_BLOCK_SIZE:
        raise CheckpointError(f"{where}: block_size = {block_size}: allowed range [{least}, {MAX_BLOCK_SIZE}]")
    vocab_size = layer.integer("vocab_size")
    mask_token_id = None if head.get("mask_token_id") is None else head.token("mask_token_id", vocab_size)
    spec = _spec(head, layer, layer_config, rope, target, kind)
    config = BlockConfig(
        spec=HeadSpec(
            **spec,
            method="dspark" if markov_rank or has_confidence else "dflash",
            layer_shapes=((layer_config.num_kv_heads, layer_config.head_dim, layer_config.head_dim),) * len(spans),
            max_drafts=block_size if samples_anchor else block_size - 1,
            block_rows=block_size,
        ),
        layer=layer_config,
        rope=rope,
        spans=spans,
        block_size=block_size,
        samples_anchor=samples_anchor,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        markov_type=markov_type,  # type: ignore[arg-type]
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
    )
    for reader in (head, layer):
        reader.refuse_unknown()
    return config


def _layout(raw: Mapping[str, Any], where: str) -> Literal["flat", "nested", "speculators"]:
    names = architectures(raw)
    if "speculators_model_type" in raw or any(name in _SPECULATORS for name in names):
        return "speculators"
    known = (*_FLAT, *_NESTED)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise CheckpointError(
            f"{where}: architectures = {names!r} is not supported; supported are {', '.join(known)} and speculators'"
        )
    return "nested" if "dflash_config" in raw or any(name in _NESTED for name in names) else "flat"


def _anchor_predicts(head: Reader, kind: str) -> bool:
    """Return the default of `sample_from_anchor`: true for DSpark heads, false for DFlash heads."""
    if kind != "nested":
        return kind == "flat"
    is_named = "DSparkDraftModel" in architectures(head.values)
    projector = head.choice("projector_type", ("dflash", "dspark"), "dspark" if is_named else "dflash")
    if is_named and projector != "dspark":
        raise CheckpointError(f"{head.where}: projector_type = {projector!r}, but architectures name DSparkDraftModel")
    return projector == "dspark"


def _spans(head: Reader) -> tuple[Span, ...]:
    named = [kind == "sliding_attention" for kind in layer_kinds(head)]
    use_swa = head.flag("use_swa")
    is_sliding = named if any(named) else [use_swa] * len(named)
    window = None
    uses_windows = head.flag("use_sliding_window", any(is_sliding))
    if any(is_sliding):
        if not (uses_windows or use_swa):
            raise CheckpointError(
                f"{head.where}: use_sliding_window = False, but layer_types = {head.get('layer_types')!r}"
            )
        window = head.integer("sliding_window" if head.get("swa_window_size") is None else "swa_window_size")
    elif uses_windows and head.get("layer_types") is None:
        raise CheckpointError(f"{head.where}: use_sliding_window = True needs layer_types")
    head.get("sliding_window")
    head.get("swa_window_size")
    every = head.get("is_causal") if head.get("is_causal") is not None else head.get("causal")
    if every is not None and not isinstance(every, bool):
        raise CheckpointError(f"{head.where}: causal = {every!r}: must be true or false")
    return tuple(
        Span(window if slides else None, causal=is_named if every is None else every)
        for slides, is_named in zip(is_sliding, named, strict=True)
    )


def _speculators_spans(head: Reader, layer: Reader) -> tuple[Span, ...]:
    kinds = layer_kinds(layer)
    causal = not head.flag("sliding_window_non_causal")
    layer.get("sliding_window")
    if not layer.flag("use_sliding_window") and "sliding_attention" in kinds:
        raise CheckpointError(f"{layer.where}: use_sliding_window = False, but layer_types = {kinds!r}")
    # A window has `sliding_window` rows before the anchor, and the anchor.
    return tuple(
        Span(layer.integer("sliding_window") + 1, causal, anchored=True)
        if kind == "sliding_attention"
        else Span(causal=False)
        for kind in kinds
    )


def _spec(
    head: Reader, layer: Reader, layer_config: LayerConfig, rope: RopeConfig, target: Reader, kind: str
) -> dict[str, Any]:
    """Return the fields of `HeadSpec` that depend on both head and target."""
    num_layers, vocab_size = target.integer("num_hidden_layers"), layer.integer("vocab_size")
    target_hidden_size = head.integer("target_hidden_size", layer_config.hidden_size)
    check_target(head, target, vocab_size, target_hidden_size)
    draft_vocab_size = head.integer("draft_vocab_size", vocab_size)
    if draft_vocab_size > vocab_size:
        raise CheckpointError(f"{head.where}: draft_vocab_size {draft_vocab_size} is more than vocab_size {vocab_size}")
    feature_layers = _feature_layers(head, layer, num_layers, kind)
    return {
        "hidden_size": layer_config.hidden_size,
        "target_vocab_size": vocab_size,
        "target_hidden_size": target_hidden_size,
        "target_num_layers": num_layers,
        "feature_layers": feature_layers,
        "feature_width": len(feature_layers) * target_hidden_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": rope.max_position_embeddings,
    }


def _feature_layers(head: Reader, layer: Reader, num_layers: int, kind: str) -> tuple[int, ...]:
    """Return the layers whose input states are the features.

    `target_layer_ids` name layers by their output states, -1 the embedding. The output of the last layer is refused,
    because some trainers take it before the final norm and others after it.
    """
    if kind == "speculators":
        default = [2, num_layers // 2, num_layers - 3]
        key, lowest, highest = "aux_hidden_state_layer_ids", 0, num_layers - 1
    else:  # SpecForge's default
        count = layer.integer("num_hidden_layers", 1)
        span = num_layers - 4
        default = [round(1 + i * span / (count - 1)) for i in range(count)] if count > 1 else [num_layers // 2]
        key, lowest, highest = "target_layer_ids", -1, num_layers - 2
    ids = head.layers(key, lowest, highest, default)
    if ids != sorted(ids):
        raise CheckpointError(f"{head.where}: {key} = {ids!r}: must be ascending")
    return tuple(ids if kind == "speculators" else [i + 1 for i in ids])
