"""Benchmarks of speed and acceptance; `draftwire bench` runs them."""
