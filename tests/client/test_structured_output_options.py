"""The command line's options for structured output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from draftwire_cli.structured_output import structured_output_options, take_structured_output


def parsed(*arguments: str) -> tuple[Any, str]:
    """Return the structured output that the options request, and the printed text."""
    found: list[Any] = []

    @click.command()
    @structured_output_options
    def command(**given: Any) -> None:
        found.append(take_structured_output(given))
        assert given == {}

    result = CliRunner().invoke(command, arguments)
    return found[0] if found else None, result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), None),
        (("--json-object",), {"json_object": True}),
        (("--json-schema", '{"type": "object"}'), {"json_schema": '{"type": "object"}'}),
        (("--regex", "a+"), {"regex": "a+"}),
        (("--grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (("--choice", "yes", "--choice", "no"), {"choice": ("yes", "no")}),
        (("--structural-tag", "{}"), {"structural_tag": "{}"}),
    ],
)
def test_an_option_is_a_kind(arguments, expected):
    assert parsed(*arguments)[0] == expected


def test_a_text_may_come_from_a_file(tmp_path: Path):
    path = tmp_path / "schema.json"
    path.write_text('{"enum": ["é"]}', encoding="utf-8")
    assert parsed("--json-schema", f"@{path}")[0] == {"json_schema": '{"enum": ["é"]}'}
    assert "cannot be read" in parsed("--json-schema", f"@{path}x")[1]


def test_two_kinds_are_refused():
    text = parsed("--json-object", "--regex", "a")[1]
    assert "at most one kind of structured output is allowed, got --json-object, --regex" in text
