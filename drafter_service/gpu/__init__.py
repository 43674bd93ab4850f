"""Triton kernels of the drafter; what they compute is said by the torch functions that they stand in for."""
