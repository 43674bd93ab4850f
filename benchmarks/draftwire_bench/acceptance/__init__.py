"""Acceptance of a pair, compared to closed forms."""
