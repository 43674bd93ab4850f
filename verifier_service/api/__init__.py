"""The services that clients call, and their common path into the engine."""
