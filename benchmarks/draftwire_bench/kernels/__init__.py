"""Benchmark of the sampling kernels."""
