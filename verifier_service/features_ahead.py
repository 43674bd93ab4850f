"""Features of a verify step that leave for a drafter before the host knows which of the step's rows are true.

Where drafter and verifier share a board, the step's tokens leave so too, and the drafter is told beforehand what step
they will make: it begins to draft when the device has drawn, and not when the host has read, committed and sent it all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from draftwire.carriers import Outgoing, SegmentError
from draftwire.devices import upload
from draftwire.v1 import draft_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.draft_session import Binding, DraftSession
from verifier_service.features import FeatureStore, slots_of
from verifier_service.request import Request

logger = logging.getLogger(__name__)


class Foretold(NamedTuple):
    """What a drafter was told of a step beforehand."""

    drawn: draft_pb2.SharedSpan  # where the step's numbers are on the board
    num_drafts: int  # of each sequence


class FeaturesAhead(NamedTuple):
    """Room in which the device puts the features of a step's true rows, sequence after sequence, and then others.

    They are those of a message with these sequences, from these rows on, when each has as many rows as tokens were
    drawn for it: what is decided after the draw, such as that a request has ended, makes another message.
    """

    bindings: list[Binding]
    first_rows: list[int]
    features: Outgoing
    foretold: Foretold | None  # if it was: the drafter may read the features before a message names them

    def of(self, bindings: list[Binding], first_rows: list[int], num_rows: int) -> Outgoing | None:
        """The features of a message of `num_rows` rows in all; None when they are not those."""
        if self.bindings != bindings or self.first_rows != first_rows:
            return None
        self.features.keep(num_rows)
        return self.features


def begin_features(
    session: DraftSession,
    store: FeatureStore,
    verified: Mapping[Request, tuple[int, ScheduledRows]],
    drawn: torch.Tensor,
) -> FeaturesAhead | None:
    """Has the device put the features of a session's true rows where they are sent from, and foretells the step; None
    when it has no rows.

    Parameters
    ----------
    verified
        The verified requests of a step that was launched, with their places in its draw.
    drawn
        [B, columns] int64, what the step draws: of each request the number of its tokens, which is that of its true
        rows, then the tokens.
    """
    pieces = [
        (binding, *verified[binding.request])
        for binding in session.bindings
        if binding.request in verified and verified[binding.request][1].start == binding.next_row
    ]
    if not pieces:
        return None
    slots, cu_rows, places = upload(
        [
            slots_of([(work.request.blocks, work.start, work.start + len(work.tokens)) for _, _, work in pieces]),
            np.array([0, *accumulate(len(work.tokens) for _, _, work in pieces)], np.int32),
            np.array([place for _, place, _ in pieces], np.int64),
        ],
        drawn.device,
    )
    head = session.stream.head
    bindings, first_rows = [binding for binding, _, _ in pieces], [work.start for _, _, work in pieces]
    features = session.stream.sender.begin(head.dtype, (len(slots), head.width))
    try:
        store.read_true_rows(slots, cu_rows, places, drawn, features.tensor)
        features.seal()
        foretold = _foretell(session, bindings, first_rows, features, drawn, places)
        for binding in () if foretold is None else bindings:
            binding.request.is_foretold = True
    except BaseException:
        features.give_up()
        raise
    return FeaturesAhead(bindings, first_rows, features, foretold)


def _foretell(
    session: DraftSession,
    bindings: Sequence[Binding],
    first_rows: list[int],
    features: Outgoing,
    drawn: torch.Tensor,
    places: torch.Tensor,
) -> Foretold | None:
    """Tells the drafter what step will follow, if it can begin with that, and has what is `drawn` at `places` put on
    its board; what it was told, and that it may read the features then."""
    stream, num_drafts = session.stream, session.pace.plan.num_drafts
    if stream.board is None or features.offset is None or num_drafts == 0 or not stream.is_direct_next:
        return None
    if not session.has_room or not all(binding.sequence_id for binding in bindings):
        return None
    # Every other int32 is the low half of a number and equals it: one launch, where `to` would be another.
    numbers = drawn.view(torch.int32)[:, ::2].index_select(0, places)
    try:
        span = stream.board.post(numbers)
    except SegmentError as error:
        logger.warning("drafter %s: steps are not foretold any more: %s", stream.address, error)
        stream.board = None
        return None
    if span is None:
        return None
    upcoming = draft_pb2.UpcomingStep(
        sequence_ids=[binding.sequence_id for binding in bindings],
        first_rows=first_rows,
        num_drafts=[num_drafts] * len(bindings),
        drawn=span,
        columns=drawn.shape[1],
        features_offset=features.offset,
    )
    stream.foretell(upcoming)
    return Foretold(span, num_drafts)
