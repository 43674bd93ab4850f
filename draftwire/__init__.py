"""Speculative decoding served by two gRPC services."""
