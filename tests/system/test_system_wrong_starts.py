"""Wrong files and options: a service exits at startup with one line that names the problem."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest
from model_configs import write_config

from draftwire_cli.main import main
from models import CONTEXT, HIDDEN_SIZE, VOCAB_SIZE, prompts_of

pytestmark = pytest.mark.xdist_group("llama")


def run(*arguments: str | Path) -> tuple[int, str]:
    """Return exit status and last line of a command that must fail at startup, without a traceback."""
    result = subprocess.run(
        [sys.executable, "-m", "draftwire_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in result.stderr
    assert "listening on" not in result.stdout
    return result.returncode, result.stderr.strip().splitlines()[-1]


def run_here(*arguments: str | Path) -> tuple[int, str]:
    """Do the same as `run` in this process, which saves the seconds that a process takes to start."""
    result = click.testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.strip().splitlines()[-1]


def truncated(directory: Path, copy: Path) -> Path:
    """Copy a checkpoint and cut its weights file in half; return the copy."""
    shutil.copytree(directory, copy)
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return copy


def test_missing_target_ends_the_verifier_with_one_line(tmp_path):
    status, line = run_here("verifier", "--target", tmp_path / "nowhere")
    assert status == 1
    assert line.startswith("Error: ")
    assert "nowhere' is not a directory" in line


def test_truncated_target_ends_the_verifier_with_one_line(shelf, tmp_path):
    directory = truncated(shelf.target("llama"), tmp_path / "cut")
    status, line = run("verifier", "--target", directory, "--listen", "127.0.0.1:0")
    assert status == 1
    assert line.startswith(f"Error: {directory}: cannot be loaded: ")


def test_missing_weights_end_the_verifier(tmp_path):
    status, line = run_here("verifier", "--target", write_config(tmp_path / "bare"), "--listen", "127.0.0.1:0")
    assert status == 1
    assert line.startswith(f"Error: {tmp_path / 'bare'}: there are no weights in *.safetensors or *.bin, ")


def test_missing_head_ends_the_drafter_with_one_line(shelf, tmp_path):
    status, line = run_here("drafter", "--head", tmp_path / "nowhere", "--target", shelf.target("llama"))
    assert status == 1
    assert "nowhere' is not a directory" in line


def test_truncated_head_ends_the_drafter_with_one_line(shelf, tmp_path):
    directory = truncated(shelf.head("llama", "good"), tmp_path / "cut")
    status, line = run("drafter", "--head", directory, "--target", shelf.target("llama"), "--listen", "127.0.0.1:0")
    assert status == 1
    assert line.startswith("Error: ")
    assert "model.safetensors" in line
    assert "is damaged or not a checkpoint" in line


@pytest.mark.parametrize(("key", "value", "own"), [("vocab_size", 310, VOCAB_SIZE), ("hidden_size", 96, HIDDEN_SIZE)])
def test_head_that_does_not_fit_the_target_ends_the_drafter(shelf, tmp_path, key, value, own):
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_attention_heads": 4, key: value}
    target = write_config(tmp_path / "target", **sizes)
    status, line = run_here(
        "drafter", "--head", shelf.head("llama", "good"), "--target", target, "--listen", "127.0.0.1:0"
    )
    assert status == 1
    assert f"{key} {own}" in line
    assert str(value) in line


@pytest.mark.parametrize("command", ["verifier", "drafter"])
def test_port_in_use_ends_the_service_with_one_line(llama, shelf, command):
    head = ["--head", shelf.head("llama", "good")] if command == "drafter" else []
    address = llama.verifier.address
    status, line = run(command, *head, "--target", llama.target, "--device", "cpu", "--listen", address)
    assert status == 1
    assert line.startswith(f"Error: listen = '{address}': cannot be bound: the port is in use")
    assert len(llama.client.complete(prompts_of("llama")[0], max_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("json_text", "message"),
    [
        ('{"num_spec_tokens": 4}', "speculative_config.num_spec_tokens = 4: unknown name; known: draft_logits, "),
        ('{"num_speculative_tokens": 17}', "num_speculative_tokens = 17: allowed range [1, 16]"),
        ('{"rejection_sample_method": "strict"}', "this name is retired"),
        ('{"draft_logits": "dense"}', "only gumbel drafts have logits"),
        ("{", "is not valid JSON"),
        ("no-such-file.json", "must be a JSON object or the path of a file with one"),
    ],
)
def test_wrong_speculative_config_ends_the_verifier_early(shelf, json_text, message):
    status, line = run_here("verifier", "--target", shelf.target("llama"), "--speculative-config", json_text)
    assert status == 2
    assert line.startswith("Error: speculative_config")
    assert message in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "localhost"], "drafters = 'localhost': must be HOST:PORT"),
        (["--listen", "nonsense"], "listen = 'nonsense': must be HOST:PORT"),
        (["--draft-deadline-ms", "soon"], 'allowed: "off" or milliseconds in [0, inf)'),
        (["--device", "abacus"], "abacus"),
        (["--max-model-len", str(CONTEXT + 1)], f"max_model_len = {CONTEXT + 1}"),
        (["--kv-cache-tokens", "16"], f"must hold one request of max_model_len = {CONTEXT}"),
        (["--kv-cache-tokens", "999999999999", "--device", "cpu"], "kv_cache_tokens = 999999999999: takes "),
    ],
)
def test_wrong_option_ends_the_verifier(shelf, options, message):
    status, line = run_here("verifier", "--target", shelf.target("llama"), "--listen", "127.0.0.1:0", *options)
    assert status in (1, 2)
    assert message in line


def test_a_cache_larger_than_memory_ends_the_drafter(shelf):
    options = ["--listen", "127.0.0.1:0", "--device", "cpu", "--kv-cache-tokens", "999999999999"]
    head = shelf.head("llama", "good")
    status, line = run_here("drafter", "--head", head, "--target", shelf.target("llama"), *options)
    assert status == 2
    assert line.startswith("Error: kv_cache_tokens = 999999999999: takes ")


def test_a_damaged_generation_config_ends_the_verifier(shelf, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(shelf.target("llama"), directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": ', encoding="utf-8")
    status, line = run_here("verifier", "--target", directory, "--listen", "127.0.0.1:0", "--device", "cpu")
    assert status == 1
    assert line.startswith(f"Error: {directory / 'generation_config.json'}: cannot be read: ")
