"""The host's side of a draft step: from accepted rows of sequences of one mode to their drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from drafter_service.draft_loop.graphs import LoopGraphs
from drafter_service.draft_loop.inputs import LoopInputs, fill, fill_rows
from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.loop import DraftLoop, LoopShape
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.engine.sequence_table import SequenceTable
from draftwire.model.kv_cache import BLOCK_SIZE


class DraftRows(NamedTuple):
    """Rows of S sequences that want drafts after them; room for their speculative rows is reserved.

    Their states are in `DraftLoop.states`.
    """

    slots: np.ndarray  # int64 [S]
    first_rows: np.ndarray  # int64 [S], position of the first row
    counts: np.ndarray  # int64 [S], rows
    num_drafts: np.ndarray  # int64 [S], at least 1
    tokens: np.ndarray  # int32 [T], grouped by sequence


class Proposal(NamedTuple):
    """Drafts of S sequences."""

    tokens: np.ndarray  # int32 [S, k] target ids; valid until the next launch
    is_draft: np.ndarray  # bool [S, k], which of the tokens are drafts: the first ones of each sequence
    logits: list[torch.Tensor]  # float32 [S, k, n] and, for top_n, their token ids int32 [S, k, n]; may be empty
    confidences: np.ndarray | None  # float32 [S, k], valid as long as the tokens; None if they are not sent

    def select(self, chosen: slice | np.ndarray) -> Proposal:
        """Return the drafts of some of the sequences."""
        places = chosen if isinstance(chosen, slice) else chosen.tolist()
        confidences = None if self.confidences is None else self.confidences[chosen]
        return Proposal(self.tokens[chosen], self.is_draft[chosen], [x[places] for x in self.logits], confidences)

    def copy(self) -> Proposal:
        """Return the same drafts, valid beyond the next launch."""
        confidences = None if self.confidences is None else self.confidences.copy()
        return Proposal(self.tokens.copy(), self.is_draft.copy(), self.logits, confidences)


class Prepared(NamedTuple):
    """A step whose inputs are written, except its rows."""

    host: LoopInputs
    run: Callable[[], None]  # launches the step on the device
    mode: SamplingMode
    num_sequences: int
    num_drafts: int  # most drafts of a sequence


class Launched(NamedTuple):
    """A step that the device computes."""

    num_sequences: int
    num_drafts: int  # most drafts of a sequence
    mode: SamplingMode
    logits: list[torch.Tensor]  # as in `Proposal`


class Proposer:
    """Fills the loop's inputs, runs the loop and returns its drafts; one step at a time."""

    def __init__(
        self, loop: DraftLoop, graphs: LoopGraphs | None, table: SequenceTable, buffers: LogitsBuffers
    ) -> None:
        """Without `graphs`, and for shapes without a graph, a step is launched kernel by kernel."""
        self._loop = loop
        self._graphs = graphs
        self._table = table
        self._buffers = buffers
        self._new_blocks = np.arange(loop.inputs.num_new_blocks)
        self._drafts, self._confidences = loop.drafts.numpy(), loop.confidences.numpy()

    def launch(self, mode: SamplingMode, rows: DraftRows) -> Launched:
        """Prepare and start a step for rows of one mode; see `prepare` and `start`."""
        num_rows, max_rows = len(rows.tokens), max(rows.counts.tolist())
        prepared = self.prepare(mode, rows.slots, rows.first_rows, rows.num_drafts, num_rows, max_rows)
        return self.start(prepared, rows.counts, rows.tokens)

    def prepare(
        self,
        mode: SamplingMode,
        slots: np.ndarray,
        first_rows: np.ndarray,
        num_drafts: np.ndarray,
        num_rows: int,
        max_rows: int,
    ) -> Prepared:
        """Write the inputs of a step, except its rows. The device must have read the last step's inputs.

        Args:
            slots, first_rows, num_drafts: As in `DraftRows`.
            num_rows, max_rows: Maximum number of rows of all sequences, and of one sequence.
        """
        # If no sequence has room for a block, one unwanted draft is computed.
        count, most = len(slots), max(1, *num_drafts.tolist())
        shape = None
        if self._graphs is not None:
            shape = self._graphs.shape_for(mode, count, num_rows, most)
        if self._graphs is not None and shape is not None:
            run = partial(self._graphs.replay, shape)
        else:
            shape = LoopShape(mode, count, num_rows, max_rows, most)
            run = partial(self._loop.run, shape)
        host = self._loop.inputs.host(shape.num_sequences, shape.num_rows)
        self._fill(host, slots, first_rows, num_drafts)
        return Prepared(host, run, mode, count, most)

    def start(self, prepared: Prepared, counts: np.ndarray, tokens: np.ndarray) -> Launched:
        """Start a prepared step with its rows, without waiting for the device; counts [S] and tokens int32 [T] as in
        `DraftRows`. Call `finish` before the next `prepare`."""
        fill_rows(prepared.host, counts, tokens)
        prepared.run()
        count = prepared.num_sequences
        logits = [buffer[:count].clone() for buffer in self._buffers.of(prepared.mode)]
        return Launched(count, prepared.num_drafts, prepared.mode, logits)

    @property
    def is_done(self) -> bool:
        """Return whether the device has computed a launched step."""
        return not self._loop.states.is_cuda or torch.cuda.current_stream().query()

    def finish(self, launched: Launched) -> Proposal:
        """Wait for the device and return the drafts."""
        if self._loop.states.is_cuda:
            torch.cuda.current_stream().synchronize()
        # A state with NaN gives no distribution, which ends the drafts of its sequence only.
        size = slice(launched.num_sequences), slice(launched.num_drafts)
        tokens = self._drafts[size]
        confidences = self._confidences[size] if launched.mode.confidences else None
        return Proposal(tokens, tokens >= 0, launched.logits, confidences)

    def _fill(self, host: LoopInputs, slots: np.ndarray, first_rows: np.ndarray, num_drafts: np.ndarray) -> None:
        table = self._table
        first_places = first_rows - table.first_row[slots]
        width = table.blocks.shape[1]
        first_blocks = slots * width + first_places // BLOCK_SIZE
        fill(
            host,
            proposal_keys=table.proposal_key[slots],
            first_positions=first_rows,
            first_places=first_places,
            slots=slots,
            num_drafts=num_drafts,
            temperatures=table.temperature[slots],
            new_blocks=table.blocks.ravel().take(first_blocks[:, None] + self._new_blocks),
        )
