"""Parts of a target's directory for gateways: an archive of the tokenizer, and fields of the configuration."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2

from draftwire.contract.errors import UnavailableError
from draftwire.model.checkpoints import read_config

CHUNK_BYTES = 64 * 1024
# Files that tokenise text, render chats and name special tokens; never weights.
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.json"),
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")
# With real time stamps, equal files would have archives with different digests.
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class ModelFiles:
    """A target's directory."""

    directory: Path

    @cached_property
    def archive(self) -> bytes:
        """Return a zip archive of the tokenizer's files; equal files give equal archives.

        Raises:
            UnavailableError: If the directory has no such file.
        """
        names = [name for name in _FILES if (self.directory / name).is_file()]
        names += sorted({path.name for pattern in _PATTERNS for path in self.directory.glob(pattern)})
        if not names:
            raise UnavailableError(f"{self.directory}: has no tokenizer files")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.writestr(zipfile.ZipInfo(name, _ZIP_DATE), (self.directory / name).read_bytes(), 8)
        return buffer.getvalue()

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yield the archive in pieces of at most 64 KiB; the last one has its SHA-256, hexadecimal."""
        data = self.archive
        for start in range(0, len(data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(data)
            sha256 = hashlib.sha256(data).hexdigest() if is_last else ""
            yield common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=sha256)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.json; raise CheckpointError if it is missing or not a JSON object."""
        return read_config(self.directory)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Return generation_config.json; empty without one."""
        name = "generation_config.json"
        return read_config(self.directory, name) if (self.directory / name).is_file() else {}

    @property
    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end an output, those of config.json first, each once."""
        return list(dict.fromkeys(_ids(self.config, "eos_token_id") + _ids(self.generation_config, "eos_token_id")))

    def token_id(self, name: str) -> int:
        """Return the first id of the field `name` of config.json; 0 without one."""
        return next(iter(_ids(self.config, name)), 0)


def _ids(config: dict[str, Any], name: str) -> list[int]:
    given = config.get(name, config.get("text_config", {}).get(name))
    return given if isinstance(given, list) else [given] if isinstance(given, int) else []
