"""The `Drafting` service: streams, handshakes, and the engine's thread."""
