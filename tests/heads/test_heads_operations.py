"""The Triton kernels of a head's layers match torch, in the interpreter and compiled on CUDA."""

from __future__ import annotations

import pytest
import torch

from drafter_service.heads import operations

layers = pytest.importorskip("drafter_service.heads.kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates floats to bfloat16 instead of rounding.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# Torch and the kernels sum in different orders, so that a rounded result may differ by one step.
STEPS = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(given: torch.Tensor, expected: torch.Tensor) -> None:
    assert given.dtype == expected.dtype
    step = STEPS[given.dtype]
    torch.testing.assert_close(given.cpu(), expected, rtol=step, atol=step / 4)


def on_cpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (5, 48), (3, 1030)])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    x, added = draw(rows, size, dtype=dtype), draw(rows, 2 * size, dtype=dtype, seed=1)[:, size:]
    weight = draw(size, dtype=dtype, seed=2)
    check(layers.rms_norm(x, weight, 1e-5), operations.rms_norm(*on_cpu(x, weight), 1e-5))
    for one, two in ((x, added), (added, x)):
        total, normed = layers.add_rms_norm(one, two, weight, 1e-5)
        expected_total, expected = operations.add_rms_norm(*on_cpu(one, two, weight), 1e-5)
        check(total, expected_total)
        check(normed, expected)


@pytest.mark.gpu  # Triton's interpreter rounds to float8 without a carry to the exponent
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float8(dtype: torch.dtype) -> None:
    x = 30 * draw(5, 2 * 300, dtype=dtype)[:, 300:]
    given, expected = layers.quantise(x, 0.1), operations.quantise(x.cpu(), 0.1)
    assert given.dtype == expected.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(given.float().cpu(), expected.float(), rtol=0, atol=0)
    assert float(given.float().abs().max()) == operations.LARGEST_FP8


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_layers_input(dtype: torch.dtype) -> None:
    tokens = torch.tensor([4, 0, 6, 6], device=DEVICE)
    embedding, g = draw(7, 40, dtype=dtype), draw(4, 80, dtype=dtype, seed=1)[:, :40]
    weights = draw(2, 40, dtype=dtype, seed=2)
    given = layers.first_input(tokens, embedding, (weights[0], 1e-5), g, (weights[1], 1e-3))
    tokens, embedding, g, weights = on_cpu(tokens, embedding, g, weights)
    check(given, operations.first_input(tokens, embedding, (weights[0], 1e-5), g, (weights[1], 1e-3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
def test_rows_enter_one_layer_of_a_cache(dtype: torch.dtype, is_normed: bool) -> None:
    merged = draw(4, 3, 2, 3, 20, dtype=dtype)  # rows, layers, keys and values, heads, head size
    positions, slots = torch.tensor([3, 0, 9, 4], device=DEVICE), torch.tensor([17, 40, 2, 31], device=DEVICE)
    angles = draw(2, 12, 10, dtype=dtype, seed=1)
    norm = (draw(20, dtype=dtype, seed=2), 1e-5) if is_normed else None
    caches = [draw(2, 48, 3, 20, dtype=dtype, seed=3) for _ in range(2)]
    layers.store_keys_(merged[:, 1], positions, slots, *angles, norm, *caches[0])
    expected = on_cpu(*caches[1])
    norm = None if norm is None else (norm[0].cpu(), norm[1])
    operations.store_keys_(merged.cpu()[:, 1], *on_cpu(positions, slots, *angles), norm, *expected)
    step = 4 * STEPS[dtype]  # torch rounds each product of a rotation, the kernel their sum
    for given, wanted in zip(caches[0], expected, strict=True):
        torch.testing.assert_close(given.cpu(), wanted, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 20])
@pytest.mark.parametrize("is_normed", [False, True])
def test_rotation_in_place_beside_the_values(dtype: torch.dtype, size: int, is_normed: bool) -> None:
    heads = draw(6, 5, size, dtype=dtype)  # two of queries, two of keys, one of values
    cosines, sines = draw(11, size // 2, dtype=dtype, seed=1), draw(11, size // 2, dtype=dtype, seed=2)
    positions = torch.tensor([0, 3, 10, 10, 1, 2], device=DEVICE)
    weights = draw(2, size, dtype=dtype, seed=3)
    expected, positions_, cosines_, sines_, weights_ = on_cpu(heads.clone(), positions, cosines, sines, weights)
    layers.rotate_(heads[:, :4], 2, positions, cosines, sines, (*weights, 1e-5) if is_normed else None)
    operations.rotate_(expected[:, :4], 2, positions_, cosines_, sines_, (*weights_, 1e-5) if is_normed else None)
    # Torch rounds the products before it adds them.
    torch.testing.assert_close(heads.cpu(), expected, rtol=2 * STEPS[dtype], atol=4 * STEPS[dtype])
    assert torch.equal(heads[:, 4].cpu(), expected[:, 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype: torch.dtype) -> None:
    x = 4 * draw(3, 2 * 1100, dtype=dtype)
    check(layers.silu_mul(x), operations.silu_mul(x.cpu()))


def test_rows_that_are_not_finite_stay_their_own() -> None:
    x, weight = draw(3, 48, dtype=torch.float32), draw(48, dtype=torch.float32)
    x[1, 5] = torch.nan
    normed = layers.rms_norm(x, weight, 1e-5)
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


def test_no_rows() -> None:
    x = draw(0, 48, dtype=torch.float32)
    assert layers.rms_norm(x, draw(48, dtype=torch.float32), 1e-5).shape == (0, 48)
    assert layers.silu_mul(x).shape == (0, 24)
