"""`python -m training.run` trains heads that the drafter serves, and resumes interrupted runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_target import NUM_LAYERS, write_chat_target
from safetensors.torch import load_file

from drafter_service.heads import load_head

ROOT = Path(__file__).resolve().parents[1]
SIZES = ["--rows", "12", "--length", "160", "--files", "1", "--batch", "4", "--anchors", "8", "--markov-rank", "4"]


def run(folder: Path, head: str, *options: str) -> str:
    command = [sys.executable, "-m", "training.run", "--target", str(folder / "target"), "--head", head]
    command += ["--out", str(folder / head), "--work", str(folder / "work"), "--device", "cpu", "--dtype", "float32"]
    done = subprocess.run([*command, *SIZES, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("head", ["eagle3", "dspark"])
def test_a_head_is_trained_resumed_and_served(tmp_path: Path, head: str) -> None:
    write_chat_target(tmp_path / "target")
    first = json.loads(run(tmp_path, head, "--stages", "data", "train", "--train-minutes", "0.02").splitlines()[-1])
    again = json.loads(run(tmp_path, head, "--stages", "train", "--train-minutes", "0.02").splitlines()[-1])
    assert again["steps"] == first["steps"] > 0, "a finished run is not trained further"
    served = load_head(tmp_path / head, tmp_path / "target", torch.float32, torch.device("cpu"))
    assert (served.spec.method, served.spec.target_num_layers) == (head, NUM_LAYERS)


def test_a_run_starts_from_an_exported_head(tmp_path: Path) -> None:
    write_chat_target(tmp_path / "target")
    run(tmp_path, "dspark", "--stages", "data", "train", "--train-minutes", "0.02", "--states-gib", "1")
    (tmp_path / "work" / "dspark.pt").unlink()
    (tmp_path / "dspark").rename(tmp_path / "first")
    run(tmp_path, "dspark", "--stages", "train", "--train-minutes", "0", "--initial-head", str(tmp_path / "first"))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "dspark"))
    assert all(torch.allclose(second[name], first[name], rtol=0.01) for name in first)


def test_a_reduced_vocabulary_is_what_the_target_writes(tmp_path: Path) -> None:
    write_chat_target(tmp_path / "target")
    run(tmp_path, "eagle3", "--stages", "data", "train", "--train-minutes", "0.02", "--draft-vocab-size", "50")
    served = load_head(tmp_path / "eagle3", tmp_path / "target", torch.float32, torch.device("cpu"))
    assert served.draft_token_ids is not None
    assert len(served.draft_token_ids) == 50
