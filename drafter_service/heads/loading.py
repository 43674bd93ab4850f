"""Load a head from its directory."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from drafter_service.heads.block_config import BlockConfig, is_block_config, read_block_config
from drafter_service.heads.dflash import DFlashHead
from drafter_service.heads.eagle1 import Eagle1Head
from drafter_service.heads.eagle3 import Eagle3Head
from drafter_service.heads.eagle_config import EagleConfig, read_eagle_config
from drafter_service.heads.fp8 import check_device
from drafter_service.heads.layouts import canonical_names
from drafter_service.heads.peagle import PEagleHead
from drafter_service.heads.reader import Reader, text_config
from drafter_service.heads.spec import Head
from drafter_service.heads.tensors import MASK_FILE, CheckpointTensors, RandomTensors, TensorSource, load_mask_embedding
from draftwire.contract.errors import CheckpointError
from draftwire.model.checkpoints import fingerprint, load_tensors, read_config, weight_files
from draftwire.model.quantised import refuse_quantised_config, refuse_quantised_files, refuse_quantised_names

_EAGLE: dict[str, type[Eagle1Head | Eagle3Head]] = {"eagle": Eagle1Head, "eagle3": Eagle3Head, "peagle": PEagleHead}


def load_head(
    head_dir: Path,
    target_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dummy: bool = False,
    seed: int = 0,
    quantization: str | None = None,
) -> Head:
    """Load an EAGLE-1/2/3, P-EAGLE, DFlash or DSpark head in a published layout or in that of `speculators`.

    Args:
        head_dir: Directory with config.json and the weights, safetensors or .bin.
        target_dir: Directory of the target, for its shapes and for the embedding or lm_head that the head shares.
        dtype, device: Dtype and device of the weights and the states.
        dummy: Use random weights; only the two config.json are read.
        seed: Seed of the random weights.
        quantization: "fp8" to compute products with normed inputs in 8 bits; None for `dtype`.

    Raises:
        InvalidArgumentError: If the device lacks such products.
        CheckpointError: If the head is damaged, incomplete or not of a kind that is supported.
        MismatchError: If the head does not fit the target.

    Examples:
        >>> head = load_head(Path("models/demo/eagle3"), Path("models/demo/target"), torch.float32, torch.device("cpu"))
        >>> head.spec.method
        'eagle3'
    """
    if quantization is not None:
        check_device(device)
    head = _load(head_dir, target_dir, dtype, device, dummy=dummy, seed=seed)
    if quantization is not None:
        head.use_fp8()
    return head


def _load(
    head_dir: Path, target_dir: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool, seed: int
) -> Head:
    config_bytes = _config_bytes(head_dir)
    if dummy:
        config = _read_config(head_dir, target_dir)
        identity = fingerprint(b"dummy", config_bytes, str(seed).encode())
        return _make(config, RandomTensors(seed, dtype, device), identity, dtype, device)
    refuse_quantised_files(weight_files(head_dir))
    loaded = load_tensors(head_dir)
    refuse_quantised_names(loaded, head_dir)
    originals = canonical_names(loaded)
    config = _read_config(head_dir, target_dir, originals)
    if isinstance(config, EagleConfig) and config.fc_bias is None:
        config = replace(config, fc_bias="fc.bias" in originals)
    tensors = {name: loaded[original] for name, original in originals.items()}
    if isinstance(config, BlockConfig):
        load_mask_embedding(head_dir, config.mask_token_id, tensors, originals)
    source = CheckpointTensors(head_dir, target_dir, tensors, originals, dtype, device)
    files = [*weight_files(head_dir), *head_dir.glob(MASK_FILE)]
    identity = fingerprint(config_bytes, *map(_file_digest, files))
    head = _make(config, source, identity, dtype, device)
    source.finish()
    return head


def _read_config(head_dir: Path, target_dir: Path, tensor_names: Collection[str] = ()) -> EagleConfig | BlockConfig:
    """Read and check config.json; `tensor_names` as of `read_eagle_config`."""
    raw, where = read_config(head_dir), str(head_dir / "config.json")
    nested = raw.get("transformer_layer_config")
    for values in (raw, nested if isinstance(nested, dict) else {}):
        refuse_quantised_config(values, where)
    target = Reader(text_config(read_config(target_dir)), str(target_dir / "config.json"))
    if is_block_config(raw):
        return read_block_config(raw, where, target)
    return read_eagle_config(raw, where, target, tensor_names)


def _make(
    config: EagleConfig | BlockConfig, source: TensorSource, identity: str, dtype: torch.dtype, device: torch.device
) -> Head:
    if isinstance(config, BlockConfig):
        return DFlashHead(config, source, identity, dtype, device)
    return _EAGLE[config.spec.method](config, source, identity, dtype, device)


def _config_bytes(directory: Path) -> bytes:
    try:
        return (directory / "config.json").read_bytes()
    except OSError as error:
        raise CheckpointError(f"{directory}: config.json cannot be read: {error}") from error


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()
