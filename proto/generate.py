"""Generates the Python stubs and their type stubs from the contract: `python proto/generate.py [OUT]`."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent
PACKAGE = Path("draftwire/v1")


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and `*_pb2_grpc.pyi` below `out`/draftwire/v1."""
    files = sorted(str(path) for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    options = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")]
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    options.append(f"--plugin=protoc-gen-mypy_grpc={plugin}")
    out.mkdir(parents=True, exist_ok=True)
    if protoc.main(["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}", *options, *files]) != 0:
        raise SystemExit("protoc failed")
    # Only generate.proto and draft.proto have services.
    for suffix in ("py", "pyi"):
        (out / PACKAGE / f"config_pb2_grpc.{suffix}").unlink(missing_ok=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_ROOT.parent)
