"""Torch reference of all kernels, for any device; used for serving on the CPU."""
