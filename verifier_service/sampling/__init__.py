"""Sampling and rejection with each request's parameters."""
