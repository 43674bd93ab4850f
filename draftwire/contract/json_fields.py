"""Fields and options whose value is a JSON object."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from draftwire.contract.errors import InvalidArgumentError


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Return the object that a JSON text is; keys keep their order.

    Raises
    ------
    InvalidArgumentError
        Names the field or option `name`: for no JSON, no object, a key that occurs twice, a number that JSON does not
        have, or objects too deep in each other.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InvalidArgumentError(f"{name}.{repeated}", mapping[repeated], "is given more than once")
        return mapping

    def refuse(constant: str) -> NoReturn:
        raise InvalidArgumentError(name, text, f"is not valid JSON: {constant} is no number")

    try:
        options = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse)
    except RecursionError as error:
        raise InvalidArgumentError(name, text, "its objects and lists are too deep in each other") from error
    except InvalidArgumentError:
        raise
    except ValueError as error:  # json's own, and Python's for an integer of thousands of digits
        raise InvalidArgumentError(name, text, f"is not valid JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidArgumentError(name, text, "must be a JSON object")
    return options
