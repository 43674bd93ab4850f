"""A step on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from drafter_service.answer import Answer
from drafter_service.sequence import Sequence
from drafter_service.step import Step


@dataclass(eq=False)
class RowRange:
    """Rows of one sequence that a step brings."""

    sequence: Sequence
    offset: int  # of the first row left, in the step's tensors
    count: int  # rows left
    num_drafts: int  # drafts wanted after them


@dataclass(frozen=True, eq=False)
class RowSlice:
    """Rows of one sequence that one forward computes."""

    work: StepWork
    sequence: Sequence
    first_row: int  # position of the first row
    offset: int  # in the step's tensors
    count: int
    num_drafts: int  # drafts wanted after the slice; 0 while more of the sequence's rows follow

    @property
    def place(self) -> int:
        """Place of the first row in the sequence's blocks."""
        return self.first_row - self.sequence.first_row

    @property
    def last_token(self) -> int:
        """Token of the last row."""
        return int(self.work.tokens[self.offset + self.count - 1])


@dataclass(eq=False)
class StepWork:
    """Rows that are still to be computed, and the answer as far as it is known."""

    step: Step
    answer: Answer = field(init=False)
    admitted: bool = False
    ranges: list[RowRange] = field(default_factory=list)  # rows left, in order

    def __post_init__(self) -> None:
        self.answer = Answer(self.step.step_id)
        self.tokens = self.step.tokens.numpy()

    def take(self, limit: int) -> list[RowSlice]:
        """Takes the next rows, `limit` at most; each sequence then counts its own as true."""
        slices = []
        while self.ranges and limit > 0:
            part = self.ranges[0]
            sequence = part.sequence
            count = min(part.count, limit)
            is_last = count == part.count
            num_drafts = part.num_drafts if is_last else 0
            slices.append(RowSlice(self, sequence, sequence.next_row, part.offset, count, num_drafts))
            sequence.next_row += count
            part.offset += count
            part.count -= count
            limit -= count
            if is_last:
                self.ranges.pop(0)
        return slices


def contiguous_pieces(slices: list[RowSlice]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and features of the slices, joined where they are neighbours in a step's tensors."""
    pieces: list[list] = []
    for part in slices:
        end = part.offset + part.count
        if pieces and pieces[-1][0] is part.work and pieces[-1][2] == part.offset:
            pieces[-1][2] = end
        else:
            pieces.append([part.work, part.offset, end])
    return [(work.step.tokens[begin:end], work.step.features[begin:end]) for work, begin, end in pieces]
