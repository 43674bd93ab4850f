"""Block heads with a few thousand random weights, for the target of tiny_head.py."""

from __future__ import annotations

from typing import Any

import torch
from tiny_head import DRAFT_VOCAB, HIDDEN, MAX_POSITIONS, TARGET_VOCAB

from drafter_service.heads import Head
from drafter_service.heads.block_config import read_block_config
from drafter_service.heads.dflash import DFlashHead
from drafter_service.heads.eagle_config import read_eagle_config
from drafter_service.heads.peagle import PEagleHead
from drafter_service.heads.reader import Reader
from drafter_service.heads.tensors import RandomTensors

_TARGET = {"vocab_size": TARGET_VOCAB, "hidden_size": 8, "num_hidden_layers": 9}
_LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "vocab_size": TARGET_VOCAB,
    "target_hidden_size": 8,
}
_BLOCK = {"target_layer_ids": [1, 3, 5], "mask_token_id": 39}
_DSPARK = {"block_size": 5, "markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "dspark": {"architectures": ["Qwen3DSparkModel"], **_BLOCK, **_DSPARK},
    "dspark rnn": {
        "architectures": ["Qwen3DSparkModel"],
        **_BLOCK,
        **_DSPARK,
        "markov_head_type": "rnn",
        "draft_vocab_size": DRAFT_VOCAB,
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {**_BLOCK, "block_size": 6},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "draft_vocab_size": DRAFT_VOCAB,
    },
    "peagle": {
        "architectures": ["PEagleDraftModel"],
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": 39,
        "draft_vocab_size": DRAFT_VOCAB,
    },
}


class LargeTensors(RandomTensors):
    """Random weights, equal on every device, and so large that every input affects the drafts."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, torch.float32, device)
        self.drawn = RandomTensors(seed, torch.float32, torch.device("cpu"))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.drawn.take(name, *shape).to(self.device)
        return tensor if len(shape) == 1 and name.endswith("weight") else tensor * (20 if len(shape) == 1 else 14)


def block_head(kind: str, device: str = "cpu") -> Head:
    """Return the head `kind` of `CONFIGS`."""
    raw, target = {**_LAYER, **CONFIGS[kind]}, Reader(_TARGET, "target")
    source = LargeTensors(5, torch.device(device))
    arguments = (source, "0123456789abcdef", torch.float32, torch.device(device))
    if kind == "peagle":
        return PEagleHead(read_eagle_config(raw, "head", target), *arguments)
    return DFlashHead(read_block_config(raw, "head", target), *arguments)
