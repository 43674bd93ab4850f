"""The table of options for users of vLLM names options that the services have."""

from __future__ import annotations

import re
from pathlib import Path

from drafter_service.cli import drafter
from verifier_service.cli import verifier

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-vllm.md"
PARAMETERS = (*drafter.params, *verifier.params)
OPTIONS = {name for one in PARAMETERS for name in (*one.opts, *one.secondary_opts)}


def rows() -> list[list[str]]:
    """Return the cells of the table of options, without its head."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Options\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_option_of_ours_exists():
    table = rows()
    assert len(table) > 15
    named = {name for _, ours, difference in table for name in re.findall(r"--[a-z][a-z-]*", f"{ours} {difference}")}
    assert {"--target", "--tls-cert", "--metrics-listen"} <= named
    assert named <= OPTIONS


def test_no_option_of_vllm_is_named_twice():
    theirs = [name for one, _, _ in rows() for name in re.findall(r"--[a-z][a-z-]*", one)]
    assert len(theirs) == len(set(theirs))
