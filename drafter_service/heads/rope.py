"""Rotary position embedding of a head, from its raw configuration.

Configurations of transformers 5 have all values in `rope_parameters`. Older ones have `rope_theta` and `rope_scaling`,
with the kind of scaling in `rope_type` or `type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwire.contract.errors import CheckpointError

# Kinds whose frequencies are independent of the sequence's length, and the required keys of each.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings for transformers' initialisers."""

    kind: str
    head_dim: int
    max_position_embeddings: int
    parameters: dict[str, Any]

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """Return the frequencies, [head_dim / 2] float32, and the factor of cosines and sines."""
        if self.kind == "default":
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
            return 1.0 / self.parameters["rope_theta"] ** exponents, 1.0
        config = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.parameters),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.kind](config, torch.device("cpu"))
        return frequencies.float(), float(factor)


def is_positive(value: object) -> TypeGuard[float]:
    """Return whether a value is a positive, finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def read_rope(config: Mapping[str, Any], head_dim: int, max_position_embeddings: int, where: str) -> RopeConfig:
    """Return the rotary settings of a raw configuration; `where` is its name in errors.

    Raises:
        CheckpointError: If the scaling is not one of default, linear, llama3 and yarn, or lacks a parameter.
    """
    given = _first_given(*(config.get(key) for key in ("rope_parameters", "rope_scaling") if config.get(key) != {}), {})
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise CheckpointError(f"{where}: rope_parameters = {given!r}: must be one set of parameters for all layers")
    kind = _first_given(given.get("rope_type"), given.get("type"), "default")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise CheckpointError(f"{where}: rope_type = {kind!r} is not supported; supported are {', '.join(_REQUIRED)}")
    for source in (given, config):
        if source.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            factor = source["partial_rotary_factor"]
            raise CheckpointError(f"{where}: partial_rotary_factor = {factor!r} is not supported; must be 1")
    theta = _first_given(given.get("rope_theta"), config.get("rope_theta"), _DEFAULT_THETA)
    parameters = {key: value for key, value in given.items() if key != "type" and value is not None}
    parameters |= {"rope_type": kind, "rope_theta": theta}
    for key in ("rope_theta", *_REQUIRED[kind]):
        value = parameters.get(key)
        if not is_positive(value):
            raise CheckpointError(f"{where}: rope_type = {kind!r} with {key} = {value!r}: must be a positive number")
        parameters[key] = float(value)
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        original = _first_given(parameters.get(key), config.get(key), max_position_embeddings)
        if not is_positive(original):
            raise CheckpointError(f"{where}: {key} = {original!r}: must be a positive number")
        parameters[key] = original
    return RopeConfig(kind, head_dim, max_position_embeddings, parameters)


def _first_given(*values: Any) -> Any:
    """Return the first value that is not None. Values such as 0, "" and [] count, and are refused later if invalid."""
    return next(value for value in values if value is not None)


class RotaryEmbedding:
    """Cosines and sines of all positions, [max_position_embeddings, head_dim / 2] each, in the head's dtype.

    Frequencies and angles are computed in float32.
    """

    def __init__(self, config: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, factor = config.inverse_frequencies()
        positions = torch.arange(config.max_position_embeddings, device=device).float()
        angles = positions[:, None] * frequencies.to(device)
        self.cosines = (angles.cos() * factor).to(dtype)
        self.sines = (angles.sin() * factor).to(dtype)
