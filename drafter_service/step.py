"""One engine step of a verifier, decoded and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftwire.carriers import DrafterBoard, Incoming, TensorReceiver


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
    features: Incoming  # [T, width], g_i of every row, which the engine reads and finishes
    is_fused: bool = False  # the features are the head's states


@dataclass(frozen=True, eq=False)
class UpcomingStep:
    """The contract's UpcomingStep; S sequences."""

    sequence_ids: list[int]  # [S]
    first_rows: np.ndarray  # int64 [S]
    num_drafts: np.ndarray  # int64 [S], at least 1
    board: DrafterBoard
    generation: int  # of what will be on the board
    offset: int  # where it will be, bytes
    columns: int  # numbers of each sequence there
    receiver: TensorReceiver  # in whose segment the features will be
    features_offset: int  # bytes
    dtype: torch.dtype
    width: int
    is_fused: bool
