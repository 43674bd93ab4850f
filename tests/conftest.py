"""Settings that every test runs under."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

# Before torch or tokenizers are imported: two test processes share the machine's cores, and nothing is downloaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Triton reads it when it is first imported, which transformers does too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from draftwire.v1 import draft_pb2
from draftwire_bench.link import Link


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more GPUs than there are: one, or `pytest.mark.gpu(2)`."""
    for item in items:
        mark = item.get_closest_marker("gpu")
        needed = 0 if mark is None else max(mark.args, default=1)
        if needed > torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason="needs a GPU" if needed == 1 else f"needs {needed} GPUs"))


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        link = Link()
    except OSError as error:
        pytest.skip(f"a link to a network namespace needs Linux, root and iproute2: {error}")
    with link:
        yield link


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often messages of drafting streams were encoded, by kind; asking for a size encodes too.

    Counts those of stubs and servers that are made after it.
    """
    counts: Counter[str] = Counter()

    def counted(encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def count(message: Any) -> Any:
            counts[message.DESCRIPTOR.name] += 1
            return encode(message)

        return count

    for kind in (draft_pb2.DraftRequest, draft_pb2.DraftResponse):
        for method in ("SerializeToString", "ByteSize"):
            monkeypatch.setattr(kind, method, counted(getattr(kind, method)))
    return counts
