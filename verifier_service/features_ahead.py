"""Features of a verify step that leave for a drafter before the host knows which of the step's rows are true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from draftwire.carriers import Outgoing
from draftwire.devices import upload
from verifier_service.draft_session import Binding, DraftSession
from verifier_service.features import FeatureStore, slots_of
from verifier_service.request import Request
from verifier_service.scheduler import Work


class FeaturesAhead(NamedTuple):
    """Room in which the device puts the features of a step's true rows, sequence after sequence, and then others.

    They are those of a message with these sequences, from these rows on, when each has as many rows as tokens were
    drawn for it: what is decided after the draw, such as that a request has ended, makes another message.
    """

    bindings: list[Binding]
    first_rows: list[int]
    features: Outgoing

    def of(self, bindings: list[Binding], first_rows: list[int], num_rows: int) -> Outgoing | None:
        """The features of a message of `num_rows` rows in all; None when they are not those."""
        if self.bindings != bindings or self.first_rows != first_rows:
            return None
        self.features.keep(num_rows)
        return self.features


def begin_features(
    session: DraftSession,
    store: FeatureStore,
    drawn: Mapping[Request, tuple[int, Work]],
    num_emitted: torch.Tensor,
) -> FeaturesAhead | None:
    """Has the device put the features of a session's true rows where they are sent from; None when it has no rows.

    Parameters
    ----------
    drawn
        The verified requests of a step that was launched, with their places in its draw.
    num_emitted
        [B] int64, tokens that the step draws: the number of true rows of each request.
    """
    pieces = [
        (binding, *drawn[binding.request])
        for binding in session.bindings
        if binding.request in drawn and drawn[binding.request][1].start == binding.next_row
    ]
    if not pieces:
        return None
    counts = np.array([len(work.tokens) for _, _, work in pieces], np.int64)
    places = np.array([place for _, place, _ in pieces], np.int64).repeat(counts)
    offsets = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    slots = slots_of([(work.request.blocks, work.start, work.start + len(work.tokens)) for _, _, work in pieces])
    slot, offset, place = upload([slots, offsets, places], num_emitted.device)
    is_refused = (offset >= num_emitted.index_select(0, place)).to(torch.int32)
    true_first = torch.argsort(is_refused, stable=True)
    head = session.stream.head
    features = session.stream.sender.begin(head.dtype, (len(slots), head.width))
    try:
        store.read_slots(slot.index_select(0, true_first), features.tensor)
        features.seal()
    except BaseException:
        features.give_up()
        raise
    return FeaturesAhead([binding for binding, _, _ in pieces], [work.start for _, _, work in pieces], features)
