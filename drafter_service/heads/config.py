"""The configuration of a head of any family."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from drafter_service.heads.block_config import BlockConfig, is_block_config, read_block_config
from drafter_service.heads.eagle_config import EagleConfig, read_eagle_config
from drafter_service.heads.reader import Reader, text_config
from draftwire.model.checkpoints import read_config
from draftwire.model.quantised import refuse_quantised_config


def read_head_config(head_dir: Path, target_dir: Path, tensor_names: Collection[str] = ()) -> EagleConfig | BlockConfig:
    """Read and check config.json of a head.

    Args:
        tensor_names: Canonical names of the checkpoint's tensors, which distinguish EAGLE-3 from EAGLE-1 if the
            configuration does not.

    Raises:
        CheckpointError: If the configuration is malformed or asks for something that is not supported.
        MismatchError: If the head was made for another target.
    """
    raw, where = read_config(head_dir), str(head_dir / "config.json")
    nested = raw.get("transformer_layer_config")
    for values in (raw, nested if isinstance(nested, dict) else {}):
        refuse_quantised_config(values, where)
    target = Reader(text_config(read_config(target_dir)), str(target_dir / "config.json"))
    if is_block_config(raw):
        return read_block_config(raw, where, target)
    return read_eagle_config(raw, where, target, tensor_names)
