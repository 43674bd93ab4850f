"""One engine step of a verifier, decoded and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftwire.transport import Body, Incoming


class OpenedSequence(NamedTuple):
    """A sequence to open."""

    sequence_id: int
    temperature: float
    proposal_key: int
    first_row: int  # position of the first row that will be sent


@dataclass(eq=False)
class AnnouncedStep:
    """The contract's Announce; S sequences. Tokens are read once and checked; features are untrusted."""

    announced_id: int
    sequence_ids: list[int]  # [S]
    first_rows: np.ndarray  # int64 [S]
    num_drafts: int  # of each sequence, at least 1
    columns: int  # numbers of each sequence in the body
    body: Body  # written by the verifier's device
    features: Incoming  # [most rows, width]
    vocab_size: int  # of the target
    is_fused: bool  # the features are the head's states
    is_resolved: bool = False  # committed or dropped
    is_dropped: bool = False
    show: Callable[[torch.Tensor], object] = lambda _: None  # writes early drafts for the verifier
    _read: tuple[np.ndarray, np.ndarray] | None = None
    _has_read: bool = False

    @property
    def is_written(self) -> bool:
        """Return whether the verifier's device has written the tokens, and before them the features."""
        return self._has_read or self.body.is_written

    def drop(self) -> None:
        """Drop the step and release its tokens and features."""
        self.is_resolved = self.is_dropped = True
        self.body.release()
        self.features.finish()

    def read(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rows of each sequence, int64 [S], and their tokens, int32 [T]; None if the numbers are invalid.

        Later calls return the same checked copy, even if the verifier writes the memory again.
        """
        if not self._has_read:
            self._has_read, self._read = True, self._read_checked()
            self.body.release()
        return self._read

    def _read_checked(self) -> tuple[np.ndarray, np.ndarray] | None:
        numbers = self.body.read((len(self.sequence_ids), self.columns))
        counts, tokens = numbers[:, 0].astype(np.int64), numbers[:, 1:]
        listed = counts.tolist()
        if min(listed) < 1 or max(listed) >= self.columns or sum(listed) > len(self.features.tensor):
            return None
        tokens = tokens[np.arange(self.columns - 1) < counts[:, None]]
        # Read as unsigned, a negative id exceeds every valid id.
        if np.count_nonzero(tokens.view(np.uint32) >= self.vocab_size):
            return None
        return counts, tokens


class Step(NamedTuple):
    """The contract's DraftStep, or the announced step of a Commit; S sequences, T rows."""

    step_id: int
    opened: list[OpenedSequence]
    closed_ids: list[int]
    sequence_ids: list[int]  # [S]
    first_rows: np.ndarray  # int64 [S]
    num_rows: np.ndarray  # int64 [S]
    num_drafts: np.ndarray  # int64 [S]
    tokens: np.ndarray  # int32 [T], x_{i+1} of every row, grouped by sequence
    features: Incoming  # [T, width], g_i of every row, which the engine reads and finishes; for a Commit see `rows`
    is_fused: bool = False  # the features are the head's states
    announced: AnnouncedStep | None = None  # the committed announced step
    places: np.ndarray | None = None  # int64 [S], of the sequences among the announced ones
    rows: np.ndarray | None = None  # int64 [T], the step's rows in the features; None for all

    def features_at(self, places: slice | np.ndarray) -> torch.Tensor:
        """Return the features of rows at some places of the step's tokens."""
        given = self.features.tensor
        if self.rows is not None:
            places = self.rows[places]
        return given[places] if isinstance(places, slice) else given[torch.from_numpy(places).to(given.device)]
