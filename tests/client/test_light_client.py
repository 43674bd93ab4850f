"""The distribution draftwire-client: built, installed without the services' dependencies, and used."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Modules of the client's dependencies; grpcio depends on typing_extensions.
DEPENDENCIES = ("grpc", "google", "typing_extensions.py")
SOURCES = ("draftwire", "draftwire_cli", "drafter_service", "verifier_service", "kernels", "benchmarks/draftwire_bench")


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def build(folder: Path, wheels: Path) -> Path:
    """Build the wheel of a folder, without the network, and return its path."""
    wheels.mkdir()
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", *options, "--wheel-dir", wheels, folder], check=True
    )
    (wheel,) = wheels.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources of both distributions, because a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("sources")
    skipped = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for folder in (*SOURCES, "clients/python"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=skipped)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def light_wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources / "clients" / "python", tmp_path_factory.mktemp("light") / "wheels")


@pytest.fixture(scope="module")
def site(light_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders for sys.path: the installed client, and its dependencies."""
    installed, beside = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("dependencies")
    zipfile.ZipFile(light_wheel).extractall(installed)
    for name in DEPENDENCIES:
        (beside / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    return [installed, beside]


def run(folders: list[Path], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that sees only the standard library and these folders."""
    head = f"import sys; sys.path += {[str(folder) for folder in folders]!r}\n"
    command = [sys.executable, "-I", "-S", "-c", head + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_works_without_the_services_dependencies(site, verifier):
    code = """
import asyncio
from draftwire import AsyncClient, Client, ClientSecurity, __version__

async def use():
    async with AsyncClient(sys.argv[1]) as client:
        return (await client.complete("abc")).text

with Client(sys.argv[1], ClientSecurity(token="secret")) as client:
    print(__version__, client.complete("abc").text, client.info().target, asyncio.run(use()), sep="|")
heavy = {"torch", "transformers", "tokenizers", "numpy", "click", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    result = run(site, code, verifier.address)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{project(ROOT)['version']}|é b end|demo|é b end\n"


def test_it_has_every_module_that_it_imports(site):
    code = """
import importlib, pathlib
for file in sorted(pathlib.Path(sys.argv[1], "draftwire").rglob("*.py")):
    name = ".".join(file.relative_to(sys.argv[1]).with_suffix("").parts).removesuffix(".__init__")
    importlib.import_module(name)
    print(name)
"""
    result = run(site, code, str(site[0]))
    assert result.returncode == 0, result.stderr
    assert {"draftwire.client.asynchronous", "draftwire.contract.validation"} <= set(result.stdout.split())


@pytest.mark.full
def test_both_distributions_have_the_same_files(sources, light_wheel, site, tmp_path):
    whole = zipfile.ZipFile(build(sources, tmp_path / "wheels"))
    light = zipfile.ZipFile(light_wheel)
    shared = [name for name in light.namelist() if not name.startswith("draftwire_client-")]
    assert {name.split("/")[0] for name in shared} == {"draftwire"}
    assert all(light.read(name) == whole.read(name) for name in shared)
    for wheel in (light, whole):
        wheel.extractall(tmp_path / "site")
    result = run([tmp_path / "site", site[1]], "from draftwire.contract.version import VERSION; print(VERSION)")
    assert result.stdout.strip() == project(ROOT)["version"], result.stderr


def test_two_versions_side_by_side_are_named(site, tmp_path):
    other = tmp_path / "draftwire-9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: draftwire\nVersion: 9.9\n", encoding="utf-8")
    result = run([*site, tmp_path], "import draftwire")
    version = project(ROOT)["version"]
    assert f"ImportError: draftwire 9.9 and draftwire-client {version} share files: install both in" in result.stderr


def test_both_projects_agree():
    whole, light = project(ROOT), project(ROOT / "clients" / "python")
    for field in ("version", "requires-python", "license"):
        assert light[field] == whole[field]
    ours = {re.split(r"[^\w.-]", text)[0]: text for text in whole["dependencies"]}
    for text in light["dependencies"]:
        name = re.split(r"[^\w.-]", text)[0]
        assert name in ours
        assert name == "grpcio" or ours[name] == text, "the services fix grpcio, which clients need not"
