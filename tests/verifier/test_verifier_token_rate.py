"""Output tokens per second."""

from __future__ import annotations

from verifier_service.core.token_rate import WINDOW_S, TokenRate


def test_the_rate_is_over_the_window():
    rate = TokenRate()
    assert rate.tokens_per_s == 0
    rate.count(30)
    rate.count(20)
    assert rate.tokens_per_s == 50 / WINDOW_S
