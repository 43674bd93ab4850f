"""The distribution of structured output over the tiny target's eight tokens: seven letters and an end token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from exact_law import LENGTH, Array, Law, Sampling, distribution
from exact_pair import VOCAB
from exact_services import Sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefg"
END = VOCAB - 1
REGEX = "([ab][cd]|[cd][ab]|e[fg]?)*"
OPTIONS = {"structured_output": {"regex": REGEX}, "stop_token_ids": [END]}

# The automaton of REGEX: state, token -> state. A text is complete in START and E.
START, AB, CD, E, ENDED, OUTSIDE = range(6)
_FIRST = {"a": AB, "b": AB, "c": CD, "d": CD, "e": E}
_NEXT = {
    START: _FIRST,
    AB: {"c": START, "d": START},
    CD: {"a": START, "b": START},
    E: {**_FIRST, "f": START, "g": START},
    ENDED: {},
    OUTSIDE: {},
}


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose tokens are the letters and the end token."""
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*LETTERS, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def transitions() -> np.ndarray:
    """Return the state after each token, [states, VOCAB]; OUTSIDE for a token that the grammar forbids."""
    table = np.full((len(_NEXT), VOCAB), OUTSIDE)
    for state, following in _NEXT.items():
        for letter, then in following.items():
            table[state, LETTERS.index(letter)] = then
    table[[START, E, ENDED], END] = ENDED
    return table


class StructuredLaw(Law):
    """The distribution of outputs that match REGEX; only end tokens follow an end token."""

    def _target_rows(self, sampling: Sampling, depth: int) -> Array:
        logits = self.target_logits(depth)
        digits = VOCAB ** np.arange(depth - 1, -1, -1)
        outputs = np.arange(VOCAB**depth)[:, None] // digits % VOCAB
        counts = (outputs[:, :, None] == np.arange(VOCAB)).sum(1)
        table, state = transitions(), np.zeros(len(outputs), np.int64)
        for place in range(depth):
            state = table[state, outputs[:, place]]
        is_allowed = table[state] != OUTSIDE
        is_allowed[state == OUTSIDE] = True  # the state of impossible outputs
        logits = np.where(is_allowed, logits, -np.inf)
        return distribution(logits, sampling, np.isin(np.arange(VOCAB), self.prompt), counts)


def padded(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Return the outputs, padded to LENGTH with end tokens."""
    return [(*one.tokens, *[END] * (LENGTH - len(one.tokens))) for one in samples]
