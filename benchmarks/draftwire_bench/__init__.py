"""Measurements of speed and acceptance, behind `draftwire bench`."""
