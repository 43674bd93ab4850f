"""Syntactic checks of structured output, in clients and servers, before a grammar engine reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.json_fields import parse_object
from draftwire.v1 import config_pb2 as pb

FIELD = "sampling_params.structured_output"
KINDS = tuple(field.name for field in pb.StructuredOutput.DESCRIPTOR.fields)


def to_structured_output(options: Any) -> pb.StructuredOutput:
    """Return the message of a mapping with one key, such as {"json_schema": {...}} or {"choice": ["yes", "no"]}.

    A JSON Schema or a structural tag is JSON text, or a value that `json.dumps` accepts.

    Raises:
        InvalidArgumentError: If it is invalid.
    """
    if not isinstance(options, Mapping) or len(options) != 1 or next(iter(options)) not in KINDS:
        raise InvalidArgumentError(FIELD, options, f"must be a mapping with one key of: {', '.join(KINDS)}")
    ((kind, value),) = options.items()
    field, output = f"{FIELD}.{kind}", pb.StructuredOutput()
    if kind == "choice":
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
            raise InvalidArgumentError(field, value, "must be a list of texts")
        output.choice.values.extend(value)
    elif kind == "json_object":
        if value is not True:
            raise InvalidArgumentError(field, value, "must be true")
        output.json_object = True
    elif kind in ("json_schema", "structural_tag") and not isinstance(value, str):
        setattr(output, kind, _to_json(field, value))
    elif isinstance(value, str):
        setattr(output, kind, value)
    else:
        raise InvalidArgumentError(field, value, "must be text")
    return output


def _to_json(field: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, value, f"must be JSON ({error})") from error


def check_structured_output(output: pb.StructuredOutput) -> None:
    """Check what the limits of single fields cannot: a kind is set, JSON is valid, and choices differ.

    Raises:
        InvalidArgumentError: If it is invalid.
    """
    kind = output.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError(FIELD, None, f"exactly one is required of: {', '.join(KINDS)}")
    field, value = f"{FIELD}.{kind}", getattr(output, kind)
    if kind in ("json_schema", "structural_tag"):
        parse_object(field, value)
    elif kind == "json_object" and not value:
        raise InvalidArgumentError(field, value, "must be true")
    elif kind == "choice":
        values = list(value.values)
        if not values:
            raise InvalidArgumentError(field, values, "at least one text is required")
        if len(set(values)) < len(values):
            repeated = next(one for one in values if values.count(one) > 1)
            raise InvalidArgumentError(field, repeated, "is given more than once")
