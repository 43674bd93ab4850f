"""Model directories: finding, reading and fingerprinting them, with errors that say what is wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from draftwire.errors import CheckpointError


def resolve_directory(name: str) -> Path:
    """The local directory of a model given as a directory or a hub id (`organisation/model`).

    Raises
    ------
    CheckpointError
        When there is neither such a directory nor such a model to be had.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{name!r} is not a directory; give a model directory or a hub id organisation/model")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.model", "*.jinja"]))
    except Exception as error:  # the hub client raises errors of many kinds: network, HTTP, validation, cache
        raise CheckpointError(f"{name!r} is not a directory, and not to be had from the hub: {error}") from error


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of config.json.

    Raises
    ------
    CheckpointError
        When the file is missing or not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: there is no config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return config


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights: safetensors if there are any, else .bin.

    Raises
    ------
    CheckpointError
        When there are none, or the index names one that is missing.
    """
    for suffix in ("safetensors", "bin"):
        for index in sorted(directory.glob(f"*.{suffix}.index.json")):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in names if not (directory / name).is_file()]
            if missing:
                raise CheckpointError(f"{directory}: {index.name} names {missing[0]}, which is missing")
            return [directory / name for name in names]
        files = sorted(directory.glob(f"*.{suffix}"))
        if files:
            return files
    raise CheckpointError(f"{directory}: there are no weights (*.safetensors or *.bin)")


def load_tensors(directory: Path, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, on the CPU, all of them or those among `names` that it has.

    Raises
    ------
    CheckpointError
        When a file is missing, truncated or not a checkpoint.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        if names is None or name in names:
                            tensors[name] = file.get_tensor(name)
            else:
                loaded = torch.load(path, map_location="cpu", weights_only=True)
                tensors.update({name: t for name, t in loaded.items() if names is None or name in names})
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise CheckpointError(f"{path}: is damaged or not a checkpoint: {error}") from error
    return tensors


def fingerprint(*parts: bytes) -> str:
    """16 hexadecimal digits that stand for `parts`."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
