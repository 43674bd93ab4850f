"""How tensors travel between a verifier and a drafter: in the message, in shared host memory, in shared GPU memory."""

from draftwire.carriers.channel import Channel
from draftwire.carriers.names import ALL_CARRIERS, carrier_name, offered_carriers, parse_carriers
from draftwire.carriers.receiver import Incoming, TensorReceiver
from draftwire.carriers.rendezvous import Rendezvous, SharedSegments, check_rendezvous_dir, meet
from draftwire.carriers.ring import Body, Record, ring_bytes
from draftwire.carriers.segment import Segment, SegmentError, segment_bytes
from draftwire.carriers.sender import Outgoing, TensorSender

__all__ = [
    "ALL_CARRIERS",
    "Body",
    "Channel",
    "Incoming",
    "Outgoing",
    "Record",
    "Rendezvous",
    "Segment",
    "SegmentError",
    "SharedSegments",
    "TensorReceiver",
    "TensorSender",
    "carrier_name",
    "check_rendezvous_dir",
    "meet",
    "offered_carriers",
    "parse_carriers",
    "ring_bytes",
    "segment_bytes",
]
