"""Latency of tensors between two processes of one host."""
