"""Runs a head over whole sequences: all accepted rows at once, then drafts after any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_service.heads import Head
from drafter_service.heads.spec import DraftContext, Rows
from draftwire.contract import validation as cfg
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache, RaggedBatch, SequenceRows
from draftwire.v1 import config_pb2
from draftwire_kernels import gumbel_sample


class HeadWalk:
    """Recomputes draft steps of a head without the drafter's engine.

    Steps of a sequence must be computed from last to first: a step's rows overwrite accepted rows that earlier steps do
    not attend to.
    """

    def __init__(
        self,
        head: Head,
        sequences: Sequence[Sequence[int]],
        features: Sequence[Tensor],
        config: config_pb2.SpeculativeConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Row i has the token at i + 1 and the features at i; a sequence of T tokens has T - 1 accepted rows."""
        self._head, self._config, self._device = head, config, device
        longest = max(map(len, sequences)) + 1 + head.spec.rows_behind(config.num_speculative_tokens)
        width = -(-longest // BLOCK_SIZE)
        self._blocks = [list(range(1 + b * width, 1 + (b + 1) * width)) for b in range(len(sequences))]
        self._cache = KVCache(head.spec.layer_shapes, 1 + len(sequences) * width, dtype, device)
        counts = [len(sequence) - 1 for sequence in sequences]
        batch = RaggedBatch(
            [SequenceRows(blocks, 0, count) for blocks, count in zip(self._blocks, counts, strict=True)], device
        )
        self._tokens = torch.tensor([token for sequence in sequences for token in sequence[1:]], device=device)
        positions = torch.cat([torch.arange(count) for count in counts]).to(device)
        self._states = head.fuse(torch.cat([own[:-1] for own in features]))
        head.enter(Rows(self._tokens, positions, batch), self._states, self._cache)
        self._first_rows = torch.tensor([0, *counts[:-1]], device=device).cumsum(0)

    def draft(self, members: Sequence[int], last: Tensor, temperature: float, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return draft logits [S, k, V_draft] and drafts [S, k] after token `last` [S] of the sequences `members`."""
        at = self._first_rows[torch.tensor(members, device=self._device)] + last - 1
        step = _Step(
            self._head,
            self._cache,
            [self._blocks[member] for member in members],
            Rows(self._tokens[at], last - 1, self._batch(members, last - 1)),
            self._states[at],
            self._config,
            temperature,
            keys,
        )
        self._head.draft(step, self._config.num_speculative_tokens)
        return torch.stack(step.logits, 1), torch.stack(step.drafts, 1)

    def _batch(self, members: Sequence[int], places: Tensor) -> RaggedBatch:
        rows = [SequenceRows(self._blocks[b], place, 1) for b, place in zip(members, places.tolist(), strict=True)]
        return RaggedBatch(rows, self._device)


class _Step(DraftContext):
    """One step: the last accepted row of each sequence and its drafts.

    Attributes:
        logits, drafts: [S, V_draft] and [S], per draft.
    """

    def __init__(
        self,
        head: Head,
        cache: KVCache,
        blocks: Sequence[Sequence[int]],
        rows: Rows,
        states: Tensor,
        config: config_pb2.SpeculativeConfig,
        temperature: float,
        keys: Tensor,
    ) -> None:
        self.cache, self.rows, self.states = cache, rows, states
        self.last_rows = torch.arange(len(blocks), device=states.device)
        self.wants_confidences = False
        self.logits: list[Tensor] = []
        self.drafts: list[Tensor] = []
        self._blocks, self._config, self._ids = blocks, config, head.draft_token_ids
        self._temperatures = torch.full((len(blocks),), temperature, device=states.device)
        self._keys, self._starts = keys, (rows.positions + 1).tolist()

    def draw(self, offset: int, logits: Tensor, confidences: Tensor | None = None) -> Tensor:  # noqa: ARG002
        config = self._config
        logits = _cut(logits.float(), config.draft_logits)
        columns = logits.argmax(-1)
        if config.draft_sample_method == cfg.GUMBEL:
            columns = gumbel_sample(
                logits,
                self._temperatures,
                self._keys,
                self.rows.positions + 2 + offset,
                draft_offset=0 if config.rejection_sample_method == cfg.COUPLED else offset,
                token_ids=self._ids,
                use_fp64=config.use_fp64_gumbel,
            )
        tokens = columns if self._ids is None else self._ids[columns]
        self.logits.append(logits)
        self.drafts.append(tokens)
        return tokens

    def next_rows(self) -> Rows:
        rows = self._rows(len(self.drafts) - 1, 1)
        return rows._replace(tokens=self.drafts[-1])

    def block(self, num_rows: int) -> Rows:
        return self._rows(0, num_rows)

    def _rows(self, skipped: int, count: int) -> Rows:
        """Return `count` rows of each sequence after its accepted rows and `skipped` others."""
        pieces = [
            SequenceRows(blocks, start + skipped, count)
            for blocks, start in zip(self._blocks, self._starts, strict=True)
        ]
        device = self.states.device
        starts = torch.tensor(self._starts, device=device)[:, None] + skipped
        positions = (starts + torch.arange(count, device=device)).flatten()
        return Rows(torch.zeros_like(positions), positions, RaggedBatch(pieces, device))


def _cut(logits: Tensor, sent: config_pb2.DraftLogits) -> Tensor:
    """With the form `top_n`, set all but the n largest logits of each row to -inf."""
    if sent.form != cfg.TOP_N:
        return logits
    largest, columns = logits.topk(sent.n, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, columns, largest)
