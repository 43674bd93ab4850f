"""Throughput and latency of a verifier under load."""
