"""Services as processes under load, and a table of the faults' effects."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from exact_law import Law
from exact_pair import TRAINED_LENGTH, TRAINED_SEQUENCES, VOCAB, Pair, generate, make_pair, train_head, write_head
from load import FaultRecord
from services import Reference
from stage import Stage

OUTPUT_LENGTH = 40
NUM_PROMPTS = 12
_records = pytest.StashKey[list[FaultRecord]]()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def other_head(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained like the pair's head, with different weights."""
    tokens = generate(pair.target, TRAINED_SEQUENCES, TRAINED_LENGTH, seed=5)
    directory = tmp_path_factory.mktemp("other") / "head"
    write_head(train_head(pair.target, tokens, torch.arange(VOCAB), seed=4), directory)
    return directory


@pytest.fixture(scope="session")
def reference(pair: Pair) -> Reference:
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCAB, (NUM_PROMPTS, 6), generator=draw).tolist()
    return Reference(pair.target_dir, prompts, OUTPUT_LENGTH)


@pytest.fixture(scope="session")
def law(pair: Pair) -> Law:
    return Law(pair, (3, 0, 6, 6, 4, 1))


@pytest.fixture(scope="session")
def undisturbed(
    pair: Pair, other_head: Path, reference: Reference, law: Law, tmp_path_factory: pytest.TempPathFactory
) -> float:
    """Accepted drafts per verify step of greedy rounds without a draft deadline."""
    with contextlib.ExitStack() as close:
        stage = Stage(pair, other_head, reference, law, math.nan, tmp_path_factory.mktemp("undisturbed"), close)
        load = stage.load([stage.drafter().address], "--draft-deadline-ms", "off")
        first, second = load.wait_for_rounds(2)
    assert (first.accepted, first.verify_steps) == (second.accepted, second.verify_steps)
    assert first.acceptance > 0.5, "hardly a draft is accepted without any fault"
    return first.acceptance


@pytest.fixture
def stage(
    pair: Pair, other_head: Path, reference: Reference, law: Law, undisturbed: float, tmp_path: Path
) -> Iterator[Stage]:
    with contextlib.ExitStack() as close:
        yield Stage(pair, other_head, reference, law, undisturbed, tmp_path, close)


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> Callable[[FaultRecord], None]:
    """Return a function that adds a row to the table that is printed at the end."""
    return request.config.stash.setdefault(_records, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    records = config.stash.get(_records, [])
    if not records:
        return
    terminalreporter.section("fault matrix")
    columns = (
        *("fault", "requests", "failures", "sampled during"),
        *("accepted before", "during", "after", "back after, s", "chi2"),
    )
    terminalreporter.write_line(f"| {' | '.join(columns)} |")
    terminalreporter.write_line(f"|---{'|---:' * (len(columns) - 1)}|")
    for one in records:
        terminalreporter.write_line(
            f"| {one.fault} | {one.requests} | {one.failures} | {one.sampled_during} "
            f"| {one.before:.2f} | {one.during:.2f} | {one.after:.2f} | {one.recovery_s:.1f} | {one.refutation:.2f} |"
        )
