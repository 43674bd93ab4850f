"""Log lines as text and as JSON, and the request ids in them."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.request_id import choose_request_id
from draftwire.server.logs import JsonFormatter, TextFormatter, fields


def record(message: str, *args: object, error: bool = False, **values: object) -> logging.LogRecord:
    exc_info = None
    if error:
        try:
            raise ValueError("broken")
        except ValueError:
            exc_info = sys.exc_info()
    made = logging.LogRecord("draftwire.test", logging.WARNING, __file__, 1, message, args, exc_info)
    made.__dict__.update(fields(**values) if values else {})
    return made


def test_text_shows_fields_behind_the_message():
    line = TextFormatter().format(record("%s finished", "one", request_id="r-1", ttft_s=0.25, ids=["a", "b"]))
    assert line.endswith("WARNING draftwire.test: one finished request_id=r-1 ttft_s=0.25 ids=a,b")


def test_json_holds_message_and_fields():
    entry = json.loads(JsonFormatter().format(record("finished", request_id="r-1", acceptance_length=None)))
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "logger": "draftwire.test",
        "message": "finished",
        "request_id": "r-1",
        "acceptance_length": None,
    }


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_nothing_that_others_chose_begins_a_line(form):
    line = form.format(record("drafter: %s", "no\n2026-01-01 INFO forged: all is well", detail="a\r\nb c"))
    assert line.splitlines() == [line]
    assert "all is well" in line


@pytest.mark.parametrize("value", ["a b", "", 'x"y', "a=b"])
def test_text_quotes_what_would_not_read_as_one_value(value):
    assert TextFormatter().format(record("m", name=value)).endswith(f"m name={json.dumps(value)}")


def test_tracebacks_are_kept():
    assert json.loads(JsonFormatter().format(record("m", error=True)))["exception"].endswith("ValueError: broken")
    assert TextFormatter().format(record("m", error=True)).splitlines()[-1] == "ValueError: broken"


def test_the_name_in_the_message_precedes_the_metadata():
    metadata = [("user-agent", "x"), ("x-request-id", "from-metadata")]
    assert choose_request_id("mine", metadata) == "mine"
    assert choose_request_id("", metadata) == "from-metadata"
    made = {choose_request_id("", []) for _ in range(100)}
    assert len(made) == 100
    assert all(len(name) == 32 for name in made)


@pytest.mark.parametrize("name", ["two\nlines", "sp ace", "ä", "x" * 129])
def test_a_name_that_could_harm_a_log_is_refused(name):
    with pytest.raises(InvalidArgumentError, match=r"request_id = .* 1 to 128 visible ASCII characters"):
        choose_request_id(name, [])
    with pytest.raises(InvalidArgumentError, match=r"x-request-id = .* 1 to 128 visible ASCII characters"):
        choose_request_id("", [("x-request-id", name)])
