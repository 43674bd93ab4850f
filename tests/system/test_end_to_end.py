"""One path through both processes, short enough for `make test`: text to text, with drafts."""

from __future__ import annotations

import pytest
from services import DEMO, LEAST_ACCEPTANCE, Reference, acceptance_rate, crowd, wait_for_drafter
from transformers import AutoTokenizer

from draftwire import Client
from draftwire_bench.processes import start_drafter, start_verifier

PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "while queue:\n    node = queue.pop()\n",
    "if __name__ == '__main__':\n",
    "async def fetch(url, timeout=10):\n    ",
)
LENGTH = 12
# Starting a service is slow on a loaded machine.
START_S = 600.0


@pytest.mark.timeout(1200)
def test_both_services_give_the_text_of_transformers(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    reference = Reference(DEMO / "target", [tokenizer.encode(prompt) for prompt in PROMPTS], length=LENGTH)
    assert reference.continuations, "every prompt has two best scores within rounding"
    with (
        start_drafter(
            DEMO / "eagle3", DEMO / "target", "--device", "cpu", log_path=tmp_path / "drafter.log", timeout_s=START_S
        ) as drafter,
        start_verifier(
            DEMO / "target",
            [drafter.address],
            *("--device", "cpu", "--draft-deadline-ms", "off", "--no-adaptive-k"),
            log_path=tmp_path / "verifier.log",
            timeout_s=START_S,
        ) as verifier,
        Client(verifier.address) as client,
    ):
        wait_for_drafter(client, drafter.address)
        calls = [(c.prompt, {"temperature": 0, "max_tokens": LENGTH}) for c in reference.continuations]
        completions = crowd(client, calls)
    for completion, continuation in zip(completions, reference.continuations, strict=True):
        assert list(completion.token_ids) == continuation.tokens[:LENGTH]
        assert completion.text == tokenizer.decode(continuation.tokens[:LENGTH])
    assert acceptance_rate(completions) > LEAST_ACCEPTANCE
