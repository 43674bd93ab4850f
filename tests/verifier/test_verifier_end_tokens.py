"""End-of-sequence ids: those that transformers' generate has, whatever the files of a checkpoint say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftwire.contract.errors import CheckpointError
from verifier_service.target.target import Target, load_target

VOCAB = 90
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "pad_token_id": None,
}
NO_FILE = object()
NO_KEY = object()
# eos_token_id of config.json and of generation_config.json; what ends an output.
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
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, eos_token_id=2)).save_pretrained(directory)
    return directory


def write(directory: Path, config: Any, generation: Any) -> None:
    """Gives a checkpoint these ids, or no generation_config.json, or one without any."""
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
