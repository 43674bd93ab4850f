"""Fields and options whose value is a JSON object."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from draftwire.contract.errors import InvalidArgumentError

# Maximum number of nested objects and lists; only some versions of Python's parser have a limit.
MAX_JSON_DEPTH = 128


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON object; keys keep their order.

    Raises:
        InvalidArgumentError: If the text is invalid JSON (NaN is invalid), is not an object, repeats a key, or nests
            more than MAX_JSON_DEPTH objects and lists. The error names the field or option `name`.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InvalidArgumentError(name, repeated, "this key is given more than once")
        return mapping

    def refuse(constant: str) -> NoReturn:
        raise InvalidArgumentError(name, text, f"is not valid JSON: {constant} is not a number")

    too_deep = InvalidArgumentError(name, text, f"nests more than {MAX_JSON_DEPTH} objects and lists")
    try:
        options = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse)
    except RecursionError as error:
        raise too_deep from error
    except InvalidArgumentError:
        raise
    except ValueError as error:  # json's own, and Python's for an integer of thousands of digits
        raise InvalidArgumentError(name, text, f"is not valid JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidArgumentError(name, text, "must be a JSON object")
    if _depth(options) > MAX_JSON_DEPTH:
        raise too_deep
    return options


def _depth(value: object) -> int:
    depth = 0
    level: list[object] = [value]
    while level:
        containers = [one for one in level if isinstance(one, dict | list)]
        children = [list(one.values()) if isinstance(one, dict) else one for one in containers]
        depth += bool(children)
        level = [child for one in children for child in one]
    return depth
