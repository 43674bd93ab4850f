"""Transport of tensors between verifier and drafter: in the message, in shared host memory, or in shared GPU memory."""

from draftwire.transport.carriers import ALL_CARRIERS, carrier_name, offered_carriers, parse_carriers
from draftwire.transport.channel import Channel
from draftwire.transport.receiver import Incoming, TensorReceiver
from draftwire.transport.rendezvous import Rendezvous, SharedSegments, check_rendezvous_dir, meet
from draftwire.transport.ring import Body, Record, ring_bytes
from draftwire.transport.segment import Segment, SegmentError, segment_bytes
from draftwire.transport.sender import Outgoing, TensorSender

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
