from collections.abc import Iterator

import pytest
import torch

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only cost."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def interpreter_of_numpy_2_4() -> None:
    """Triton 3.6's interpreter holds loop bounds in arrays of one element; numpy 2.4 no longer takes one as an int."""
    if interpreter is None:
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index
