"""Greedy output equals that of transformers.generate, token for token, with any drafter."""

from __future__ import annotations

import pytest
from services import LEAST_ACCEPTANCE, Reference, acceptance_rate, crowd
from transformers import AutoTokenizer

# The random head, whose drafts are nearly all wrong, runs with one target with a sliding window and one without.
HEADS = {"llama": (None, "random", "good"), "mistral": (None, "random", "good")}
HEADS |= {"random_llama": (None, "good"), "qwen3": (None, "good")}
PAIRS = [pytest.param(name, head, marks=pytest.mark.xdist_group(name)) for name, own in HEADS.items() for head in own]
CODE = (
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    ",
    "for name in sorted(names):\n    if name.startswith(",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    '"""Reads a configuration file."""\n\nimport json\n',
    "with open(path) as file:\n    for line in file:\n        ",
    "    def __repr__(self):\n        return ",
    "from collections import defaultdict\n\ncounts = defaultdict(int)\n",
    "if __name__ == '__main__':\n",
    "async def fetch(url, timeout=10):\n    ",
    "assert isinstance(result, dict)\nassert ",
    "    @property\n    def size(self):\n",
    "parser = argparse.ArgumentParser()\nparser.add_argument(",
    "def test_empty_list():\n    ",
    "while queue:\n    node = queue.pop()\n",
    "x = [i * i for i in range(10) if ",
    "raise TypeError(f'expected a string, got ",
    "lambda x, y: x",
    "MAX_RETRIES = 5\nTIMEOUT = ",
    "def merge(left, right):\n    result = []\n    while left and right:\n",
    "logger = logging.getLogger(__name__)\n\n\ndef ",
    "return sum(values) / len(values)\n\n\ndef median(values):\n",
    "class Error(Exception):\n    pass\n\n\nclass ",
)


def lengths(count: int, longest: int) -> list[int]:
    """Return different output lengths, long and short ones mixed."""
    return [1 + (17 * i + 29) % longest for i in range(count)]


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_greedy_output_is_that_of_transformers(target, head, pairs, references):
    pair, continuations = pairs(target), references(target).continuations
    assert len(continuations) >= 16
    pair.use(head)
    for k in (1, 4, 7) if head else (7,):
        limits = lengths(len(continuations), 48)
        calls = [
            (c.prompt, {"temperature": 0, "max_tokens": limit, "num_speculative_tokens": k})
            for c, limit in zip(continuations, limits, strict=True)
        ]
        completions = crowd(pair.client, calls)
        for completion, continuation, limit in zip(completions, continuations, limits, strict=True):
            assert list(completion.token_ids) == continuation.tokens[:limit]
            assert len(completion.statistics.drafted) <= k
        if head is None:
            assert not any(sum(completion.statistics.drafted) for completion in completions)
        elif head == "random":
            assert acceptance_rate(completions) < 0.1
        else:
            assert acceptance_rate(completions) > 0.3


@pytest.mark.xdist_group("demo")
def test_demo_pair_matches_transformers_as_requests_come_and_go(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo.target)
    reference = Reference(demo.target, [tokenizer.encode(code) for code in CODE], length=64)
    assert len(reference.continuations) >= 18, "too many prompts whose best scores are within rounding"
    limits = lengths(len(reference.continuations), 64)
    calls = [
        (c.prompt, {"temperature": 0, "max_tokens": limit})
        for c, limit in zip(reference.continuations, limits, strict=True)
    ]
    completions = crowd(demo.client, calls, at_once=16)
    for completion, continuation, limit in zip(completions, reference.continuations, limits, strict=True):
        assert list(completion.token_ids) == continuation.tokens[:limit]
    assert acceptance_rate(completions) > LEAST_ACCEPTANCE
