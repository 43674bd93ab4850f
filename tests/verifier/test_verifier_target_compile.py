"""Where compiled code is kept: as the operator says, and found again by the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verifier_service.cli import verifier
from verifier_service.target.compile_cache import use_compile_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# A product of matrices is none of inductor's own kernels: no C++ compiler is needed.
COMPILE = """
import sys
import torch
from torch._dynamo.utils import counters
from verifier_service.target.compile_cache import use_compile_cache

use_compile_cache(sys.argv[1])
torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""
START = """
import os
from verifier_service.host.target_start import use_compile_cache

use_compile_cache()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def output_of(code: str, *arguments: str, **variables: str) -> str:
    """What Python prints in a process of its own, with these variables and without torch's."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        ("/option", {"XDG_CACHE_HOME": "/cache"}, "/option"),
        (None, {"XDG_CACHE_HOME": "/cache"}, "/cache/draftwire/compile"),
        (None, {}, "/home/user/.cache/draftwire/compile"),
        (None, {VARIABLE: "/set/by/torch", "XDG_CACHE_HOME": ""}, "/home/user/.cache/draftwire/compile"),
    ],
    ids=["option", "user's cache directory", "home", "torch's own place"],
)
def test_the_option_goes_before_the_users_cache_directory(
    option: str | None, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/home/user", **environment})
    use_compile_cache(option)
    assert os.environ[VARIABLE] == expected


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([], None, None),
        ([], "", None),
        ([], "/torch", "/torch"),
        (["--compile-cache", "/option"], "/torch", "/option"),
    ],
)
def test_torchs_variable_is_the_options_default(
    arguments: list[str], variable: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, variable)
    context = verifier.make_context("verifier", ["--target", "any", *arguments])
    assert context.params["compile_cache"] == expected


def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    assert output_of(COMPILE, str(tmp_path)) == "1 0"  # misses, hits
    assert output_of(COMPILE, str(tmp_path)) == "0 1"


def test_a_start_without_settings_compiles_into_the_users_cache(tmp_path: Path) -> None:
    """Whatever torch and transformers set when they are imported."""
    assert output_of(START, XDG_CACHE_HOME=str(tmp_path)) == str(tmp_path / "draftwire" / "compile")
