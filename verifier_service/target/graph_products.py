"""Which library computes the matrix products of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

LIBRARIES = ("cublas", "cublaslt")
# The first is taken unless the other is faster by more than what two measurements of the same graph differ by.
LEAST_GAIN = 0.01


class TimedGraph(Protocol):
    """What can be replayed and timed."""

    def seconds(self) -> float:
        """Time of one replay on the GPU."""
        ...


GraphT = TypeVar("GraphT", bound=TimedGraph)


@dataclass(frozen=True)
class Products(Generic[GraphT]):
    """A graph, and how its products are computed."""

    graph: GraphT
    library: str
    seconds: Mapping[str, float]
    """Of a replay, with each library."""


def with_faster_products(capture: Callable[[], GraphT]) -> Products[GraphT]:
    """Captures a graph with the products of each library, and keeps the faster one.

    cuBLAS and cuBLASLt choose among the same kernels by rules of their own, and neither chooses better for all sizes
    (docs/decisions/009-matrix-products.md).
    """
    graphs = {}
    for library in LIBRARIES:
        with _products_of(library):
            graphs[library] = capture()
    seconds = {library: graph.seconds() for library, graph in graphs.items()}
    first, other = LIBRARIES
    library = other if seconds[other] < (1 - LEAST_GAIN) * seconds[first] else first
    return Products(graphs[library], library, seconds)


@contextmanager
def _products_of(library: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
