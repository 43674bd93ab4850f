"""How tensors travel between a verifier and a drafter: in the message, in shared host memory, in shared GPU memory."""

from draftwire.carriers.board import DrafterBoard, VerifierBoard, board_bytes
from draftwire.carriers.lane import Lane
from draftwire.carriers.names import ALL_CARRIERS, carrier_name, offered_carriers, parse_carriers
from draftwire.carriers.receiver import Incoming, TensorReceiver
from draftwire.carriers.rendezvous import Rendezvous, SharedSegments, check_rendezvous_dir, meet
from draftwire.carriers.segment import Segment, SegmentError, segment_bytes
from draftwire.carriers.sender import Outgoing, TensorSender

__all__ = [
    "ALL_CARRIERS",
    "DrafterBoard",
    "Incoming",
    "Lane",
    "Outgoing",
    "Rendezvous",
    "Segment",
    "SegmentError",
    "SharedSegments",
    "TensorReceiver",
    "TensorSender",
    "VerifierBoard",
    "board_bytes",
    "carrier_name",
    "check_rendezvous_dir",
    "meet",
    "offered_carriers",
    "parse_carriers",
    "segment_bytes",
]
