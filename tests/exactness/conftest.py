from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from exact_law import Law
from exact_pair import Pair, make_pair

from draftwire_bench.processes import start_drafter
from verifier_service.target.target import Target, load_target

PROMPTS = ((3, 0, 6, 6, 4, 1), (7, 7, 2))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """One torch thread, because the tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def laws(pair: Pair) -> list[Law]:
    return [Law(pair, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def target(pair: Pair) -> Target:
    """The target as a verifier in this process loads it."""
    return load_target(pair.target_dir, "target", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def drafters(pair: Pair) -> Iterator[dict[str, str]]:
    """Addresses of drafter processes, by the name of their head."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(start_drafter(directory, pair.target_dir, "--device", "cpu")).address
            for name, directory in pair.head_dirs.items()
        }
