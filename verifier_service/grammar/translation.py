"""Translate a request's structured output to a grammar for the compiler."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.json_fields import parse_object
from draftwire.contract.structured_output import FIELD, check_structured_output
from draftwire.v1 import config_pb2
from verifier_service.grammar.lark import ebnf_to_lark, regex_to_lark
from verifier_service.grammar.structural_tags import structural_tag_grammar

SHOWN = 128  # characters of a value in an error


@dataclass(frozen=True)
class GrammarSource:
    """A grammar for the engine."""

    field: str  # of the request, for errors
    given: str  # beginning of the request's value, for errors
    text: str  # llguidance's JSON form

    def error(self, allowed: str) -> InvalidArgumentError:
        """Return an error about the grammar."""
        return InvalidArgumentError(self.field, self.given, allowed)


def translate(output: config_pb2.StructuredOutput, special_tokens: Mapping[str, int]) -> GrammarSource:
    """Return the grammar of a structured output, not yet compiled.

    Args:
        special_tokens: Ids of the tokenizer's special tokens by text. Structural tags may contain them.

    Raises:
        InvalidArgumentError: If it is invalid.
    """
    check_structured_output(output)
    kind = str(output.WhichOneof("kind"))
    field, value = f"{FIELD}.{kind}", getattr(output, kind)
    if kind == "json_schema":
        return _source(field, value, {"json_schema": _parse(field, value)})
    if kind == "json_object":
        return _source(field, str(value), {"json_schema": {"type": "object"}})
    if kind == "structural_tag":
        lark, parts = structural_tag_grammar(_parse(field, value), special_tokens)
        return _source(field, value, {"lark_grammar": lark}, parts)
    if kind == "choice":
        texts = list(value.values)
        lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + "\n"
        return _source(field, str(texts), {"lark_grammar": lark})
    lark = regex_to_lark(field, value) if kind == "regex" else ebnf_to_lark(field, value)
    return _source(field, value, {"lark_grammar": lark})


def _parse(field: str, text: str) -> dict[str, Any]:
    """Parse a JSON object, and check that its strings are valid Unicode."""
    value = parse_object(field, text)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(field, text, f"has half of a surrogate pair ({error.reason})") from error
    return value


def _source(field: str, given: str, main: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] = ()) -> GrammarSource:
    """Return a grammar in llguidance's form.

    With `no_forcing`, llguidance allows all tokenizations of a text that is the only possible continuation.
    """
    root = {"name": "root", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @main\n'}
    text = json.dumps({"grammars": [root, {"name": "main", **main}, *parts]}, ensure_ascii=False)
    return GrammarSource(field, given[:SHOWN], text)
