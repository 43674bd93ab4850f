"""Log lines of both services: a message and named fields, as text or as one JSON object a line.

Fields are given as `logger.info("request finished", extra=fields(request_id=..., output_tokens=...))`. No field or
message contains prompts, output, tokens or secrets.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[^\s\"=\\]+")


def fields(**values: Any) -> dict[str, Any]:
    """Return the `extra` of a log call with named values, which must be JSON values."""
    return {"fields": values}


def start_logging(level: str, form: str = "text") -> None:
    """Log to standard error from `level` on, and Python's warnings too; `form` is one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE NAME=VALUE ...`; line breaks in values are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows on separate lines."""
        shown = [f"{name}={_text(value)}" for name, value in _fields(record).items()]
        message = " ".join([_escape(record.getMessage()), *shown])
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the fields, and exception where there was one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given: dict[str, Any] = getattr(record, "fields", {})
    return given


def _text(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if _PLAIN.fullmatch(text) and not _CONTROL.search(text) else json.dumps(text)


def _escape(message: str) -> str:
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], message)
