"""The heads of this folder's checkpoints with their targets, as directories or loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import block_checkpoints
import head_checkpoints
import torch
from block_checkpoints import BlockCase
from head_checkpoints import Case, write_json
from safetensors.torch import load_file, save_file

from drafter_service.heads import Head, load_head

CPU = torch.device("cpu")
CASES: dict[str, Case | BlockCase] = {**head_checkpoints.CASES, **block_checkpoints.CASES}
BLOCKS = ([5, 2], [1, 7], [6, 3])  # cache blocks of three sequences, out of order and interleaved

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


class Pair:
    """The directories of a head and its target, whose files a test may change."""

    def __init__(self, case: str | Case | BlockCase, folder: Path) -> None:
        case = CASES[case] if isinstance(case, str) else case
        write = block_checkpoints.write_case if isinstance(case, BlockCase) else head_checkpoints.write_case
        self.head_dir, self.target_dir = write(case, folder)  # type: ignore[arg-type]

    def load(self, dtype: torch.dtype = torch.float32, **options: Any) -> Head:
        return load_head(self.head_dir, self.target_dir, dtype, CPU, **options)

    def config(self, which: str = "head") -> Config:
        loaded: Config = json.loads((self._directory(which) / "config.json").read_text(encoding="utf-8"))
        return loaded

    def change(self, which: str = "head", **values: Any) -> None:
        """Change keys of a config.json; the value `...` removes a key. Keys in `dflash_config` are changed there."""
        config = self.config(which)
        for key, value in values.items():
            owner = config["dflash_config"] if key in config.get("dflash_config", {}) else config
            owner[key] = value
            if value is ...:
                del owner[key]
        write_json(self._directory(which) / "config.json", config)

    def change_layer(self, **values: Any) -> None:
        """Change keys of the layers' configuration in speculators' layout."""
        self.change(transformer_layer_config=self.config()["transformer_layer_config"] | values)

    def change_tensors(self, change: Callable[[Tensors], object], which: str = "head") -> None:
        path = self._directory(which) / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    def _directory(self, which: str) -> Path:
        return self.head_dir if which == "head" else self.target_dir


@cache
def loaded(name: str) -> Head:
    """Return the head of a case."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        return Pair(name, Path(folder)).load()
