"""Which library computes the products of a graph."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from verifier_service.target.graph_products import with_faster_products


@dataclass
class Graph:
    """One that was captured with a library's products, and takes so long."""

    library: str
    taken: float

    def seconds(self) -> float:
        return self.taken


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library that products are computed by, last; torch has but one without CUDA."""
    chosen = ["the operator's"]

    def prefer(library: str | None = None) -> str:
        if library is not None:
            chosen.append(library)
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    return chosen


@pytest.mark.parametrize(
    ("cublas_s", "cublaslt_s", "kept"),
    [
        (0.005, 0.0048, "cublaslt"),
        (0.005, 0.00497, "cublas"),  # within what two measurements differ by
        (0.005, 0.0052, "cublas"),
    ],
)
def test_the_faster_one_is_kept(preferred: list[str], cublas_s: float, cublaslt_s: float, kept: str) -> None:
    times = {"cublas": cublas_s, "cublaslt": cublaslt_s}
    chosen = with_faster_products(lambda: Graph(preferred[-1], times[preferred[-1]]))
    assert (chosen.graph.library, chosen.library) == (kept, kept)
    assert chosen.seconds == times
    assert preferred[-1] == "the operator's"


def test_a_capture_that_fails_leaves_the_choice_as_it_was(preferred: list[str]) -> None:
    def capture() -> Graph:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        with_faster_products(capture)
    assert preferred == ["the operator's", "cublas", "the operator's"]
