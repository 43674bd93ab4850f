"""Triton's interpreter without repeated work, and compatible with numpy 2.4.

Results do not change: `test_kernels_interpreter.py` compares them with the unmodified interpreter's.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, ReduceOps, TensorHandle

INTERPRETERS_OWN = ReduceOps.generic_reduce


def install() -> None:
    """Patch the interpreter. Call once per process."""
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    InterpretedFunction.__call__ = _call
    ReduceOps.generic_reduce = reduce_by_halves


def _with_index(patch: Any) -> Any:
    """Give tensors `__index__`: Triton 3.6 holds loop bounds in one-element arrays, which numpy 2.4 rejects as ints."""

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch_with_index


def _remembered(np_dtype_of: Any) -> Any:
    """Cache dtypes by name; Triton builds a table of all dtypes for every operation."""
    known: dict[str, np.dtype] = {}

    def remembered(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype_of(dtype)
        return known[name]

    return remembered


@functools.cache
def _languages(function: Any) -> list[Any]:
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def _call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a kernel. Patch Triton's language only if it is not patched yet, not at every call."""
    if any(tl.core.is_builtin(language.load) for language in _languages(self.fn)):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def reduce_by_halves(self: ReduceOps, input: Any) -> list[Any]:
    """Combine all pairs of neighbours at once until one value is left; Triton combines one element after the other.

    `combine_fn` must be associative, as on a GPU.
    """
    values, axis = self.unravel(input, self.axis)
    num_dims = len(values[0].handle.data.shape)
    while (size := values[0].handle.data.shape[axis]) > 1:
        assert size % 2 == 0, size
        sides = ([_every_second(value, axis, first) for value in values] for first in (0, 1))
        combined = self.combine_fn.fn(*(value for side in sides for value in side))
        combined = combined if isinstance(combined, tuple) else (combined,)
        values = [self.to_tensor(new.handle.data, old.dtype) for new, old in zip(combined, values, strict=True)]
    reduced = []
    for value in values:
        data = value.handle.data
        if not self.keep_dims:
            data = data.squeeze(axis) if self.axis is not None else data.item()
        elif self.axis is None:
            data = data.reshape((1,) * num_dims)
        reduced.append(self.to_tensor(data, value.dtype))
    return reduced


def _every_second(value: Any, axis: int, first: int) -> Any:
    data = value.handle.data[(slice(None),) * axis + (slice(first, None, 2),)]
    return tl.tensor(TensorHandle(data, value.dtype.scalar), tl.block_type(value.dtype, list(data.shape)))
