import pytest
from tiny_head import TinyHead


@pytest.fixture
def head() -> TinyHead:
    return TinyHead()
