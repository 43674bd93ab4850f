"""Options of the drafter's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwire.v1 import config_pb2

_K_FIELD: Any = config_pb2.SpeculativeConfig.DESCRIPTOR.fields_by_name["num_speculative_tokens"]
_K_LIMITS: Any = _K_FIELD.GetOptions().Extensions[config_pb2.limits]
MAX_SPECULATIVE_TOKENS = int(_K_LIMITS.max)
DEFAULT_SPECULATIVE_TOKENS = int(_K_LIMITS.default)


@dataclass(frozen=True)
class DrafterOptions:
    """Options of `draftwire drafter`; None lets the drafter choose a value."""

    head: str
    target: str
    listen: str = "127.0.0.1:50052"
    device: str | None = None
    dtype: str = "auto"
    max_num_seqs: int = 256
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_speculative_tokens: int = MAX_SPECULATIVE_TOKENS
    max_sessions: int = 64
    max_batch_rows: int = 2048
    drain_timeout: float = 5.0
    load_format: str = "auto"
    quantization: str | None = None
    metrics_listen: str | None = None
    health_listen: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure: bool = False
    carriers: str = "auto"
    rendezvous_dir: Path | None = None
