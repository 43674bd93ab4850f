"""Split a target over the ranks of one host, and run the products that need all ranks.

Layers are split by transformers' tensor-parallel plan of the model, but not by transformers' code, which differs
between versions (hooks, later DTensor) and would prevent merging the projections of a split layer into one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from draftwire.contract.errors import CheckpointError, InvalidArgumentError, ServerError

# Styles of transformers' plans.
_COLUMNS, _ROWS, _GATHERED = "colwise", "rowwise", "colwise_gather_output"
# Styles of layers that are whole on every rank: norms of a head, and the input embedding.
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
_SPLIT_SIZES = ("num_key_value_heads", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Rank:
    """One of the `size` processes that share a target."""

    index: int
    size: int


ALONE = Rank(0, 1)


class _Split(NamedTuple):
    parent: nn.Module
    name: str
    linear: nn.Linear
    style: str


def split_target(model: Any, name: str, rank: Rank, device: torch.device) -> None:
    """Replace every layer that the model's plan splits by this rank's part, on `device`.

    Query, key and value are split by heads, so that a rank has whole heads. The states between layers and the logits
    are whole on every rank.

    Args:
        model: The model with all weights, on any device. On the meta device this call only checks that the model can be
            split.
        name: The operator's name of the target, for messages.

    Raises:
        CheckpointError: If transformers has no tensor-parallel plan for the model, or a plan with unsupported styles.
        InvalidArgumentError: If a size of the model is not a multiple of the number of ranks.
    """
    if rank.size == 1:
        return
    splits = list(_find_splits(model, name))
    _check_sizes(model.config, name, splits, rank.size)
    for parent, child, linear, style in splits:
        if style == _COLUMNS:
            _keep_columns(linear, rank, device)
        elif style == _ROWS:
            setattr(parent, child, _RowProduct(linear, rank, device))
        else:
            setattr(parent, child, _GatheredProduct(linear, rank, device))


def _find_splits(model: Any, name: str) -> Iterator[_Split]:
    plan: dict[str, str] = model.tp_plan
    if not set(plan.values()) - _WHOLE - {_GATHERED}:
        raise CheckpointError(
            f"{name}: transformers has no tensor-parallel plan for {type(model).__name__}; use --tensor-parallel-size 1"
        )
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        for pattern, style in plan.items():
            if style in _WHOLE or not fnmatchcase(path, pattern):
                continue
            is_served = style in (_COLUMNS, _ROWS) or (style == _GATHERED and module is head)
            if type(module) is not nn.Linear or not is_served:
                raise CheckpointError(
                    f"{name}: its tensor-parallel plan splits {pattern} ({type(module).__name__}) as {style!r}, which "
                    "is not served; use --tensor-parallel-size 1"
                )
            parent, _, child = path.rpartition(".")
            yield _Split(model.get_submodule(parent), child, module, style)


def _check_sizes(config: Any, name: str, splits: list[_Split], size: int) -> None:
    """Check that heads divide evenly over the ranks."""
    try:
        sizes = [(field, value) for field in _SPLIT_SIZES if isinstance(value := getattr(config, field, None), int)]
    except RuntimeError as error:  # transformers' own
        raise CheckpointError(
            f"{name}: a size that layers do not have in common is not split; use --tensor-parallel-size 1: {error}"
        ) from error
    for _, _, linear, style in splits:
        if style == _COLUMNS:
            sizes.append(("out_features", linear.out_features))
        elif style == _ROWS:
            sizes.append(("in_features", linear.in_features))
    common = math.gcd(*(value for _, value in sizes))
    if common % size:
        shown = ", ".join(f"{field} = {value}" for field, value in dict.fromkeys(sizes) if value % size)
        allowed = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
        raise InvalidArgumentError(
            "tensor_parallel_size", size, f"must divide the target's {shown}; allowed: {allowed}"
        )


def _own_part(length: int, rank: Rank) -> slice:
    """Return the rank's share of `length` rows; those of the last ranks may be shorter."""
    share = -(-length // rank.size)
    return slice(share * rank.index, min(share * (rank.index + 1), length))


def _moved(tensor: Tensor, device: torch.device) -> nn.Parameter:
    """Return a copy, so that a part does not keep the memory of the whole."""
    return nn.Parameter(
        tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format), requires_grad=False
    )


def _keep_columns(linear: nn.Linear, rank: Rank, device: torch.device) -> None:
    part = _own_part(linear.out_features, rank)
    linear.weight = _moved(linear.weight[part], device)
    if linear.bias is not None:
        linear.bias = _moved(linear.bias[part], device)
    linear.out_features = linear.weight.shape[0]


class _RowProduct(nn.Module):
    """A layer split by input columns: the products of all ranks are summed."""

    def __init__(self, linear: nn.Linear, rank: Rank, device: torch.device) -> None:
        super().__init__()
        self.weight = _moved(linear.weight[:, _own_part(linear.in_features, rank)], device)
        self.bias = None if linear.bias is None else _moved(linear.bias, device)

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., out_features], whole on every rank, from the rank's states [..., in_features / size]."""
        summed = torch.ops.draftwire.summed_product(states, self.weight)
        return summed if self.bias is None else summed + self.bias


class _GatheredProduct(nn.Module):
    """The output embedding, split by vocabulary."""

    def __init__(self, linear: nn.Linear, rank: Rank, device: torch.device) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self._size = rank.size
        share = -(-linear.out_features // rank.size)
        own = linear.weight[_own_part(linear.out_features, rank)]
        # Gathering needs parts of one size: the last part is padded with zeros.
        self.weight = _moved(F.pad(own, (0, 0, 0, share - own.shape[0])), device)
        self.bias = None if linear.bias is None else _moved(linear.bias, device)

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., out_features], whole on every rank, from states [..., in_features]."""
        gathered = torch.ops.draftwire.gathered_product(states, self.weight, self._size)[..., : self.out_features]
        return gathered if self.bias is None else gathered + self.bias


# One operator for product and exchange, so that the compiler sees no other ranks, and sums are in place.


def _summed_product(states: Tensor, weight: Tensor) -> Tensor:
    product = F.linear(states, weight)
    exchange(dist.all_reduce, product)
    return product


def _gathered_product(states: Tensor, weight: Tensor, size: int) -> Tensor:
    product = F.linear(states, weight)
    parts = product.new_empty(size, *product.shape)
    exchange(dist.all_gather, list(parts), product)
    return parts.movedim(0, -2).flatten(-2)


def exchange(collective: Callable[..., object], *args: object) -> None:
    """Run a collective of all ranks.

    Raises:
        ServerError: If the collective fails, for example because another rank has ended.
    """
    try:
        collective(*args)
    except RuntimeError as error:
        raise ServerError("an exchange between the ranks of the target failed; the log says why") from error


def _summed_shape(states: Tensor, weight: Tensor) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


def _gathered_shape(states: Tensor, weight: Tensor, size: int) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0] * size)


_library = torch.library.Library("draftwire", "FRAGMENT")
_library.define("summed_product(Tensor states, Tensor weight) -> Tensor")
_library.define("gathered_product(Tensor states, Tensor weight, int size) -> Tensor")
_library.impl("summed_product", _summed_product, "CompositeExplicitAutograd")
_library.impl("gathered_product", _gathered_product, "CompositeExplicitAutograd")
torch.library.register_fake("draftwire::summed_product", _summed_shape, lib=_library)
torch.library.register_fake("draftwire::gathered_product", _gathered_shape, lib=_library)
