"""The engine's process, the workers of a split target, and the start of both."""
