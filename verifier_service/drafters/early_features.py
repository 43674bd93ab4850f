"""Early features: a verify step's rows, written to the send buffer before the host has the step's tokens.

With shared memory the step is announced too: the drafter starts when the verifier's device has sampled the tokens,
before the host has read, committed and sent them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch

from draftwire.model.devices import upload
from draftwire.transport import Outgoing
from draftwire.v1 import draft_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.drafters.features import FeatureStore, slots_of
from verifier_service.drafters.session import Binding, DraftSession, EarlyFeatures
from verifier_service.drafters.stream import AnnouncedStep


def begin_early(
    session: DraftSession,
    store: FeatureStore,
    verified: Mapping[Request, tuple[int, ScheduledRows]],
    drawn: torch.Tensor,
) -> EarlyFeatures | None:
    """Let the device write the features of a session's accepted rows, and announce the step if possible.

    Args:
        session: The session.
        store: Features of the session's kind.
        verified: Each verified request of a launched step, with its place in `drawn`.
        drawn: Output of the step's sampling, [B, columns] int64: the number of tokens of each request, equal to its
            accepted rows, then the tokens.

    Returns:
        The early features; None if the session has no rows in the step.
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
        store.read_accepted_rows(slots, cu_rows, places, drawn, features.tensor)
        announced = _announce(session, bindings, first_rows, features, drawn, places)
        features.seal()
    except BaseException:
        features.give_up()
        raise
    return EarlyFeatures(bindings, first_rows, features, announced)


def _announce(
    session: DraftSession,
    bindings: list[Binding],
    first_rows: list[int],
    features: Outgoing,
    drawn: torch.Tensor,
    places: torch.Tensor,
) -> AnnouncedStep | None:
    """Announce the step and let the device write the tokens of `drawn` at `places` for the drafter; None if impossible.

    The requests are marked as announced: they must not be preempted or continued before the step is committed, because
    the drafter sees their tokens.
    """
    num_drafts = session.pace.num_drafts
    if features.offset is None or num_drafts == 0 or not session.may_announce:
        return None
    if not all(binding.sequence_id for binding in bindings):
        return None
    message = draft_pb2.Announce(
        announced_id=session.last_announced + 1,
        sequence_ids=[binding.sequence_id for binding in bindings],
        first_rows=first_rows,
        num_drafts=num_drafts,
        columns=drawn.shape[1],
        num_rows=len(features.tensor),
    )
    # Every second int32 is the low half of an int64: a view saves the launch of `to`.
    numbers = drawn.view(torch.int32)[:, ::2].index_select(0, places)
    for binding in bindings:
        binding.request.is_announced = True
    announced = session.stream.announce(message, numbers, features)
    if announced is not None:
        session.last_announced = announced.announced_id
    return announced
