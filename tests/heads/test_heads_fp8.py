"""Heads whose products with normed inputs are computed in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pairs import CASES, CPU, Pair

from drafter_service.heads.chain import ChainHead
from drafter_service.heads.dflash import DFlashHead
from drafter_service.heads.fp8 import Fp8Product, check_device
from drafter_service.heads.layers import Projection, RMSNorm
from drafter_service.heads.operations import LARGEST_FP8, quantise
from draftwire.contract.errors import CheckpointError, InvalidArgumentError
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows

# Two roundings to 4 significant bits, of weight and input, over many terms.
TYPICAL_ERROR = 0.038


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(given: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error's size over that of the exact values."""
    return float((given.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float32, "cpu"),
        (torch.bfloat16, "cpu"),
        pytest.param(torch.bfloat16, "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_product_has_the_error_of_two_roundings(dtype: torch.dtype, device: str, scale: float) -> None:
    """Whatever the sizes of weights and inputs are."""

    def drawn(*shape: int, seed: int) -> torch.Tensor:
        return normal(*shape, seed=seed).to(device)

    norm = RMSNorm((scale * drawn(256, seed=0).abs()).to(dtype), 1e-6)
    projection = Projection((drawn(512, 256, seed=1) / scale).to(dtype), drawn(512, seed=2).to(dtype))
    x = norm(drawn(33, 256, seed=3).to(dtype))
    exact = projection(x)
    projection.use_fp8(norm)
    assert projection.weight.dtype == torch.float8_e4m3fn
    given = projection(x)
    assert given.dtype == dtype
    assert 0.5 * TYPICAL_ERROR < error(given, exact) < 1.5 * TYPICAL_ERROR


def test_no_normed_row_exceeds_the_bound() -> None:
    norm = RMSNorm(torch.tensor([1.0, -3.0, *[0.5] * 62]), 1e-6)
    rows = torch.eye(64)[:3] * 1e4
    assert float(norm(rows).abs().max()) == pytest.approx(norm.largest(), rel=1e-5) == pytest.approx(3 * math.sqrt(64))
    assert bool((norm(normal(1000, 64)).abs() <= norm.largest()).all())


def test_larger_values_become_the_largest() -> None:
    assert quantise(torch.tensor([900.0, -1e9, 2.0]), 2.0).float().tolist() == [LARGEST_FP8, -LARGEST_FP8, 1.0]


@pytest.mark.parametrize("shape", [(24, 32), (32, 40)])
def test_odd_sizes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match=rf"multiples of 16; the head has one of \[{shape[0]}, {shape[1]}\]"):
        Fp8Product(normal(*shape), 1.0)


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(InvalidArgumentError, match=r"quantization = 'fp8': needs .* 8\.9 or newer.*cuda:0 has 8\.0"):
        check_device(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_device(torch.device("cuda:0"))
    check_device(CPU)


def results(pair: Pair, **options: str) -> torch.Tensor:
    """Return the logits of one pass of a head over five rows of one sequence, or the states of a block of drafts."""
    head = pair.load(**options)
    cache = KVCache(head.spec.layer_shapes, 8, torch.float32, CPU)

    def rows(count: int) -> RaggedBatch:
        return RaggedBatch([SequenceRows([1, 2], 0, count)], CPU)

    if isinstance(head, DFlashHead):
        size = head.spec.block_rows
        return head.forward(torch.arange(1), torch.arange(size), cache, rows(size))
    assert isinstance(head, ChainHead)
    g = head.fuse(normal(5, head.spec.feature_width))
    return head.logits(head.forward(torch.arange(5), g, torch.arange(5), cache, rows(5)))


# The other heads have a vocabulary of 24 tokens.
FITTING = [name for name, case in CASES.items() if case.draft_vocab_size % 16 == 0]


@pytest.mark.parametrize("name", FITTING)
def test_every_family_computes_similar_results(name: str, make: Callable[..., Pair]) -> None:
    pair = make(name)
    exact, given = results(pair), results(pair, quantization="fp8")
    assert 0.0 < error(given, exact) < 0.15


def test_another_vocabulary_is_refused(make: Callable[..., Pair]) -> None:
    with pytest.raises(CheckpointError, match=r"the head has one of \[24, 32\]"):
        make("eagle3").load(quantization="fp8")
