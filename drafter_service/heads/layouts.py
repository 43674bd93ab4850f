"""Canonical tensor names for all published layouts.

The canonical names are those of the `speculators` EAGLE-3 layout: `layers.<i>.*`, `fc`, `input_norm`, `fc_norm.<i>`,
`norm`, `embed_tokens`, `lm_head`, `d2t`. Other layouts:

- EAGLE-3 of SafeAILab writes its one layer as `midlayer.*`; vLLM reads `layers.0.*` as well, and a prefix `model.`.
- EAGLE-1/2 of SafeAILab writes `layers.<i>.*`.
- SpecForge's older DSpark heads have `markov_head` and `confidence_head` below `logit_head`.
- `speculators` writes EAGLE-1's layer as `transformer.*` and its fc as `fusion_fc.*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from draftwire.contract.errors import CheckpointError

# Not read: frequencies come from the config, t2d repeats d2t, and speculators may store tensors of the training.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|t2d|verifier_norm\.weight|verifier_lm_head\.weight")
_REPLACED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^(midlayer|transformer)\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^logit_head\."), ""),
)


def canonical_name(name: str) -> str | None:
    """Return the canonical name of a checkpoint's tensor; None for a tensor that is not read."""
    for pattern, replacement in _REPLACED:
        name = pattern.sub(replacement, name)
    return None if _IGNORED.fullmatch(name) else name


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Return the checkpoint's name of each tensor by its canonical name.

    Raises:
        CheckpointError: If two tensors have the same canonical name.
    """
    originals: dict[str, str] = {}
    for original in names:
        name = canonical_name(original)
        if name is None:
            continue
        if name in originals:
            raise CheckpointError(f"tensors {originals[name]} and {original} are the same part of the head, {name}")
        originals[name] = original
    return originals
