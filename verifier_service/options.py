"""Options of the verifier's process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifierOptions:
    """What `draftwire verifier` was told; None takes what fits target and device."""

    target: str
    drafters: str = ""
    listen: str = "127.0.0.1:50051"
    speculative_config: str = "{}"
    device: str | None = None
    dtype: str = "auto"
    max_num_seqs: int = 64
    max_queue: int = 1024
    max_model_len: int | None = None
    max_prefill_rows: int = 512
    kv_cache_tokens: int | None = None
    draft_deadline_ms: str = "500"
    load_format: str = "auto"
