"""A transferred fusion gives the head's states; weights that differ from the head's are refused."""

from __future__ import annotations

import pytest
import torch
from head_checkpoints import CASES, inputs
from pairs import CPU, loaded

from draftwire.contract.errors import InvalidArgumentError, MismatchError
from draftwire.model import fusion as module
from draftwire.model.fusion import FeatureFusion, fusion_bytes, load_fusion
from draftwire.v1 import draft_pb2 as pb

FUSING = [name for name in CASES if "eagle1" not in name]


def spec_of(name: str) -> pb.FeatureSpec:
    spec = loaded(name).spec
    return pb.FeatureSpec(layers=spec.feature_layers, width=spec.feature_width, dtype=pb.DTYPE_FLOAT32)


@pytest.mark.parametrize("name", FUSING)
def test_states_are_those_of_the_head(name, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    head = loaded(name)
    assert head.fusion is not None
    chunks = list(head.fusion.chunks())
    assert len(chunks) > 5
    described = head.fusion.describe()
    data = bytearray(b"".join(chunks))
    assert fusion_bytes(described, spec_of(name)) == len(data)
    taken = load_fusion(described, spec_of(name), data, CPU)
    features = inputs(CASES[name])[1]
    assert torch.equal(taken(features), head.fuse(features))


def test_all_kinds_of_norms_are_among_the_cases():
    counts = {len(loaded(name).fusion.norms) for name in FUSING}
    assert {0, 1, 3} <= counts


@pytest.mark.parametrize("name", ["eagle1", "speculators_eagle1"])
def test_a_head_whose_layer_takes_the_embedding_has_no_fusion(name):
    assert loaded(name).fusion is None


SPEC = pb.FeatureSpec(layers=[1, 2], width=8, dtype=pb.DTYPE_FLOAT32)


def made(num_norms: int = 2) -> FeatureFusion:
    norms = [torch.rand(8 // num_norms) for _ in range(num_norms)]
    return FeatureFusion(torch.randn(4, 8), norms, 1e-5)


def test_weights_that_were_changed_on_their_way_are_refused():
    fusion = made()
    described, data = fusion.describe(), bytearray(b"".join(fusion.chunks()))
    data[77] ^= 1
    with pytest.raises(InvalidArgumentError, match=f"fusion.digest = '{described.digest}': the weights have"):
        load_fusion(described, SPEC, data, CPU)


@pytest.mark.parametrize("change", [-1, 1])
def test_weights_of_another_size_are_refused(change):
    fusion = made()
    data = bytearray(b"".join(fusion.chunks()))
    with pytest.raises(InvalidArgumentError, match=r"fusion.data = '\d+ bytes': must be 160 bytes"):
        load_fusion(fusion.describe(), SPEC, bytearray(len(data) + change), CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 0},
        {"width": 9},
        {"width": 2**32 - 1},
        {"num_norms": 3},
        {"norm_eps": -1e-6},
        {"norm_eps": float("nan")},
        {"norm_eps": float("inf")},
    ],
    ids=str,
)
def test_a_description_without_fusion_is_refused_early(changes):
    described = made().describe()
    described.MergeFrom(pb.FeatureFusion(**changes))
    if "width" in changes:
        described.width = changes["width"]
    with pytest.raises(MismatchError, match="fusion does not fit"):
        fusion_bytes(described, SPEC)
