"""Helpers of tests that send tensors."""

from __future__ import annotations

import torch

from draftwire.transport import Outgoing, TensorSender
from draftwire.v1 import draft_pb2 as pb


def finish(outgoing: Outgoing, message: pb.Tensor) -> None:
    """Fill in the message, including the elements if they are not in shared memory."""
    elements = outgoing.finish(message)
    if elements is not None:
        message.data = elements.tobytes()


def send(sender: TensorSender, tensor: torch.Tensor, message: pb.Tensor | None = None) -> pb.Tensor:
    """Copy a tensor to the sender's memory; return the message, filled in."""
    message = pb.Tensor() if message is None else message
    outgoing = sender.begin(tensor.dtype, tensor.shape)
    outgoing.tensor.copy_(tensor, non_blocking=True)
    outgoing.seal()
    finish(outgoing, message)
    return message
