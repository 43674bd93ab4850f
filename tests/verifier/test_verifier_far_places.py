"""A drafter that is far away costs next to nothing: places of three hosts; `make test-pacing` plays all of them."""

from __future__ import annotations

import statistics

import pytest
from far_places import LEAST_MEAN, LEAST_RATIO, Case, ratios

PROMPT_LENGTHS = {"H100, slow at times": 64, "H100, stalls": 256, "H200": 256}


@pytest.mark.parametrize("host", PROMPT_LENGTHS)
def test_no_place_is_much_slower_than_without_drafts(host):
    found = ratios(Case(host, 32, PROMPT_LENGTHS[host], 0.05, 0))
    assert min(one.counted for one in found) > LEAST_RATIO
    assert statistics.mean(one.counted for one in found) >= LEAST_MEAN
