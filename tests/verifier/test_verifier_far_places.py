"""A drafter that is far away costs next to nothing at any of the places that `make test-pacing` plays more of."""

from __future__ import annotations

import pytest
from far_places import HOSTS, LEAST_RATIO, PLACES, Case, ratios

PROMPT_LENGTHS = dict(zip(HOSTS, (64, 256, 64, 256, 64), strict=True))


@pytest.mark.parametrize("host", HOSTS)
def test_no_place_is_slower_than_without_drafts(host):
    """Nor do drafts that gain stay away on an H100 over a link that is narrower than the one before it: up to df350ff,
    where bytes were thought to take what they took before, 0.99 of the tokens."""
    found = ratios(Case(host, 32, PROMPT_LENGTHS[host], 0.05, 0))
    assert min(one.counted for one in found) > LEAST_RATIO
    if host == "H100":
        near = [one.counted for (delay_ms, _), one in zip(PLACES, found, strict=True) if delay_ms < 5]
        assert min(near) > 1.03
