"""The k-step loop: from the state of each sequence's last true row to its draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.heads.spec import Head
from drafter_service.logits_buffers import LogitsBuffers
from drafter_service.sampling_group import SamplingGroup
from drafter_service.sampling_mode import SamplingMode
from drafter_service.sequence import Sequence
from draftwire.kv_cache import KVCache, RaggedBatch, SequenceRows


@dataclass(frozen=True)
class DraftRow:
    """A sequence that wants drafts; room for its speculative rows is reserved."""

    sequence: Sequence
    mode: SamplingMode
    num_drafts: int  # at least 1


@dataclass(frozen=True)
class Proposal:
    """Drafts of the rows in the order in which they were given."""

    tokens: list[np.ndarray]  # int32 [<= num_drafts] of each row, target ids
    logits: dict[SamplingMode, tuple[torch.Tensor, torch.Tensor | None]]  # of each mode's drafts, row after row


class Proposer:
    """Drafts for a batch of sequences of any modes and lengths."""

    def __init__(self, head: Head, cache: KVCache, buffers: LogitsBuffers, device: torch.device) -> None:
        self._head = head
        self._cache = cache
        self._buffers = buffers
        self._device = device

    def propose(self, states: torch.Tensor, rows: list[DraftRow]) -> Proposal:
        """Drafts for `rows` from the head's states [N, hidden] of their last true rows."""
        counts = np.array([row.num_drafts for row in rows])
        order = np.argsort(-counts, kind="stable")  # most drafts first: the rows still drafting are the first ones
        place = np.argsort(order)
        ordered = [rows[i] for i in order]
        if (order != np.arange(len(rows))).any():
            states = states[torch.from_numpy(order).to(self._device)]
        groups = self._groups(ordered)
        drafted = self._draft(states, ordered, groups)[place]
        # A state with NaN has no distribution to draw from: its drafts end there, and nobody else's.
        is_token = (drafted >= 0) & (np.arange(drafted.shape[1]) < counts[:, None])
        lengths = np.where(is_token.all(1), drafted.shape[1], (~is_token).argmax(1))
        return Proposal(
            [tokens[:length] for tokens, length in zip(drafted, lengths, strict=True)],
            {group.mode: self._sent(group, place, lengths) for group in groups if group.mode.sends_logits},
        )

    def _groups(self, ordered: list[DraftRow]) -> list[SamplingGroup]:
        members: dict[SamplingMode, list[int]] = {}
        for index, row in enumerate(ordered):
            members.setdefault(row.mode, []).append(index)
        return [
            SamplingGroup(
                mode,
                np.array(indices),
                len(members) == 1,
                [ordered[i].sequence for i in indices],
                self._head.draft_token_ids,
                self._buffers,
                self._device,
            )
            for mode, indices in members.items()
        ]

    def _draft(self, states: torch.Tensor, ordered: list[DraftRow], groups: list[SamplingGroup]) -> np.ndarray:
        """int32 [N, k] target ids; -1 where none could be drawn, anything past a row's number of drafts."""
        wanted = np.array([row.num_drafts for row in ordered])
        first_positions = torch.tensor([row.sequence.next_row for row in ordered], device=self._device)
        drafted = torch.empty(len(ordered), int(wanted[0]), dtype=torch.int32, device=self._device)
        token_ids = torch.empty(0, dtype=torch.int64, device=self._device)
        for offset in range(drafted.shape[1]):
            active = int((wanted > offset).sum())
            if offset > 0:
                states = self._forward(states[:active], token_ids[:active], first_positions, ordered[:active], offset)
            logits = self._head.logits(states).float()
            columns = torch.empty(active, dtype=torch.int64, device=self._device)
            for group in groups:
                group.sample(logits, offset, active, columns)
            token_ids = columns.clamp_min(0)
            if self._head.draft_token_ids is not None:
                token_ids = self._head.draft_token_ids[token_ids]
            drafted[:active, offset] = torch.where(columns < 0, -1, token_ids)
        return drafted.cpu().numpy()

    def _forward(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        first_positions: torch.Tensor,
        ordered: list[DraftRow],
        offset: int,
    ) -> torch.Tensor:
        """States of the speculative rows next_row + offset - 1, one of each sequence."""
        cached = [SequenceRows(row.sequence.blocks, row.sequence.num_cached + offset - 1, 1) for row in ordered]
        positions = first_positions[: len(ordered)] + (offset - 1)
        batch = RaggedBatch(cached, self._device)
        return self._head.forward(token_ids, states, positions, self._cache, batch)

    @staticmethod
    def _sent(
        group: SamplingGroup, place: np.ndarray, lengths: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = np.flatnonzero(np.isin(place, group.rows))
        return group.sent_logits(place[given], lengths[given])
