import importlib.util
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Use one thread: the tensors are too small to gain from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("quick_interpreter").install()
