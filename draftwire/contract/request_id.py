"""Names of requests: how they travel and what they may be."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from draftwire.contract.errors import InvalidArgumentError

# Metadata of a Generate call: a client that has a name for its request gives it there or in the request itself; the
# server's initial metadata tells the name that the request has.
REQUEST_ID_KEY = "x-request-id"

MAX_LENGTH = 128
_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_LENGTH}}}")


def check_request_id(value: str, field: str) -> str:
    """Return the name, if it is one.

    Raises:
        InvalidArgumentError: Names `field` unless it is 1 to 128 visible ASCII characters: names go into logs and
            metadata.
    """
    if not _VISIBLE.fullmatch(value):
        raise InvalidArgumentError(field, value, f"allowed: 1 to {MAX_LENGTH} visible ASCII characters")
    return value


def choose_request_id(given: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the name of a request: the one in its message if `given`, else that of its metadata, else a new one.

    Raises:
        InvalidArgumentError: If the name is not 1 to 128 visible ASCII characters.
    """
    if given:
        return check_request_id(given, "request_id")
    for key, value in metadata:
        if key == REQUEST_ID_KEY:
            return check_request_id(value if isinstance(value, str) else value.decode(errors="replace"), key)
    return uuid.uuid4().hex
