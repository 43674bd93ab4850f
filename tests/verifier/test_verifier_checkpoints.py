"""Files of a checkpoint: end tokens, sampling defaults, and the archive for gateways."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_tokenizers import GREEDY, ask, ids_request, served
from service_scene import play
from tiny_targets import VOCAB, tiny_model
from transformers import AutoModelForCausalLM

from draftwire.contract.errors import CheckpointError, UnavailableError
from draftwire.contract.validation import resolve_sampling_params
from draftwire.v1 import config_pb2, generate_pb2
from verifier_service.api.model_files import CHUNK_BYTES, ModelFiles
from verifier_service.api.preparation import RequestRules
from verifier_service.api.sampling_defaults import read_sampling_defaults
from verifier_service.target.target import Target, load_target

NO_FILE = object()
NO_KEY = object()
# (eos_token_id of config.json, of generation_config.json, expected end tokens)
GIVEN = [
    (2, NO_FILE, {2}),
    (0, NO_FILE, {0}),
    (None, NO_FILE, set()),
    ([0, 3], NO_FILE, {0, 3}),
    (2, 7, {7}),
    (2, 0, {0}),
    (None, 0, {0}),
    (2, [0], {0}),
    (2, [0, 7], {0, 7}),
    (2, [], set()),
    (2, None, set()),
    (2, NO_KEY, set()),
    (0, NO_KEY, set()),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_model(2, 16, "eager").save_pretrained(directory)
    return directory


def write(directory: Path, config: Any, generation: Any) -> None:
    """Write eos_token_id to both files; NO_FILE: no generation_config.json, NO_KEY: that file without the key."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": config}), encoding="utf-8")
    generation_path = directory / "generation_config.json"
    generation_path.unlink(missing_ok=True)
    if generation is not NO_FILE:
        values = {} if generation is NO_KEY else {"eos_token_id": generation}
        generation_path.write_text(json.dumps(values), encoding="utf-8")


def load(directory: Path) -> Target:
    return load_target(directory, "llama", torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("config", "generation", "expected"), GIVEN)
def test_end_tokens_are_those_of_generate(checkpoint, config, generation, expected):
    write(checkpoint, config, generation)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint).generation_config.eos_token_id
    assert expected == set(theirs if isinstance(theirs, list) else [] if theirs is None else [theirs])
    assert load(checkpoint).eos_token_ids == expected


@pytest.mark.parametrize("generation", [NO_FILE, NO_KEY])
@pytest.mark.parametrize("outside", [VOCAB, VOCAB + 1, -1, 2**40])
def test_end_tokens_outside_the_vocabulary_end_nothing(checkpoint, caplog, outside, generation):
    given = [2, outside]
    write(checkpoint, given if generation is NO_FILE else 2, NO_FILE if generation is NO_FILE else given)
    assert load(checkpoint).eos_token_ids == {2}
    assert f"eos_token_id = {given}: ids outside of the target's vocabulary of {VOCAB} tokens" in caplog.text


@pytest.mark.parametrize("wrong", ["2", 2.0, True, {}, [None], [[2]], ["2"]])
def test_end_tokens_that_are_no_ids_are_refused(checkpoint, wrong):
    write(checkpoint, 2, wrong)
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id = .*: must be a token id, a list"):
        load(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", "2", "\x00", '{"eos_token_id": 2', "[" * 100_000])
def test_a_damaged_generation_config_is_refused(checkpoint, text):
    write(checkpoint, 2, NO_FILE)
    (checkpoint / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"generation_config.json: (cannot be read|must be a JSON object)"):
        load(checkpoint)


LLAMA = {"do_sample": True, "temperature": 0.5, "top_p": 0.75, "eos_token_id": [1], "max_new_tokens": 9, "top_k": None}


def write_config(directory: Path, config: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


def test_the_file_s_values_are_defaults_and_the_request_s_win(tmp_path: Path) -> None:
    defaults = read_sampling_defaults("auto", write_config(tmp_path, LLAMA))
    assert defaults == config_pb2.SamplingParams(temperature=0.5, top_p=0.75, max_tokens=9)
    unset = resolve_sampling_params(config_pb2.SamplingParams(), defaults=defaults)
    assert (unset.temperature, unset.top_p, unset.max_tokens, unset.top_k) == (0.5, 0.75, 9, 0)
    given = resolve_sampling_params(config_pb2.SamplingParams(temperature=0, max_tokens=3), defaults=defaults)
    assert (given.temperature, given.top_p, given.max_tokens) == (0, 0.75, 3)


def test_without_a_file_the_contract_s_defaults_hold(tmp_path: Path) -> None:
    assert read_sampling_defaults("auto", tmp_path) is None
    assert read_sampling_defaults("none", write_config(tmp_path, LLAMA)) is None


def test_another_directory_may_have_the_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(CheckpointError, match=r"there is no generation_config\.json"):
        read_sampling_defaults(str(other), write_config(tmp_path, LLAMA))
    defaults = read_sampling_defaults(str(write_config(other, {"min_p": 0.25})), tmp_path)
    assert defaults == config_pb2.SamplingParams(min_p=0.25)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": -1}, "temperature = -1.0: allowed range [0, inf)"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: allowed range [1, 2147483647]"),
        ({"top_p": "most"}, "top_p = 'most': allowed range (0, 1]"),
    ],
    ids=str,
)
def test_a_value_that_no_request_may_have_ends_the_start(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_sampling_defaults("auto", write_config(tmp_path, config))
    assert words in str(caught.value)
    assert "--generation-config none" in str(caught.value)


@play
async def test_requests_take_them_and_the_server_tells_them() -> None:
    defaults = config_pb2.SamplingParams(temperature=0, max_tokens=6)
    async with served(None, RequestRules(default_sampling_params=defaults)) as stub:
        unset = await ask(stub, ids_request([3, 1, 4], config_pb2.SamplingParams()))
        assert unset == await ask(stub, ids_request([3, 1, 4], GREEDY))
        info = await stub.GetVerifierInfo(generate_pb2.GetVerifierInfoRequest())
    assert info.default_sampling_params == defaults


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
