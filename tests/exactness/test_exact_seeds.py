"""200 seeded requests have the same tokens alone, batched, with any or no drafts, and after their drafter dies."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from exact_pair import Pair
from exact_services import Sample, sample, serve_verifier
from waiting import wait_for

from draftwire import Client
from draftwire_bench.processes import start_drafter
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_seeds")

REQUESTS = 200
PROMPT = (3, 0, 6, 6, 4, 1)
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.1}
K = {"num_speculative_tokens": 3}
GUMBEL = {"draft_sample_method": "gumbel"}
COUPLED = {"rejection_sample_method": "coupled"}


def tokens(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    return [one.tokens for one in samples]


def count(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return the numbers of verified drafts and of accepted drafts."""
    statistics = [one.statistics for one in samples]
    return sum(sum(one.drafted) for one in statistics), sum(sum(one.accepted) for one in statistics)


@pytest.fixture(scope="module")
def alone(target: Target) -> list[tuple[int, ...]]:
    """The tokens of each request alone, without drafts."""
    with serve_verifier(target, {}, []) as address:
        found = tokens(sample(address, PROMPT, range(REQUESTS), at_once=1, **OPTIONS))
    assert len(set(found)) > REQUESTS / 2
    return found


@pytest.mark.parametrize(
    ("config", "head", "deadline_s", "options"),
    [
        (K, "full", None, {}),
        (K, "full", None, {"at_once": 1}),
        (K, "full", None, {"num_speculative_tokens": 0}),
        ({"num_speculative_tokens": 6}, "reduced", None, {"at_once": 30}),
        (K, "full", 0.5, {"at_once": 30}),
        (K, "full", 0.01, {}),
        ({**K, **GUMBEL}, "full", None, {}),
        ({**K, **COUPLED}, "reduced", None, {}),
        ({**K, **GUMBEL, **COUPLED}, "full", None, {}),
    ],
    ids=["drafts", "alone", "off", "6 drafts", "adaptive", "late", "gumbel", "greedy coupled", "gumbel coupled"],
)
def test_seeded_tokens_do_not_depend_on_drafts(
    config: dict[str, Any],
    head: str,
    deadline_s: float | None,
    options: dict[str, Any],
    target: Target,
    drafters: dict[str, str],
    alone: list[tuple[int, ...]],
) -> None:
    with serve_verifier(target, config, [drafters[head]], deadline_s) as address:
        samples = sample(address, PROMPT, range(REQUESTS), **OPTIONS, **options)
    assert tokens(samples) == alone
    drafted, accepted = count(samples)
    if deadline_s is None:
        assert (0 < accepted < drafted) == (options.get("num_speculative_tokens") != 0)


def test_seeded_tokens_outlive_their_drafter(pair: Pair, target: Target, alone: list[tuple[int, ...]]) -> None:
    with (
        start_drafter(pair.head_dirs["full"], pair.target_dir, "--device", "cpu") as drafter,
        serve_verifier(target, K, [drafter.address]) as address,
        ThreadPoolExecutor(1) as pool,
        Client(address) as client,
    ):
        running = pool.submit(sample, address, PROMPT, range(REQUESTS), at_once=20, **OPTIONS)
        wait_for(lambda: client.info().drafters[0].drafted > 200, "drafts")
        drafter.kill()
        samples = running.result()
    assert tokens(samples) == alone
    assert any(sum(one.statistics.drafted) == 0 for one in samples), "all had drafts to the end"
    assert count(samples)[1] > 0
