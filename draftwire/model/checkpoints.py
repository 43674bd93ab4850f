"""Find, read and fingerprint model directories."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from draftwire.contract.errors import CheckpointError

# Files of a model that are downloaded from the hub.
MODEL_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.jinja"]
_SERVED_FORMATS = "served are directories with config.json and weights in *.safetensors or *.bin"
_INSTALL = re.compile(r"\b(pip3?|conda|uv)\s+(\w+\s+)?install\b")


def reason_of(error: BaseException) -> str:
    """Return a library's error message without its advice to install packages, which may not help here."""
    sentences = re.split(r"(?<=[.!?:;])\s+|\n+", str(error))
    kept = " ".join(sentence for sentence in sentences if not _INSTALL.search(sentence)).strip(" :")
    return kept or type(error).__name__


def resolve_directory(name: str) -> Path:
    """Return the local directory of a model given as a directory or a hub id (`organisation/model`).

    Raises:
        CheckpointError: If there is no such directory, and no such model can be downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        raise CheckpointError(f"{name!r} is a GGUF file, which is not served; {_SERVED_FORMATS}")
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{name!r} is not a directory; give a model directory or a hub id organisation/model")
    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub client raises errors of many kinds: network, HTTP, validation, cache
        reason = reason_of(error)
        raise CheckpointError(f"{name!r} is not a directory, and the hub cannot provide it: {reason}") from error


def read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the JSON object in config.json, or in another file of a model directory.

    Raises:
        CheckpointError: If the file is missing or not a JSON object.
    """
    path = directory / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        _refuse_gguf(directory)
        raise CheckpointError(f"{directory}: there is no {name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return config


# Names of weight files without an index, in the order of the search. Directories may have other files of both types:
# optimizer state, training arguments, consolidated copies.
_WEIGHT_PATTERNS = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "pytorch_model*.bin", "model*.bin")


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files: those of an index, else safetensors files, else .bin files.

    Raises:
        CheckpointError: If there are none, or the index is damaged or names a file that is missing.
    """
    for suffix in ("safetensors", "bin"):
        for index in sorted(directory.glob(f"*.{suffix}.index.json")):
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: is damaged or not an index of weights: {error}") from error
            missing = [name for name in names if not (directory / name).is_file()]
            if missing:
                raise CheckpointError(f"{directory}: {index.name} names {missing[0]}, which is missing")
            return [directory / name for name in names]
    for pattern in _WEIGHT_PATTERNS:
        files = sorted(directory.glob(pattern))
        if files:
            return files
    _refuse_gguf(directory)
    raise CheckpointError(f"{directory}: there are no weights in *.safetensors or *.bin, the formats that are served")


def _refuse_gguf(directory: Path) -> None:
    files = sorted(directory.glob("*.gguf"))
    if files:
        raise CheckpointError(f"{directory}: {files[0].name} is a GGUF file, which is not served; {_SERVED_FORMATS}")


def load_tensors(directory: Path, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Return tensors of a checkpoint by name, on the CPU: all, or those of `names` that it has.

    Raises:
        CheckpointError: If a file is missing, may not be read, is truncated or not a checkpoint.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        try:
            path.open("rb").close()  # safetensors reports every failure as a missing file
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            tensors.update(_read_safetensors(path, names) if path.suffix == ".safetensors" else _read_bin(path, names))
        except (SafetensorError, UnpicklingError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise CheckpointError(f"{path}: is damaged or not a checkpoint: {error}") from error
    return tensors


def _read_safetensors(path: Path, names: list[str] | None) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if names is None or name in names}  # noqa: SIM118


def _read_bin(path: Path, names: list[str] | None) -> dict[str, torch.Tensor]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"the file has a {type(loaded).__name__}, not tensors by name")
    return {name: tensor for name, tensor in loaded.items() if names is None or name in names}


def fingerprint(*parts: bytes) -> str:
    """Return a hash of `parts`, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
