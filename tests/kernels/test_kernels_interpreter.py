"""The quick interpreter gives the same results as Triton's own."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from quick_interpreter import INTERPRETERS_OWN
from triton.runtime.interpreter import ReduceOps

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled here")
NAN, INF = float("nan"), float("inf")


@triton.jit
def _first_of_the_largest(value, place, other_value, other_place):
    is_other = (other_value > value) | ((other_value == value) & (other_place < place))
    return tl.where(is_other, other_value, value), tl.where(is_other, other_place, place)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _reduce_kernel(x, largest, places, of_all, axis: tl.constexpr, keep: tl.constexpr, left: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + at)
    value, place = tl.reduce((value, at), axis, _first_of_the_largest, keep_dims=keep)
    out = tl.arange(0, left)
    tl.store(largest + out, tl.reshape(value, (left,)))
    tl.store(places + out, tl.reshape(place, (left,)))
    if not keep:
        tl.store(of_all, tl.reduce(tl.load(x + at), None, _larger_or_nan))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("special", [(), (NAN,), (INF, INF, -INF)])
def test_reductions(special: tuple[float, ...], axis: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(5, (4, 8), generator=torch.Generator().manual_seed(1)).float()
    x.view(-1)[3 : 3 + 7 * len(special) : 7] = torch.tensor(special)

    def reduced() -> list[torch.Tensor]:
        left = 4 if axis else 8
        largest, places, of_all = torch.zeros(left), torch.zeros(left, dtype=torch.int32), torch.zeros(1)
        _reduce_kernel[(1,)](x, largest, places, of_all, axis, keep, left)
        return [largest, places, of_all]

    quick = reduced()
    monkeypatch.setattr(ReduceOps, "generic_reduce", INTERPRETERS_OWN)
    for own, other in zip(reduced(), quick, strict=True):
        assert torch.equal(own.nan_to_num(7777.0), other.nan_to_num(7777.0))
    if not special:
        assert torch.equal(quick[0], x.amax(axis))
