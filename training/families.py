"""The families of heads: how each is created for a target, trained, exported and loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from training import dspark, eagle3
from training.conversations import Conversations
from training.dspark import DSparkHead
from training.eagle3 import Eagle3Head
from training.export import export_dspark, export_eagle3, load_weights
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


class Family(Protocol):
    """A head for one target.

    Attributes:
        head: The trained module.
        outer: Name prefixes of the matrices that AdamW trains; Muon trains the others.
        layers: The target layers whose states are the head's features, in the family's own numbering.
    """

    outer: tuple[str, ...]
    layers: list[int]

    @property
    def head(self) -> torch.nn.Module: ...

    def prepare(self, conversations: Conversations) -> None:
        """Initialize the parts of the head that depend on the data."""

    def objective(self, terms: Terms) -> Objective: ...

    def export(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class Eagle3:
    """An EAGLE-3 head with one layer of the target's shape."""

    outer: tuple[str, ...] = ("lm_head",)

    def __init__(self, target: Target, sizes: Sizes, end: int) -> None:
        config = target.config
        shape = shape_of(config, num_hidden_layers=1)
        self.target, self.sizes, self.end = target, sizes, end
        self.layers = eagle3.feature_layers(config.num_hidden_layers)
        self.head = Eagle3Head(shape, config.hidden_size, sizes.draft_vocab_size).to(target.device)

    def prepare(self, conversations: Conversations) -> None:
        """Set the scale of the target's states, the draft vocabulary and its rows of the target's lm_head."""
        self.head.fc.measure(self.target.states(conversations[0][0], self.layers)[0][:, 1:])
        if self.head.lm_head is None:
            return
        written = conversations.tokens[conversations.own]
        counts = torch.bincount(written, minlength=self.head.shape.vocab_size)
        ids = counts.topk(self.head.lm_head.out_features).indices.sort().values
        self.head.set_draft_vocabulary(ids)
        self.head.lm_head.weight.data.copy_(self.target.output[ids])
        print(f"the draft vocabulary covers {counts[ids].sum() / counts.sum():.4f} of the answers", flush=True)

    def objective(self, terms: Terms) -> Objective:
        return Eagle3Objective(self.target, self.head, self.layers, self.sizes.steps, terms)

    def export(self, directory: Path) -> None:
        export_eagle3(self.head, self.layers, directory, self.end)

    def load(self, directory: Path) -> None:
        load_weights(self.head, directory)


class DSpark:
    """A DSpark head with layers of the target's shape."""

    outer: tuple[str, ...] = ("markov_head.markov", "confidence_head")

    def __init__(self, target: Target, sizes: Sizes, end: int, mask_token: int) -> None:
        config = target.config
        shape = shape_of(config, num_hidden_layers=sizes.draft_layers, intermediate_size=sizes.intermediate_size)
        self.target, self.sizes, self.end = target, sizes, end
        self.layers = dspark.target_layers(config.num_hidden_layers, 4)
        width = len(self.layers) * config.hidden_size
        self.head = DSparkHead(shape, width, sizes.block_size, sizes.markov_rank, mask_token).to(target.device)

    def prepare(self, conversations: Conversations) -> None:
        """Set the scale of the target's states."""
        entered = [layer + 1 for layer in self.layers]
        self.head.fc.measure(self.target.states(conversations[0][0], entered)[0][:, 1:])

    def objective(self, terms: Terms) -> Objective:
        return DSparkObjective(self.target, self.head, self.layers, self.sizes.anchors, terms)

    def export(self, directory: Path) -> None:
        export_dspark(self.head, self.layers, self.target.config.num_hidden_layers, directory, self.end)

    def load(self, directory: Path) -> None:
        load_weights(self.head, directory)
