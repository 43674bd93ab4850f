"""What a result says of how it was made."""

from __future__ import annotations

import sys

import pytest

from draftwire.bench.environment import describe


def test_a_script_that_is_called_where_it_lies_is_named_alike(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.chdir(tmp_path / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["far_drafter.py"])
    assert describe()["command"] == "python -m benchmarks.far_drafter"


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/usr/local/bin/draftwire", "draftwire"),
        ("/src/draftwire/__main__.py", "draftwire"),
        ("benchmarks/far_drafter.py", "python -m benchmarks.far_drafter"),
        ("/src/benchmarks/tensor_parallel.py", "python -m benchmarks.tensor_parallel"),
    ],
)
def test_the_command_is_as_it_is_typed_in_a_checkout(program, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "--rounds", "2", "--name", "a b"])
    assert describe()["command"] == f"{command} --rounds 2 --name 'a b'"
