"""The families of heads: how each is created for a target, trained, exported and loaded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training import dspark, eagle3
from training.batches import Batches
from training.dspark import DSparkHead
from training.eagle3 import Eagle3Head
from training.export import dspark_config, eagle3_config, export_head, load_head
from training.layers import shape_of
from training.losses import Terms
from training.objectives import DSparkObjective, Eagle3Objective, Objective
from training.target import Target


@dataclass(frozen=True)
class Sizes:
    """Sizes and training options of a head.

    Attributes:
        draft_layers, intermediate_size, block_size, markov_rank: Sizes of a DSpark head.
        anchors: DSpark: blocks per conversation in training.
        draft_vocab_size: EAGLE-3: number of tokens, the target's most frequent ones; None for the target's whole
            vocabulary and lm_head.
        steps: EAGLE-3: chained draft steps in training.
    """

    draft_layers: int = 5
    intermediate_size: int = 640
    block_size: int = 7
    markov_rank: int = 32
    anchors: int = 128
    draft_vocab_size: int | None = None
    steps: int = 7


class Family(ABC):
    """A head for one target.

    Attributes:
        head: The trained module.
        outer: Name prefixes of the matrices that AdamW trains; Muon trains the others.
        layers: The target layers whose states are the head's features, in the family's own numbering.
        entered: The target layers whose inputs are these states.
    """

    head: Any
    outer: tuple[str, ...]
    layers: list[int]
    entered: list[int]

    @abstractmethod
    def prepare(self, batches: Batches) -> None:
        """Initialize the parts of the head that depend on the data."""

    @abstractmethod
    def objective(self, terms: Terms) -> Objective: ...

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return config.json of the exported head."""

    def export(self, directory: Path) -> None:
        export_head(self.head, self.config(), directory)

    def load(self, directory: Path) -> None:
        """Load an exported head of the same config."""
        load_head(self.head, self.config(), directory)


class Eagle3(Family):
    """An EAGLE-3 head with one layer of the target's shape."""

    outer: tuple[str, ...] = ("lm_head",)

    def __init__(self, target: Target, sizes: Sizes, end: int) -> None:
        config = target.config
        shape = shape_of(config, num_hidden_layers=1)
        self.target, self.sizes, self.end = target, sizes, end
        self.layers = self.entered = eagle3.feature_layers(config.num_hidden_layers)
        self.head = Eagle3Head(shape, config.hidden_size, sizes.draft_vocab_size).to(target.device)

    def prepare(self, batches: Batches) -> None:
        """Set the scale of the target's states, the draft vocabulary and its rows of the target's lm_head."""
        self.head.fc.measure(batches[0].states[:, 1:])
        if self.head.lm_head is None:
            return
        written = batches.texts.tokens[batches.texts.own]
        counts = torch.bincount(written, minlength=self.head.shape.vocab_size)
        ids = counts.topk(self.head.lm_head.out_features).indices.sort().values
        self.head.set_draft_vocabulary(ids)
        self.head.lm_head.weight.data.copy_(self.target.output[ids])
        print(f"the draft vocabulary covers {counts[ids].sum() / counts.sum():.4f} of the answers", flush=True)

    def objective(self, terms: Terms) -> Objective:
        return Eagle3Objective(self.target, self.head, self.sizes.steps, terms)

    def config(self) -> dict[str, Any]:
        return eagle3_config(self.head, self.layers, self.end)


class DSpark(Family):
    """A DSpark head with layers of the target's shape."""

    outer: tuple[str, ...] = ("markov_head.markov", "confidence_head")

    def __init__(self, target: Target, sizes: Sizes, end: int, mask_token: int) -> None:
        config = target.config
        shape = shape_of(config, num_hidden_layers=sizes.draft_layers, intermediate_size=sizes.intermediate_size)
        self.target, self.sizes, self.end = target, sizes, end
        self.layers = dspark.target_layers(config.num_hidden_layers, 4)
        self.entered = [layer + 1 for layer in self.layers]
        width = len(self.layers) * config.hidden_size
        self.head = DSparkHead(shape, width, sizes.block_size, sizes.markov_rank, mask_token).to(target.device)

    def prepare(self, batches: Batches) -> None:
        """Set the scale of the target's states."""
        self.head.fc.measure(batches[0].states[:, 1:])

    def objective(self, terms: Terms) -> Objective:
        return DSparkObjective(self.target, self.head, self.sizes.anchors, terms)

    def config(self) -> dict[str, Any]:
        return dspark_config(self.head, self.layers, self.target.config.num_hidden_layers, self.end)
