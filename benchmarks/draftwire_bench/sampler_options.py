"""The cost of sampling options in a step: `python -m draftwire_bench.sampler_options --device cuda:0`.

Each line is the median time of one verify step of all requests with `TokenSampler` (launch and finish, host and
device), and the share that the options add to a step. `--step-ms` is the time of a whole step of the target (8.4 ms:
32 requests of the Llama-3.1-8B shape on an H200, docs/operations.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import torch

from draftwire.contract.validation import (
    build_sampling_params,
    resolve_sampling_params,
    speculative_config_from_mapping,
)
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import NoiseKeys, ReadyDrafts, Request
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.sampling.sampler import TokenSampler

NUM_DRAFTS = 4
STEPS, WARM_UP = 60, 10
PROMPT_TOKENS = 200
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "logit_bias of 300 tokens": {"logit_bias": dict.fromkeys(range(300), 0.5)},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    "allowed_token_ids of 1000 tokens": {"allowed_token_ids": range(1000)},
    "allowed_token_ids of all but 1000": {"allowed_token_ids": "most"},
    "bad words: 4 of 1 token": {"bad_word_ids": [[7], [8], [9], [10]]},
    "bad words: 128 of 16 tokens": {"bad_word_ids": [[i + 1] * 16 for i in range(128)]},
    "allowed_token_ids and bad words": {"allowed_token_ids": range(1000), "bad_word_ids": [[7, 8], [9], [1, 2, 3]]},
}


def make_requests(count: int, vocab_size: int, options: dict[str, Any]) -> list[Request]:
    """Return requests in the middle of their output."""
    given = dict(options)
    if given.get("allowed_token_ids") == "most":
        given["allowed_token_ids"] = range(1000, vocab_size)
    params = resolve_sampling_params(build_sampling_params(max_tokens=500, **given))
    requests = []
    for number in range(count):
        prompt = np.random.default_rng(number).integers(0, vocab_size, PROMPT_TOKENS).tolist()
        keys = NoiseKeys(3 * number + 1, 3 * number + 2, 3 * number + 3)
        stops = StopConditions(params, frozenset())
        request = Request(f"r{number}", prompt, params, NUM_DRAFTS, keys, stops, PROMPT_TOKENS + 500)
        request.tokens += prompt[:20]
        requests.append(request)
    return requests


def make_rows(requests: Sequence[Request], vocab_size: int) -> list[ScheduledRows]:
    """Return a verify step of requests with all their drafts."""
    rows = []
    for number, request in enumerate(requests):
        request.num_computed = last = len(request.tokens) - 1
        drafts = np.random.default_rng(1000 + number).integers(0, vocab_size, NUM_DRAFTS).tolist()
        ready = ReadyDrafts(last + 1, request.tokens[-1], drafts)
        rows.append(ScheduledRows(request, last, [request.tokens[-1], *drafts], ready, samples=True))
    return rows


@torch.inference_mode()
def step_ms(requests: list[Request], logits: torch.Tensor) -> float:
    """Return the median milliseconds of a step's sampling."""
    config = speculative_config_from_mapping({"num_speculative_tokens": NUM_DRAFTS})
    sampler = TokenSampler(config, logits.shape[1], frozenset(), len(requests), logits.device)
    taken = []
    for _ in range(WARM_UP + STEPS):
        rows = make_rows(requests, logits.shape[1])
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        began = time.perf_counter()
        sampler.finish(sampler.launch(rows, logits))
        taken.append(1e3 * (time.perf_counter() - began))
    return float(np.median(taken[WARM_UP:]))


@click.command()
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--requests", "num_requests", default=32, show_default=True)
@click.option("--vocab-size", default=128256, show_default=True)
@click.option("--step-ms", "whole_ms", default=8.4, show_default=True, help="Time of a whole step, milliseconds.")
def main(device: str, dtype: str, num_requests: int, vocab_size: int, whole_ms: float) -> None:
    """Time the sampling of a step with each set of options."""
    generator = torch.Generator(device).manual_seed(0)
    num_rows = num_requests * (NUM_DRAFTS + 1)
    logits = torch.randn(num_rows, vocab_size, device=device, generator=generator).mul(2).to(getattr(torch, dtype))
    click.echo(f"{num_requests} requests with {NUM_DRAFTS} drafts, {vocab_size} tokens, {dtype}, {device}")
    plain = None
    for name, options in OPTIONS.items():
        own = step_ms(make_requests(num_requests, vocab_size, options), logits)
        plain = own if plain is None else plain
        click.echo(f"{name:<36} {own:7.3f} ms  {100 * (own - plain) / whole_ms:+6.1f} % of a step")


if __name__ == "__main__":
    main()
