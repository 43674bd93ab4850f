"""Every byte between the services is counted once, with any carrier."""

from __future__ import annotations

import pytest
import torch

from draftwire.model.tensors import encode_tensor
from draftwire.transport.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb


def counts(traffic: Traffic) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in traffic.collect().samples if sample.value}


def test_tensors_and_the_rest_make_up_a_messages_bytes():
    traffic = Traffic()
    request = pb.DraftRequest(step=pb.DraftStep(step_id=7, features=encode_tensor(torch.zeros(5, 6))))
    traffic.count_message("grpc", "sent", request, request.ByteSize())
    drafts = pb.Drafts(logits=encode_tensor(torch.zeros(2, 3)), logits_token_ids=encode_tensor(torch.zeros(2, 3).int()))
    answer = pb.DraftResponse(drafts=drafts)
    traffic.count_message("direct", "received", answer, answer.ByteSize())
    assert counts(traffic) == {
        ("grpc", "sent", "features"): 120,
        ("grpc", "sent", "message"): len(request.SerializeToString()) - 120,
        ("direct", "received", "logits"): 48,
        ("direct", "received", "message"): len(answer.SerializeToString()) - 48,
    }


def test_a_tensor_in_shared_memory_is_counted_separately():
    traffic = Traffic()
    features = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[5, 6], span=pb.SharedSpan(generation=1))
    request = pb.DraftRequest(step=pb.DraftStep(features=features))
    traffic.count_message("direct", "sent", request, request.ByteSize())
    for carrier in (pb.CARRIER_SHM, pb.CARRIER_BYTES):  # with the second carrier, the tensor is part of the message
        traffic.count_tensor(carrier, "sent", "features", 120)
    assert counts(traffic) == {
        ("direct", "sent", "message"): request.ByteSize(),
        ("shm", "sent", "features"): 120,
    }


def test_a_lie_about_a_shape_counts_no_more_bytes_than_were_sent():
    traffic = Traffic()
    features = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2**31, 2**31], data=bytes(8))
    request = pb.DraftRequest(step=pb.DraftStep(features=features))
    traffic.count_message("grpc", "received", request, request.ByteSize())
    assert sum(counts(traffic).values()) == request.ByteSize()


@pytest.mark.timeout(30)
def test_a_shape_of_a_million_dimensions_is_not_multiplied():
    """Computing the product would block the interpreter for an hour, before any check of the message."""
    traffic = Traffic()
    lie = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2**32 - 1] * 1_000_000, data=bytes(8))
    answer = pb.DraftResponse(drafts=pb.Drafts(logits=lie))
    traffic.count_message("grpc", "received", answer, answer.ByteSize())
    assert counts(traffic) == {("grpc", "received", "message"): answer.ByteSize()}


def test_the_weights_of_a_fusion_are_no_message_of_a_step():
    traffic = Traffic()
    chunk = pb.FeatureFusionChunk(data=bytes(100))
    traffic.count_message("grpc", "received", chunk, chunk.ByteSize())
    assert list(counts(traffic)) == [("grpc", "received", "fusion")]
