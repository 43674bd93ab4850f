"""Torch reference of every kernel: runs on any device, and serves on the CPU."""
