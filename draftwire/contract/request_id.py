"""Request ids: their metadata key and their form."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from draftwire.contract.errors import InvalidArgumentError

# Key in the metadata of a Generate call: in the client's metadata the id that it chose, unless the message has one; in
# the server's initial metadata the id in use.
REQUEST_ID_KEY = "x-request-id"

MAX_LENGTH = 128
_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_LENGTH}}}")


def check_request_id(value: str, field: str) -> str:
    """Return `value`, a request id.

    Raises:
        InvalidArgumentError: If the id is not 1 to 128 visible ASCII characters, which logs and metadata need.
    """
    if not _VISIBLE.fullmatch(value):
        raise InvalidArgumentError(field, value, f"allowed: 1 to {MAX_LENGTH} visible ASCII characters")
    return value


def choose_request_id(given: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the id of a request: `given` in its message unless empty, else the metadata's, else a new one.

    Raises:
        InvalidArgumentError: If the id is not 1 to 128 visible ASCII characters.
    """
    if given:
        return check_request_id(given, "request_id")
    for key, value in metadata:
        if key == REQUEST_ID_KEY:
            return check_request_id(value if isinstance(value, str) else value.decode(errors="replace"), key)
    return uuid.uuid4().hex
