"""Times grammar engines with a target's vocabulary: compilation, masks, and the rows of a verify step.

    python -m draftwire_bench.grammar_engines --tokenizer DIR [--engine xgrammar]

xgrammar is not a dependency of Draftwire and must be installed to be measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from transformers import AutoTokenizer

DRAFTS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = {
    "name": "Ada Lovelace, Countess of King",
    "age": 36,
    "tags": ["red", "blue"],
    "address": {"street": "12 St James's Square, London, near the park", "zip": "10115"},
}
# Schemas that compile slowly in one of the engines: one of 124 KB, and a large multiple.
LARGE = {
    "type": "object",
    "properties": {
        f"field_{i}": {
            "type": "object",
            "properties": {f"k{j}": {"type": "string", "pattern": f"^[a-z]{{1,{j + 3}}}[0-9]+$"} for j in range(20)},
        }
        for i in range(100)
    },
}
MULTIPLE = {"type": "integer", "multipleOf": 9973}


class Matcher(Protocol):
    """The operations that both engines have."""

    def fill(self, row: int) -> None:
        """Write the mask of the next token into a row."""

    def take(self, token: int) -> bool:
        """Accept a token; return whether the grammar allows it."""

    def rollback(self, count: int) -> object:
        """Undo the last tokens."""


class LlguidanceMatcher:
    """llguidance as `verifier_service/grammar` uses it, one row at a time."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._bits = np.empty((DRAFTS + 1, words), np.int32)
        self.rollback = matcher.rollback

    def fill(self, row: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits[row].ctypes.data, self._bits[row].nbytes)

    def take(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)


class XgrammarMatcher:
    """xgrammar's GrammarMatcher."""

    def __init__(self, matcher: Any, bits: Any) -> None:
        self._matcher, self._bits = matcher, bits
        self.take, self.rollback = matcher.accept_token, matcher.rollback

    def fill(self, row: int) -> None:
        self._matcher.fill_next_token_bitmask(self._bits, row)


def llguidance_compiler(tokenizer: Any) -> Callable[[str], Matcher]:
    """Return a compiler of JSON Schemas with llguidance."""
    import llguidance

    from draftwire.v1 import config_pb2
    from verifier_service.grammar.translation import translate
    from verifier_service.grammar.vocabulary import Vocabulary

    vocabulary = Vocabulary(tokenizer.backend_tokenizer, len(tokenizer))

    def compile_schema(schema: str) -> Matcher:
        source = translate(config_pb2.StructuredOutput(json_schema=schema), {})
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, source.text)
        return LlguidanceMatcher(matcher, vocabulary.num_words)

    return compile_schema


def xgrammar_compiler(tokenizer: Any) -> Callable[[str], Matcher]:
    """Return a compiler of JSON Schemas with xgrammar on one thread."""
    xgrammar: Any = import_module("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(DRAFTS + 1, len(tokenizer))
    return lambda schema: XgrammarMatcher(xgrammar.GrammarMatcher(compiler.compile_json_schema(schema)), bits)


def step_times(matcher: Matcher, tokens: list[int]) -> tuple[list[float], list[float]]:
    """Return CPU seconds of each mask, and of the rows of each verify step with correct drafts."""
    single, rows = [], []
    for place, token in enumerate(tokens):
        began = time.process_time()
        matcher.fill(0)
        single.append(time.process_time() - began)
        drafts, began = tokens[place : place + DRAFTS], time.process_time()
        for row, draft in enumerate(drafts):
            matcher.fill(row)
            matcher.take(draft)
        matcher.fill(len(drafts))
        matcher.rollback(len(drafts))
        rows.append(time.process_time() - began)
        if not matcher.take(token):
            raise click.ClickException(f"the grammar refuses token {place} of its own document")
    return single, rows


@click.command()
@click.option("--tokenizer", required=True, type=click.Path(exists=True, path_type=Path), help="Directory.")
@click.option("--engine", type=click.Choice(["llguidance", "xgrammar"]), default="llguidance", show_default=True)
def main(tokenizer: Path, engine: str) -> None:
    """Print microseconds of masks and milliseconds of compilation, in CPU time."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    compile_schema = {"llguidance": llguidance_compiler, "xgrammar": xgrammar_compiler}[engine](loaded)
    tokens = loaded.encode(json.dumps(DOCUMENT, separators=(",", ":")), add_special_tokens=False)
    step_times(compile_schema(json.dumps(SCHEMA)), tokens)
    single, rows = (1e6 * np.array(times) for times in step_times(compile_schema(json.dumps(SCHEMA)), tokens))
    for what, times in (("mask", single), (f"{DRAFTS + 1} rows and roll back", rows)):
        print(f"{what}: mean {times.mean():.0f}, median {np.median(times):.0f}, largest {times.max():.0f} us")
    for name, schema in (("document", SCHEMA), ("multipleOf 9973", MULTIPLE), ("124 KB", LARGE)):
        began = time.process_time()
        compile_schema(json.dumps(schema))
        print(f"compile {name}: {1e3 * (time.process_time() - began):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
