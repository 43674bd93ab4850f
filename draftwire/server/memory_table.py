"""The memory of both services as a table and as JSON."""

from __future__ import annotations

from rich.box import HEAVY_HEAD, Box
from rich.table import Table

from draftwire.v1 import draft_pb2
from draftwire.v1 import generate_pb2 as pb

_COLUMNS = (
    *("process", "KV cache, B / position", "positions", "KV cache", "features", "draft logits"),
    *("peak GPU, allocated", "reserved", "peak host"),
)


def memory_table(info: pb.GetVerifierInfoResponse, box: Box = HEAVY_HEAD) -> Table:
    """Return a row for each process of the verifier, and for each drafter that has reported its memory."""
    table = Table(title="memory, MiB", title_justify="left", box=box)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "process" else "right", overflow="fold")
    for name, use in _processes(info).items():
        table.add_row(
            name,
            str(use.kv_cache_token_bytes),
            str(use.kv_cache_tokens),
            _mib(use.kv_cache_token_bytes * use.kv_cache_tokens),
            *(_mib(part) for part in (use.features_bytes, use.draft_logits_bytes)),
            *(_mib(part) for part in (use.peak_gpu_allocated_bytes, use.peak_gpu_reserved_bytes, use.peak_host_bytes)),
        )
    return table


def memory_mapping(info: pb.GetVerifierInfoResponse) -> dict[str, dict[str, int]]:
    """Return the JSON form: bytes by process and field of MemoryUse."""
    names = [field.name for field in draft_pb2.MemoryUse.DESCRIPTOR.fields]
    return {process: {name: getattr(use, name) for name in names} for process, use in _processes(info).items()}


def _processes(info: pb.GetVerifierInfoResponse) -> dict[str, draft_pb2.MemoryUse]:
    server = {"verifier's server": info.server_memory} if info.HasField("server_memory") else {}
    drafters = {f"drafter {one.address}": one.memory for one in info.drafters if one.HasField("memory")}
    return {"verifier": info.memory, **server, **drafters}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
