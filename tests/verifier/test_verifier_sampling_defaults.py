"""Defaults of sampling parameters from generation_config.json."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from odd_tokenizers import GREEDY, Answer, ask, ids_request, served

from draftwire.contract.errors import CheckpointError
from draftwire.contract.validation import resolve_sampling_params
from draftwire.v1 import config_pb2, generate_pb2
from verifier_service.api.preparation import RequestRules
from verifier_service.api.sampling_defaults import read_sampling_defaults

LLAMA = {"do_sample": True, "temperature": 0.5, "top_p": 0.75, "eos_token_id": [1], "max_new_tokens": 9, "top_k": None}


def write(directory: Path, config: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


def test_the_file_s_values_are_defaults_and_the_request_s_win(tmp_path: Path) -> None:
    defaults = read_sampling_defaults("auto", write(tmp_path, LLAMA))
    assert defaults == config_pb2.SamplingParams(temperature=0.5, top_p=0.75, max_tokens=9)
    unset = resolve_sampling_params(config_pb2.SamplingParams(), defaults=defaults)
    assert (unset.temperature, unset.top_p, unset.max_tokens, unset.top_k) == (0.5, 0.75, 9, 0)
    given = resolve_sampling_params(config_pb2.SamplingParams(temperature=0, max_tokens=3), defaults=defaults)
    assert (given.temperature, given.top_p, given.max_tokens) == (0, 0.75, 3)


def test_without_a_file_the_contract_s_defaults_hold(tmp_path: Path) -> None:
    assert read_sampling_defaults("auto", tmp_path) is None
    assert read_sampling_defaults("none", write(tmp_path, LLAMA)) is None


def test_another_directory_may_have_the_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(CheckpointError, match=r"there is no generation_config\.json"):
        read_sampling_defaults(str(other), write(tmp_path, LLAMA))
    defaults = read_sampling_defaults(str(write(other, {"min_p": 0.25})), tmp_path)
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
        read_sampling_defaults("auto", write(tmp_path, config))
    assert words in str(caught.value)
    assert "--generation-config none" in str(caught.value)


def test_requests_take_them_and_the_server_tells_them() -> None:
    defaults = config_pb2.SamplingParams(temperature=0, max_tokens=6)

    async def run() -> tuple[list[Answer], generate_pb2.GetVerifierInfoResponse]:
        async with served(None, RequestRules(default_sampling_params=defaults)) as stub:
            requests = [ids_request([3, 1, 4], params) for params in (config_pb2.SamplingParams(), GREEDY)]
            info = await stub.GetVerifierInfo(generate_pb2.GetVerifierInfoRequest())
            return [await ask(stub, request) for request in requests], info

    (unset, greedy), info = asyncio.run(run())
    assert unset == greedy
    assert info.default_sampling_params == defaults
