import pytest

from models import session_shelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return session_shelf(tmp_path_factory)
