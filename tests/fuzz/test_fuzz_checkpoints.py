"""Checkpoints with odd tokenizers or special tokens; `make test-fuzz` plays many more of them.

test_fuzz.py explains FUZZ_CASES, FUZZ_SEED and FUZZ_ONLY; one checkpoint counts as 100 cases.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fuzz_tokenizers import TEMPLATES, is_proper, odd_request, odd_tokenizer
from odd_tokenizers import Answer, answers, ask, codec_of, ids_request, served
from transformers import AutoModelForCausalLM, LlamaConfig

from draftwire.contract.errors import CheckpointError, DraftwireError
from verifier_service.core.tokenizer import TextCodec
from verifier_service.target.target import Target, check_split, load_target
from verifier_service.target.tensor_parallel import Rank

COUNT = max(1, int(os.environ.get("FUZZ_CASES", "1500")) // 100)
SEED = os.environ.get("FUZZ_SEED", "1")
ONLY = os.environ.get("FUZZ_ONLY")
VOCAB = 40
IDS = (0, 1, 2, VOCAB - 1, VOCAB, VOCAB + 1, -1, -100, 2**31, 2**40)
NO_IDS = (True, False, "2", "", 1.0, 0.5, {}, {"id": 2}, [None], [[2]], ["2"], [True], [1.5])
KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id")
NEIGHBOURS = [ids_request([3, 1, 4, i]) for i in range(4)]

pytestmark = pytest.mark.timeout(7200)


def cases() -> Iterator[tuple[int, Random]]:
    """Yield the number and the random generator of each case."""
    for index in range(COUNT) if ONLY is None else [int(ONLY)]:
        yield index, Random(f"{SEED}/{index}")


def play(index: int, case: Callable[[], None]) -> None:
    """Play a case; a failure has its seed and number."""
    try:
        case()
    except Exception as error:
        raise AssertionError(f"FUZZ_SEED={SEED} FUZZ_ONLY={index}: {type(error).__name__}: {error}") from error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def special_tokens(rng: Random) -> dict[str, Any]:
    """Return random values of some special tokens: valid ids, null, lists, ids out of range, and other types."""
    values: dict[str, Any] = {}
    for key in KEYS:
        kind = rng.randrange(6)
        if kind < 2:
            values[key] = rng.choice((None, *IDS))
        elif kind == 2:
            values[key] = [rng.choice(IDS) for _ in range(rng.randrange(4))]
        elif kind == 3 and rng.random() < 0.3:
            values[key] = rng.choice(NO_IDS)
    return values


def write(directory: Path, original: dict[str, Any], rng: Random) -> None:
    """Write both configuration files; the second may be damaged or missing."""
    (directory / "config.json").write_text(json.dumps({**original, **special_tokens(rng)}), encoding="utf-8")
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    if rng.random() < 0.7:
        data = json.dumps(special_tokens(rng)).encode()
        if rng.random() < 0.2:
            data = rng.choice((b"", data[: rng.randrange(len(data))], b"[1]", b"null", b"\xff\xfe", b"[" * 100_000))
        path.write_bytes(data)


def load(directory: Path, *, dummy: bool) -> Target:
    return load_target(directory, "fuzz", torch.float32, torch.device("cpu"), dummy=dummy)


def judge_target(directory: Path) -> None:
    """Check that a checkpoint is refused with a reason, or has the same end tokens as in transformers' generate."""
    for attempt in (lambda: check_split(directory, "fuzz", Rank(0, 2)), lambda: load(directory, dummy=True)):
        try:
            attempt()
        except DraftwireError as error:
            assert str(error)  # noqa: PT017
    try:
        target = load(directory, dummy=False)
    except CheckpointError:
        return
    theirs = AutoModelForCausalLM.from_pretrained(directory).generation_config.eos_token_id
    expected = {token for token in (theirs if isinstance(theirs, list) else [theirs]) if token in range(VOCAB)}
    assert target.eos_token_ids == expected


def test_special_tokens_of_any_kind_are_served_or_refused(checkpoint: Path) -> None:
    original = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for index, rng in cases():
        write(checkpoint, original, rng)
        play(index, lambda: judge_target(checkpoint))


def judge_codec(codec: TextCodec, rng: Random, alone: list[Answer]) -> None:
    """Check that requests which the tokenizer cannot serve fail, without effect on other requests."""

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with served(codec) as stub:
            odd = asyncio.gather(*(ask(stub, odd_request(rng)) for _ in range(12)))
            return await asyncio.gather(*(ask(stub, request) for request in NEIGHBOURS)), await odd

    neighbours, odd = asyncio.run(run())
    assert all(map(is_proper, odd)), odd
    for own, before in zip(neighbours, alone, strict=True):
        assert is_proper(own), own
        assert own.token_ids in (before.token_ids, before.token_ids[: len(own.token_ids)])


def test_tokenizers_of_any_kind_fail_their_requests_alone(tmp_path: Path) -> None:
    alone = answers(None, NEIGHBOURS)
    for index, rng in cases():
        tokenizer, template = odd_tokenizer(rng), rng.choice(TEMPLATES)
        try:
            codec = codec_of(tokenizer, tmp_path / str(index), template)
        except CheckpointError:
            continue
        play(index, lambda: judge_codec(codec, rng, alone))  # noqa: B023
