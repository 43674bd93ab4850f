"""Merge projections of one input into one product: query, key and value; gate and up.

Small batches read each weight once per product, and a product with few output columns does not fill a GPU. A recorded
forward pass shows which linear layers share an input, so that no list of layer names is needed. Weights are sharded
before they are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ProjectionGroup:
    """Linear layers of one module that read the same tensor, in the order of their calls."""

    parent: nn.Module
    names: tuple[str, ...]

    @property
    def linears(self) -> list[nn.Linear]:
        """Return the layers."""
        return [getattr(self.parent, name) for name in self.names]


def find_projections(model: nn.Module, forward: Callable[[], object]) -> list[ProjectionGroup]:
    """Return the groups of at least two layers; `forward` runs `model` once without compilation.

    Layers of a group are plain `nn.Linear` without hooks, of one dtype and device, all with or all without a bias, and
    called once.
    """
    parents = {
        module: (parent, name)
        for parent in model.modules()
        for name, module in parent.named_children()
        if _is_plain(module)
    }
    with _recorded_calls(parents) as calls:
        forward()
    counts: dict[nn.Module, int] = {}
    for module, _ in calls:
        counts[module] = counts.get(module, 0) + 1
    groups: list[list[nn.Linear]] = []
    previous: tuple[nn.Linear, Tensor] | None = None
    for module, entering in calls:
        if counts[module] > 1:
            previous = None
            continue
        if previous is None or previous[1] is not entering or not _are_alike(parents, previous[0], module):
            groups.append([])
        groups[-1].append(module)
        previous = (module, entering)
    return [
        ProjectionGroup(parents[group[0]][0], tuple(parents[linear][1] for linear in group))
        for group in groups
        if len(group) > 1
    ]


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _are_alike(parents: dict[Any, tuple[nn.Module, str]], one: nn.Linear, other: nn.Linear) -> bool:
    return (
        parents[one][0] is parents[other][0]
        and (one.bias is None) == (other.bias is None)
        and (one.weight.dtype, one.weight.device) == (other.weight.dtype, other.weight.device)
    )


@contextmanager
def _recorded_calls(modules: Any) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """Record the calls of `modules` and their input tensors, in order, while the context lasts."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def record(module: Any, args: tuple[Tensor, ...]) -> None:
        calls.append((module, args[0]))

    handles = [module.register_forward_pre_hook(record) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def merge_projections(groups: Sequence[ProjectionGroup]) -> None:
    """Replace the layers of each group in their module: the first layer computes the product of all.

    The separate weights are freed group by group, so that only one group's weights are in memory twice.
    """
    for group in groups:
        merged = MergedProjection(group.linears)
        setattr(group.parent, group.names[0], merged)
        for name in group.names[1:]:
            setattr(group.parent, name, _Part(merged))


class MergedProjection(nn.Module):
    """The first projection of a group: computes all projections. The other layers return their parts when they are
    called next.

    It stores no tensor between forward passes, so that its state is equal at each call of a compiled graph.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._left: tuple[Tensor, ...] = ()

    def forward(self, states: Tensor) -> Tensor:
        """Compute all projections of states [..., in_features], and return the first, a view into the product."""
        self._left = F.linear(states, self.weight, self.bias).split(self.sizes, dim=-1)
        return self.next_projection()

    def next_projection(self) -> Tensor:
        """Return the next projection of the last states."""
        taken, self._left = self._left[0], self._left[1:]
        return taken


class _Part(nn.Module):
    """A projection after the first of its group."""

    def __init__(self, merged: MergedProjection) -> None:
        super().__init__()
        self._merged = (merged,)  # in a tuple, so that the module is not a submodule and its weight has one name

    def forward(self, _states: Tensor) -> Tensor:
        return self._merged[0].next_projection()
