"""`draftwire bench kernels`: the error without a GPU, and the whole command on a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from draftwire_cli.main import main


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "kernels"])
    assert result.exit_code == 1
    assert "needs a GPU" in result.output


@pytest.mark.gpu
def test_rows_are_printed_and_written(tmp_path):
    path = tmp_path / "out.json"
    result = CliRunner().invoke(main, ["bench", "kernels", "--batches", "1", "--only", "one-hot", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "rejection one-hot", "rejection one-hot float64", "rejection one-hot bfloat16"
    ]
    for row in rows:
        assert row["name"] in result.output
        assert row["us"] > row["floor_us"] > 0
        assert 0 < row["accepted"] < 5


@pytest.mark.gpu
def test_a_folder_without_the_peers_files_is_named(tmp_path):
    result = CliRunner().invoke(main, ["bench", "kernels", "--peer", str(tmp_path)])
    assert result.exit_code == 2
    assert "must contain gumbel.py and rejection_sampler_utils.py" in result.output
