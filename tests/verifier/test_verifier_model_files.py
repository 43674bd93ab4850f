"""A target's directory as gateways get it."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest

from draftwire.contract.errors import UnavailableError
from verifier_service.api.model_files import CHUNK_BYTES, ModelFiles


def directory(path: Path, **contents: object) -> ModelFiles:
    for name, content in contents.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return ModelFiles(path)


def test_the_archive_has_the_tokenizer_and_no_weights(tmp_path: Path):
    files = directory(tmp_path, config={}, tokenizer={"a": 1}, generation_config={})
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with zipfile.ZipFile(io.BytesIO(files.archive)) as archive:
        names = ["tokenizer.json", "config.json", "generation_config.json", "chat_template.jinja"]
        assert archive.namelist() == names
        assert json.loads(archive.read("tokenizer.json")) == {"a": 1}


def test_chunks_are_the_archive_and_the_last_has_its_digest(tmp_path: Path):
    (tmp_path / "vocab.json").write_bytes(hashlib.shake_256(b"1").digest(3 * CHUNK_BYTES))  # does not compress
    files = directory(tmp_path, tokenizer={})
    *others, last = files.chunks()
    data = b"".join(chunk.data for chunk in [*others, last])
    assert data == files.archive
    assert len(others) == 3
    assert not any(chunk.sha256 for chunk in others)
    assert last.sha256 == hashlib.sha256(data).hexdigest()


def test_the_same_files_have_the_same_digest(tmp_path: Path):
    directory(tmp_path, tokenizer={"b": 2})
    (first,), (second,) = ModelFiles(tmp_path).chunks(), ModelFiles(tmp_path).chunks()
    assert first.sha256 == second.sha256


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(UnavailableError, match="has no tokenizer files"):
        list(ModelFiles(tmp_path).chunks())


def test_facts_are_read_from_both_configs(tmp_path: Path):
    config = {"eos_token_id": [3, 4], "bos_token_id": 1, "pad_token_id": None, "model_type": "llama"}
    files = directory(tmp_path, config=config, generation_config={"eos_token_id": 4, "bos_token_id": 2})
    assert files.eos_token_ids == [3, 4]
    assert (files.token_id("bos_token_id"), files.token_id("pad_token_id")) == (1, 0)
