"""The checked-in stubs match the .proto files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path("draftwire/v1")


def test_stubs_are_not_stale(tmp_path):
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    generator.generate(tmp_path)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / STUBS).iterdir()}
    checked_in = {path.name: path.read_bytes() for path in (ROOT / STUBS).glob("*_pb2*.py*")}
    assert sorted(fresh) == sorted(checked_in)
    stale = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not stale, "run `make protos`"
