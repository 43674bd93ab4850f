"""The drafter's side in a separate process: receives tensors and sends each back with 1 added to every element.

Arguments: the rendezvous (hexadecimal), the device, the size of a segment in bytes.
"""

from __future__ import annotations

import select
import sys

import torch
from outgoing import send

from draftwire.transport import ALL_CARRIERS, TensorReceiver, TensorSender, meet
from draftwire.v1 import draft_pb2 as pb

DTYPE = torch.int32


def take(receiver: TensorReceiver, message: pb.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor of a message, after it has arrived on the device."""
    tensor = receiver.claim(message, "tensor", DTYPE, (None,)).load()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tensor


def main() -> None:
    rendezvous, device = pb.Rendezvous.FromString(bytes.fromhex(sys.argv[1])), torch.device(sys.argv[2])
    shared = meet(rendezvous, ALL_CARRIERS, int(sys.argv[3]), device)
    channel, receiver = shared.channel, TensorReceiver(device, shared.incoming)
    sender = TensorSender(device, shared.outgoing)
    assert channel is not None
    while True:
        select.select([channel], [], [])
        try:
            records = channel.receive()
        except ConnectionError:
            return
        for record in records:
            step = pb.DraftStep.FromString(record.message)
            sender.release(step.logits_read, "logits_read")
            answer = pb.Drafts(step_id=step.step_id)
            send(sender, take(receiver, step.features, device) + 1, answer.logits)
            answer.features_read = receiver.generation_read
            assert channel.send(answer.SerializeToString())


if __name__ == "__main__":
    main()
