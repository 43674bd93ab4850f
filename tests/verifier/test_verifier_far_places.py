"""A drafter that is far away costs next to nothing at any of the places that `make test-pacing` plays more of."""

from __future__ import annotations

import statistics

import pytest
from far_places import HOSTS, LEAST_MEAN, LEAST_RATIO, Case, ratios
from paced_world import KNOWN_LOSS

PROMPT_LENGTHS = dict(zip(HOSTS, (64, 256, 64, 256, 64), strict=True))


@pytest.mark.parametrize(
    "host", [pytest.param(host, marks=KNOWN_LOSS) if host == "H100, stalls" else host for host in HOSTS]
)
def test_no_place_is_much_slower_than_without_drafts(host):
    found = ratios(Case(host, 32, PROMPT_LENGTHS[host], 0.05, 0))
    assert min(one.counted for one in found) > LEAST_RATIO
    assert statistics.mean(one.counted for one in found) >= LEAST_MEAN
