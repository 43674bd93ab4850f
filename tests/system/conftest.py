"""Fixtures with both services as processes, shared by the tests of a group."""

from __future__ import annotations

import pytest
from services import DEMO, Pair, Reference

from models import ModelShelf, prompts_of, session_shelf

NO_DEMO = "models/demo has no trained pair yet"


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return session_shelf(tmp_path_factory)


@pytest.fixture(scope="session")
def pairs(shelf: ModelShelf, tmp_path_factory):
    """A function that returns the `Pair` of a target; each pair starts once."""
    running: dict[str, Pair] = {}

    def pair_of(target: str) -> Pair:
        if target not in running:
            heads = {name: shelf.head(target, name) for name in ("good", "random")}
            running[target] = Pair(shelf.target(target), heads, tmp_path_factory.mktemp(f"{target}-logs"))
        return running[target]

    yield pair_of
    for pair in running.values():
        pair.stop()


@pytest.fixture(scope="session")
def references(shelf: ModelShelf):
    """A function that returns the transformers reference of a target."""
    made: dict[str, Reference] = {}

    def reference_of(target: str) -> Reference:
        if target not in made:
            made[target] = Reference(shelf.target(target), prompts_of(target))
        return made[target]

    return reference_of


@pytest.fixture
def llama(pairs) -> Pair:
    """The Llama target with its good head."""
    pair = pairs("llama")
    pair.use("good")
    return pair


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    if not all((DEMO / part / "config.json").is_file() for part in ("target", "eagle3")):
        pytest.skip(NO_DEMO)
    pair = Pair(DEMO / "target", {"good": DEMO / "eagle3"}, tmp_path_factory.mktemp("demo-logs"))
    pair.use("good")
    yield pair
    pair.stop()
