"""Structured output: from a JSON Schema, a regular expression or a grammar to masks of tokens."""
