"""Regular expressions and EBNF in the Lark dialect of llguidance.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes the dialect.
"""

from __future__ import annotations

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from draftwire.contract.errors import InvalidArgumentError

EBNF_ARROW = "::="


def regex_to_lark(field: str, pattern: str) -> str:
    """Return the grammar of texts that match a pattern as a whole.

    Raises:
        InvalidArgumentError: If the pattern is invalid or has an unescaped line break.
    """
    if "\n" in pattern:
        raise InvalidArgumentError(field, pattern, r"must have line breaks written as \n")
    try:
        return f"start: /{llguidance.regex_to_lark(pattern)}/\n"
    except ValueError as error:
        raise InvalidArgumentError(field, pattern, str(error)) from error


def ebnf_to_lark(field: str, grammar: str) -> str:
    """Return a grammar in Lark's syntax: convert EBNF, and return any other grammar unchanged.

    EBNF is that of GBNF (llama.cpp) and xgrammar: rules `name ::= ...`, beginning with `root`.

    Raises:
        InvalidArgumentError: If EBNF cannot be converted.
    """
    if EBNF_ARROW not in grammar:
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises various errors, assertions included
        raise InvalidArgumentError(field, grammar, f"is not a valid EBNF grammar: {error}") from error
