"""Fixtures of the verifier's tests."""

from __future__ import annotations

import pytest
from drafting_scene import Clock
from engine_scene import make_target, scheduling  # noqa: F401

from verifier_service.drafters import connection
from verifier_service.target.target import Target


@pytest.fixture(scope="session")
def target() -> Target:
    """Return the target of the engines in these tests."""
    return make_target()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the real clock with a fake one."""
    return Clock.stand_in(monkeypatch)


@pytest.fixture
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let links reconnect after milliseconds."""
    monkeypatch.setattr(connection, "BACKOFF_S", (0.02, 0.05))
    monkeypatch.setattr(connection, "REFUSED_RETRY_S", 0.05)
