"""The engine: plan, execute and commit steps."""
