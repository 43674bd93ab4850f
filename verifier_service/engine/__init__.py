"""The engine: planning, executing and committing steps."""
