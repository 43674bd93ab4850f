"""The services that clients call, and their one path into the engine."""
