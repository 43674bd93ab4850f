"""One engine step of a verifier, decoded and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from draftwire.carriers import Incoming


class OpenedSequence(NamedTuple):
    """A sequence to open."""

    sequence_id: int
    temperature: float
    proposal_key: int
    first_row: int  # position of the first row that will be sent


class Step(NamedTuple):
    """The contract's DraftStep; S sequences, T rows."""

    step_id: int
    opened: list[OpenedSequence]
    closed_ids: list[int]
    sequence_ids: list[int]  # [S]
    first_rows: np.ndarray  # int64 [S]
    num_rows: np.ndarray  # int64 [S]
    num_drafts: np.ndarray  # int64 [S]
    tokens: np.ndarray  # int32 [T], x_{i+1} of every row, sequence after sequence
    features: torch.Tensor  # [T, width], g_i of every row, on the engine's device
    is_fused: bool = False  # the features are the head's states


class ReceivedStep(NamedTuple):
    """A step that was checked, whose features are still where they arrived."""

    step_id: int
    num_drafts: int  # that are wanted, of all sequences together
    features: Incoming
    make_step: Callable[..., Step]  # of `features`

    def load(self) -> Step:
        """The step; to be called once, in the thread of the engine, whose stream then copies the features."""
        return self.make_step(features=self.features.load())
