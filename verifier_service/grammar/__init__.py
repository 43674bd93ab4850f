"""Structured output: from a JSON Schema, a regular expression or a grammar to the tokens that rows may draw."""
