"""The drafter: heads, draft engine and the `Drafting` service."""
