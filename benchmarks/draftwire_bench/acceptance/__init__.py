"""Acceptance of a pair, beside its closed forms."""
