"""Tensors that are inserted into a message during encoding are there after decoding."""

from __future__ import annotations

import pytest
import torch

from draftwire.model.tensors import decode_tensor, encode_ids, encode_tensor, tensor_view
from draftwire.transport.encoding import encode, encode_step, path_to
from draftwire.v1 import draft_pb2 as pb

LOGITS = path_to(pb.DraftResponse, "drafts", "logits", "data")
IDS = path_to(pb.DraftResponse, "drafts", "logits_token_ids", "data")


def without_elements(tensor: torch.Tensor) -> pb.Tensor:
    message = encode_tensor(tensor)
    message.data = b""
    return message


# Row counts around those at which the length varints of the enclosing messages grow by a byte.
@pytest.mark.parametrize("rows", [0, 1, 7, 15, 16, 17, 31, 2047, 2048, 2049, 300_000])
def test_features_arrive_inside_of_their_step(rows):
    features = torch.arange(4 * rows, dtype=torch.bfloat16).reshape(rows, 4)
    step = pb.DraftStep(step_id=7, features=without_elements(features), sequence_ids=[1, 2], logits_read=3)
    encode_ids([4, 5], step.tokens)
    encoded = encode_step(step, tensor_view(features))
    request = pb.DraftRequest.FromString(encoded.data)
    whole = pb.DraftStep()
    whole.CopyFrom(step)
    whole.features.CopyFrom(encode_tensor(features))
    assert request == pb.DraftRequest(step=whole)
    assert encoded.message == pb.DraftRequest(step=step)
    assert torch.equal(decode_tensor(request.step.features, "features", torch.bfloat16, (rows, 4)), features)


def test_several_tensors_arrive_inside_of_one_message():
    logits, ids = torch.randn(6, 3), torch.arange(18, dtype=torch.int32).reshape(6, 3)
    response = pb.DraftResponse(drafts=pb.Drafts(step_id=2, num_drafts=[4, 2], features_read=9))
    response.drafts.logits.CopyFrom(without_elements(logits))
    response.drafts.logits_token_ids.CopyFrom(without_elements(ids))
    data = encode(response, (LOGITS, tensor_view(logits)), (IDS, tensor_view(ids))).data
    response.drafts.logits.CopyFrom(encode_tensor(logits))
    response.drafts.logits_token_ids.CopyFrom(encode_tensor(ids))
    assert pb.DraftResponse.FromString(data) == response


def test_a_message_with_nothing_to_put_inside_stays_as_it_is():
    step = pb.DraftStep(step_id=7, features=pb.Tensor(span=pb.SharedSpan(generation=1, offset=64)))
    request = pb.DraftRequest(step=step)
    assert encode_step(step, None).data == request.SerializeToString()
    assert encode(request) == (request, request.SerializeToString())


def test_elements_are_not_copied_before_they_are_inside():
    features = torch.zeros(2, 4)
    step = pb.DraftStep(features=without_elements(features))
    elements = tensor_view(features)
    features.fill_(1.0)
    request = pb.DraftRequest.FromString(encode_step(step, elements).data)
    assert torch.equal(decode_tensor(request.step.features, "features", torch.float32, (2, 4)), features)
