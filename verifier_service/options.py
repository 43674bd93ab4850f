"""Options of the verifier's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VerifierOptions:
    """Options of `draftwire verifier`; None lets the verifier choose a value."""

    target: str
    drafters: str = ""
    listen: str = "127.0.0.1:50051"
    speculative_config: str = "{}"
    device: str | None = None
    dtype: str = "auto"
    max_num_seqs: int = 64
    max_queue: int = 1024
    scheduling_policy: str = "fcfs"
    max_model_len: int | None = None
    max_prefill_rows: int = 512
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    prefix_caching: bool = True
    async_scheduling: bool | None = None
    engine_process: bool | None = None
    draft_deadline_ms: str = "500"
    adaptive_k: bool | None = None
    drain_timeout: float = 30.0
    load_format: str = "auto"
    generation_config: str = "auto"
    compile_cache: str | None = None
    metrics_listen: str | None = None
    vllm_metrics: bool = False
    kv_events: bool = False
    served_model_name: str | None = None
    health_listen: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None
    drafter_tls_ca: Path | None = None
    drafter_tls_cert: Path | None = None
    drafter_tls_key: Path | None = None
    insecure: bool = False
    carriers: str = "auto"
    rendezvous_dir: Path | None = None
    fuse_features: bool = True
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str | None = None
