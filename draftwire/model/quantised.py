"""Refuse quantised weights, which neither service supports, by their configuration and their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from draftwire.contract.errors import CheckpointError

SERVED_WEIGHTS = "served are weights in float32, bfloat16 and float16"

_KEYS = ("quantization_config", "compression_config")
_FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors names them
# Tensors of GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes and HQQ beside or instead of `weight`.
_PACKED = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale(_inv|_2)?|weight\.(absmax|quant_map|quant_state\..*)|SCB|W_q)$"
)


def refuse_quantised_config(config: Mapping[str, Any], where: object) -> None:
    """Refuse a configuration of quantised weights; `where` is its name in errors.

    Raises:
        CheckpointError: If the weights are quantised; the error names the method.
    """
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in _KEYS:
            settings = part.get(key)
            if settings:
                method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
                refused = f"weights quantised by {method!r} ({key}) are not served"
                raise CheckpointError(f"{where}: {refused}; {SERVED_WEIGHTS}")


def refuse_quantised_names(names: Iterable[str], where: object) -> None:
    """Refuse tensor names that only quantised weights have.

    Raises:
        CheckpointError: If there is one; the error names a tensor.
    """
    packed = next((name for name in sorted(names) if _PACKED.search(name)), None)
    if packed is not None:
        refused = f"the tensor {packed} is of quantised weights, which are not served"
        raise CheckpointError(f"{where}: {refused}; {SERVED_WEIGHTS}")


def refuse_quantised_files(paths: Iterable[Path]) -> None:
    """Refuse safetensors files with packed tensors or weights that are not floats; read only the headers.

    Damaged files are skipped here; loading them fails.

    Raises:
        CheckpointError: If there is one; the error names a tensor.
    """
    for path in paths:
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="pt") as file:
                types = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            continue
        refuse_quantised_names(types, path)
        for name, kind in types.items():
            if name.endswith(".weight") and kind not in _FLOATS:
                raise CheckpointError(f"{path}: the tensor {name} is {kind}, which is not served; {SERVED_WEIGHTS}")
