"""What the tests of several parts share."""

from __future__ import annotations

import pytest
from drafting_scene import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands in for the real one."""
    return Clock.stand_in(monkeypatch)
