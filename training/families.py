"""The families of heads that are trained: how each is made for a target, taught, written and read."""

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
    """What may be chosen about a head.

    Attributes
    ----------
    draft_layers, block_size, markov_rank, anchors
        Of a DSpark head; anchors are those of one conversation in training.
    draft_vocab_size
        Of an EAGLE-3 head: the tokens that the target writes most often; None for all, by the target's own lm_head.
    steps
        Chained steps of EAGLE-3's training.
    """

    draft_layers: int = 2
    block_size: int = 7
    markov_rank: int = 64
    anchors: int = 128
    draft_vocab_size: int | None = None
    steps: int = 7


class Family(Protocol):
    """A head for one target.

    Attributes
    ----------
    head
        The module that is trained.
    outer
        First parts of the names of weights that AdamW trains rather than Muon.
    layers
        The target's layers that the head reads, as the family counts them.
    """

    outer: tuple[str, ...]
    layers: list[int]

    @property
    def head(self) -> torch.nn.Module: ...

    def prepare(self, conversations: Conversations) -> None:
        """Read what the head must know of the data before it is trained."""

    def objective(self, terms: Terms) -> Objective: ...

    def export(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class Eagle3:
    """An EAGLE-3 head of one layer like the target's."""

    outer: tuple[str, ...] = ("lm_head",)

    def __init__(self, target: Target, sizes: Sizes, end: int) -> None:
        config = target.config
        shape = shape_of(config, num_hidden_layers=1)
        self.target, self.sizes, self.end = target, sizes, end
        self.layers = eagle3.feature_layers(config.num_hidden_layers)
        self.head = Eagle3Head(shape, config.hidden_size, sizes.draft_vocab_size).to(target.device)

    def prepare(self, conversations: Conversations) -> None:
        """Take the draft vocabulary, and its rows of the target's lm_head to begin with."""
        if self.head.lm_head is None:
            return
        written = conversations.tokens[conversations.own]
        counts = torch.bincount(written, minlength=self.head.shape.vocab_size)
        ids = counts.topk(self.head.lm_head.out_features).indices.sort().values
        self.head.set_draft_vocabulary(ids)
        self.head.lm_head.weight.data.copy_(self.target.output[ids])
        print(f"the draft vocabulary covers {counts[ids].sum() / counts.sum():.4f} of the answers", flush=True)

    def objective(self, terms: Terms) -> Objective:
        """See `Family`."""
        return Eagle3Objective(self.target, self.head, self.layers, self.sizes.steps, terms)

    def export(self, directory: Path) -> None:
        """See `Family`."""
        export_eagle3(self.head, self.layers, directory, self.end)

    def load(self, directory: Path) -> None:
        """See `Family`."""
        load_weights(self.head, directory)


class DSpark:
    """A DSpark head of layers like the target's."""

    outer: tuple[str, ...] = ("markov_head", "confidence_head")

    def __init__(self, target: Target, sizes: Sizes, end: int, mask_token: int) -> None:
        config = target.config
        shape = shape_of(config, num_hidden_layers=sizes.draft_layers)
        self.target, self.sizes, self.end = target, sizes, end
        self.layers = dspark.target_layers(config.num_hidden_layers, 4)
        width = len(self.layers) * config.hidden_size
        self.head = DSparkHead(shape, width, sizes.block_size, sizes.markov_rank, mask_token).to(target.device)

    def prepare(self, conversations: Conversations) -> None:
        """See `Family`."""

    def objective(self, terms: Terms) -> Objective:
        """See `Family`."""
        return DSparkObjective(self.target, self.head, self.layers, self.sizes.anchors, terms)

    def export(self, directory: Path) -> None:
        """See `Family`."""
        export_dspark(self.head, self.layers, self.target.config.num_hidden_layers, directory, self.end)

    def load(self, directory: Path) -> None:
        """See `Family`."""
        load_weights(self.head, directory)
