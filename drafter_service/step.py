"""One engine step of a verifier, decoded and checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OpenedSequence:
    """A sequence to open."""

    sequence_id: int
    temperature: float
    proposal_key: int
    first_row: int  # position of the first row that will be sent


@dataclass(frozen=True)
class Step:
    """The contract's DraftStep; S sequences, T rows."""

    step_id: int
    opened: list[OpenedSequence]
    closed_ids: list[int]
    sequence_ids: list[int]  # [S]
    first_rows: list[int]  # [S]
    num_rows: list[int]  # [S]
    num_drafts: list[int]  # [S]
    tokens: torch.Tensor  # int32 [T], x_{i+1} of every row, sequence after sequence, CPU
    features: torch.Tensor  # [T, width], g_i of every row, CPU

    def named_ids(self) -> list[int]:
        """Every sequence whose state the step changes."""
        return [*self.closed_ids, *(new.sequence_id for new in self.opened), *self.sequence_ids]
