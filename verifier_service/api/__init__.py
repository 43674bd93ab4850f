"""The Generation service: what clients call."""
