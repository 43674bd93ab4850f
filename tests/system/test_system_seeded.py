"""A seeded request gives the same tokens alone, among other requests and in another slot, with every kind of draft."""

from __future__ import annotations

import json

import pytest
from services import acceptance_rate, crowd, wait_for_drafter

from draftwire import Client
from draftwire.client import Completion
from draftwire.contract.validation import NONE
from draftwire_bench.processes import start_drafter, start_verifier
from models import prompts_of

pytestmark = pytest.mark.xdist_group("seeded")

# tests/exactness/test_exact_seeds.py covers the other kinds without draft logits, and requests without drafts.
KINDS = {
    "greedy": {"draft_sample_method": "greedy"},
    "dense": {"draft_sample_method": "gumbel", "draft_logits": "dense"},
    "top_n": {"draft_sample_method": "gumbel", "draft_logits": {"top_n": 8}},
}
PROMPTS = prompts_of("llama")
SEEDED = {"temperature": 1.1, "top_p": 0.98, "max_tokens": 32, "ignore_eos": True}
SEEDS = (0, 12, -7, 2**62 + 1)


@pytest.fixture(scope="module")
def drafter(shelf, tmp_path_factory):
    """One drafter for the verifiers of all kinds."""
    log = tmp_path_factory.mktemp("seeded-logs") / "drafter.log"
    process = start_drafter(shelf.head("llama", "good"), shelf.target("llama"), "--device", "cpu", log_path=log)
    yield process
    process.kill()


@pytest.fixture(scope="module", params=KINDS)
def client(request, drafter, shelf, tmp_path_factory):
    """Client of a verifier without a draft deadline."""
    config = json.dumps({"num_speculative_tokens": 4, **KINDS[request.param]})
    verifier = start_verifier(
        shelf.target("llama"),
        [drafter.address],
        *("--device", "cpu", "--draft-deadline-ms", "off", "--speculative-config", config),
        log_path=tmp_path_factory.mktemp("seeded-logs") / "verifier.log",
    )
    with Client(verifier.address) as client:
        wait_for_drafter(client, drafter.address)
        yield client
    verifier.kill()


def seeded_calls():
    return [(prompt, {**SEEDED, "seed": seed}) for prompt, seed in zip(PROMPTS, SEEDS, strict=False)]


def other_calls():
    """Return requests with other seeds, temperatures, filters, lengths and numbers of drafts."""
    return [
        (
            prompt,
            {
                "temperature": 0.4 * (i % 4),
                "top_k": 20 * (i % 3),
                "frequency_penalty": 0.5 * (i % 2),
                "max_tokens": 5 + 4 * i,
                "num_speculative_tokens": i % 5,
                "seed": 1000 + i,
            },
        )
        for i, prompt in enumerate(PROMPTS[4:16])
    ]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_seeded_tokens_are_equal_alone_in_a_crowd_and_any_slot(client):
    alone = [client.complete(prompt, **options) for prompt, options in seeded_calls()]
    assert 0.1 < acceptance_rate(alone) < 0.95, "both outcomes of the test of a draft must occur"
    behind = crowd(client, [*other_calls(), *seeded_calls()])[-len(SEEDS) :]
    before = crowd(client, [*reversed(seeded_calls()), *other_calls()])[: len(SEEDS)]
    assert tokens(behind) == tokens(alone)
    assert tokens(before[::-1]) == tokens(alone)


def test_seed_decides_the_tokens(client):
    calls = [(PROMPTS[1], {**SEEDED, "seed": seed}) for seed in (1, 1, 2, 3)]
    first, again, second, third = tokens(crowd(client, calls))
    assert first == again
    assert len({first, second, third}) == 3


def test_request_without_a_seed_gives_other_tokens_each_time(client):
    outputs = tokens(crowd(client, [(PROMPTS[1], SEEDED)] * 3))
    assert len(set(outputs)) > 1


def test_drafts_without_logits_change_nothing_at_all(client):
    drafts = crowd(client, seeded_calls())
    none = crowd(client, [(prompt, {**options, "num_speculative_tokens": 0}) for prompt, options in seeded_calls()])
    has_logits = client.info().speculative_config.draft_logits.form != NONE
    assert (tokens(drafts) == tokens(none)) != has_logits
