"""Tensors that tests send."""

from __future__ import annotations

from draftwire.transport import Outgoing
from draftwire.v1 import draft_pb2 as pb


def finish(outgoing: Outgoing, message: pb.Tensor) -> None:
    """Fills in the message, with the elements where they are not in shared memory."""
    elements = outgoing.finish(message)
    if elements is not None:
        message.data = elements.tobytes()
