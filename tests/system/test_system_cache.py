"""Greedy output equals transformers' when requests preempt each other or share cached prefixes.

Runs on the CPU, and on a GPU if there is one; transformers always computes in float32 on the CPU. A cached prefix
costs no accepted drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from services import DEMO, LEAST_ACCEPTANCE, Pair, Reference, acceptance_rate, crowd, wait_for_drafter
from transformers import AutoTokenizer

from draftwire import Client
from draftwire.client import Completion
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire_bench.processes import start_drafter, start_verifier
from verifier_service.drafters.sender import MAX_BACKLOG_ROWS

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.xdist_group("cache")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# The cache holds one request of full length, plus 16 tokens.
MAX_MODEL_LEN, KV_CACHE_TOKENS = 192, 208
# All these prompts fit into the cache together, but their outputs do not.
SHORT = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "with open(path) as file:\n    for line in file:\n        ",
    "class Stack:\n    def __init__(self):\n        self._items = []\n",
    "while queue:\n    node = queue.pop()\n",
    "async def fetch(url, timeout=10):\n    ",
    "from collections import defaultdict\n\ncounts = defaultdict(int)\n",
)
PREFIX = '''"""Reads and writes tables of measurements."""

import csv
import json
from pathlib import Path


class Table:
    """Rows with named columns."""

    def __init__(self, columns, rows):
        self.columns = columns
        self.rows = rows

'''
ENDINGS = ("    def __len__(self):\n", "    def __repr__(self):\n        return ", "    def column(self, name):\n")


def reference(texts: Sequence[str], length: int) -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    made = Reference(DEMO / "target", [tokenizer.encode(text) for text in texts], length)
    assert len(made.continuations) >= 0.7 * len(texts), "too many prompts whose best scores are within rounding"
    return made


@pytest.fixture(scope="module")
def short() -> Reference:
    return reference(SHORT, 64)


@pytest.fixture(scope="module")
def alike() -> Reference:
    return reference([PREFIX + ending for ending in ENDINGS], 12)


@pytest.fixture(scope="module", params=DEVICES)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Client of a verifier with a tiny cache and one drafter."""
    logs = tmp_path_factory.mktemp("cache-logs")
    place = ("--device", request.param, "--dtype", "float32")
    sizes = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-tokens", str(KV_CACHE_TOKENS), "--max-num-seqs", "8")
    with (
        start_drafter(DEMO / "eagle3", DEMO / "target", *place, log_path=logs / "drafter.log") as drafter,
        start_verifier(
            *(DEMO / "target", [drafter.address], *place, *sizes, "--draft-deadline-ms", "off", "--no-adaptive-k"),
            log_path=logs / "verifier.log",
        ) as verifier,
        Client(verifier.address) as client,
    ):
        wait_for_drafter(client, drafter.address)
        yield client


def complete_all(client: Client, reference: Reference, at_once: int) -> Sequence[Completion]:
    """Return the completions of all prompts, `at_once` in flight; check that they equal the reference."""
    options = {"temperature": 0, "max_tokens": reference.length}
    completions = crowd(client, [(one.prompt, options) for one in reference.continuations], at_once)
    for completion, continuation in zip(completions, reference.continuations, strict=True):
        assert list(completion.token_ids) == continuation.tokens
    assert acceptance_rate(completions) > LEAST_ACCEPTANCE
    return completions


def test_requests_that_preempt_each_other_match_transformers(client, short):
    completions = complete_all(client, short, at_once=8)
    preemptions = [completion.statistics.preemptions for completion in completions]
    assert sum(preemptions) == client.info().counters.preemptions > 0


def test_requests_that_share_first_blocks_match_transformers(client, alike):
    before = client.info().counters.prefix_hit_rows
    completions = complete_all(client, alike, at_once=1)
    hits = [completion.statistics.prefix_hit_tokens for completion in completions]
    assert min(hits[1:]) > 48  # tokens of the prefix
    assert client.info().counters.prefix_hit_rows - before == sum(hits)


@pytest.mark.xdist_group("demo")
def test_a_cached_prompt_has_as_many_drafts_accepted_as_before(demo: Pair) -> None:
    """Features of cached rows are not computed again but sent from the cache, here in two pieces."""
    prompt = PREFIX + 5 * "\n\n".join(SHORT) + ENDINGS[2]
    first, again = (demo.client.complete(prompt, temperature=0, max_tokens=96) for _ in range(2))
    assert first.statistics.prefix_hit_tokens == 0
    assert again.statistics.prefix_hit_tokens == (first.statistics.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert again.statistics.prefix_hit_tokens > MAX_BACKLOG_ROWS
    assert again.token_ids == first.token_ids
    assert list(again.statistics.drafted) == list(first.statistics.drafted)
    assert list(again.statistics.accepted) == list(first.statistics.accepted)
    assert acceptance_rate([again]) > LEAST_ACCEPTANCE
