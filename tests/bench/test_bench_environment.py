"""The command and the commit that a result names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftwire_bench import environment
from draftwire_bench.environment import describe


def test_a_script_that_is_called_where_it_lies_is_named_alike(monkeypatch, tmp_path):
    (tmp_path / "draftwire_bench").mkdir()
    monkeypatch.chdir(tmp_path / "draftwire_bench")
    monkeypatch.setattr(sys, "argv", ["far_drafter.py"])
    assert describe()["command"] == "python -m draftwire_bench.far_drafter"


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/usr/local/bin/draftwire", "draftwire"),
        ("/src/draftwire_cli/__main__.py", "draftwire"),
        ("benchmarks/draftwire_bench/far_drafter.py", "python -m draftwire_bench.far_drafter"),
        ("/src/benchmarks/draftwire_bench/greedy_identity.py", "python -m draftwire_bench.greedy_identity"),
    ],
)
def test_the_command_is_as_it_is_typed_in_a_checkout(program, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "--rounds", "2", "--name", "a b"])
    assert describe()["command"] == f"{command} --rounds 2 --name 'a b'"


def test_the_files_that_a_command_writes_are_no_part_of_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draftwire", "--json", "a.json", "bench", "--rounds", "2", "--json=b.json"])
    assert describe()["command"] == "draftwire bench --rounds 2"


def test_a_result_names_its_commit_and_whether_it_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.delenv("DRAFTWIRE_COMMIT", raising=False)
    assert describe()["commit"] is None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "file").write_text("1")
    git("init")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "v1")
    assert describe()["commit"] == git("rev-parse", "--short", "HEAD")
    (tmp_path / "file").write_text("2")
    assert describe()["commit"] == git("rev-parse", "--short", "HEAD") + "-dirty"
    monkeypatch.setenv("DRAFTWIRE_COMMIT", "0123abc")
    assert describe()["commit"] == "0123abc"
