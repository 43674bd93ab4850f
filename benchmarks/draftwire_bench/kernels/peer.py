"""Loads a peer's sampling kernels: vLLM's `gumbel.py` and `rejection_sampler_utils.py` (Model Runner V2)."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from draftwire.contract.errors import InvalidArgumentError

FILES = ("gumbel.py", "rejection_sampler_utils.py")
PARENTS = (
    *("vllm", "vllm.v1", "vllm.v1.spec_decode", "vllm.v1.worker", "vllm.v1.worker.gpu"),
    "vllm.v1.worker.gpu.sample",
)


@triton.jit
def _unused(x: Any) -> Any:  # the peer imports a watermark kernel, which is not called
    return x


@dataclass(frozen=True)
class Peer:
    """The peer's modules."""

    gumbel: Any
    rejection: Any


def load_peer(folder: Path) -> Peer:
    """Load the peer's two files, with stubs for their imports that these calls do not use.

    Raises:
        InvalidArgumentError: If a file does not exist.
    """
    from triton.language.extra import libdevice

    for file in FILES:
        if not (folder / file).is_file():
            raise InvalidArgumentError("peer", str(folder), f"must contain {' and '.join(FILES)}")
    for parent in PARENTS:
        _stand_in(parent)
    _stand_in("vllm.triton_utils", tl=tl, triton=triton, tldevice=libdevice)
    _stand_in("vllm.v1.spec_decode.fly", compute_fly_entropy=None)
    _stand_in("vllm.v1.worker.gpu.sample.watermark", philox_gumbel_block_argmax=_unused)
    gumbel = _load("vllm.v1.worker.gpu.sample.gumbel", folder / FILES[0])
    return Peer(gumbel, _load("peer_rejection", folder / FILES[1]))


def _stand_in(name: str, **names: object) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
