from collections.abc import Iterator

import pytest
from served import ServedDrafter, serve_drafter
from tiny_head import TinyHead


@pytest.fixture
def head() -> TinyHead:
    return TinyHead()


@pytest.fixture
def drafter(head: TinyHead) -> Iterator[ServedDrafter]:
    with serve_drafter(head) as served:
        yield served
