"""Grammars over a vocabulary of twenty tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from draftwire.contract.structured_output import to_structured_output
from verifier_service.grammar.matcher import MaskedRows, MaskFiller, Matcher
from verifier_service.grammar.translation import GrammarSource, translate
from verifier_service.grammar.trial import grammar_error
from verifier_service.grammar.vocabulary import Vocabulary

PIECES = ["a", "b", "c", "ab", "ba", "abc", "{", "}", '"', ":", "0", "1", "2", ",", "[", "]", "cc", '":', "<", "<eos>"]
END = len(PIECES) - 1


def make_tokenizer(pieces: Sequence[str] = PIECES) -> Tokenizer:
    """Return a byte-level tokenizer with these pieces as tokens; the last is a special token."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([pieces[-1]])
    return tokenizer


@cache
def vocabulary(vocab_size: int = len(PIECES)) -> Vocabulary:
    """Return the vocabulary of PIECES for a target with `vocab_size` ids."""
    return Vocabulary(make_tokenizer(), vocab_size)


def source_of(output: dict[str, Any]) -> GrammarSource:
    return translate(to_structured_output(output), {"<eos>": END})


def matcher_of(output: dict[str, Any], end_ids: Iterable[int] = (END,), **options: Any) -> Matcher:
    """Return a matcher at the beginning of an output."""
    source = source_of(output)
    matcher, error = grammar_error(vocabulary().tokenizer, source.text)
    assert error == ""
    return Matcher(source, vocabulary(), matcher, end_ids, **options)


def allowed(matcher: Matcher, drafts: Sequence[int] = ()) -> list[set[int]]:
    """Return the allowed token ids of each row."""
    bits = MaskFiller(torch.device("cpu")).fill([MaskedRows(matcher, 0, drafts)]).bits
    return [{i for i in range(32 * len(row)) if row[i // 32] >> i % 32 & 1} for row in bits.tolist()]


def text_of(tokens: Iterable[int]) -> str:
    """Return the text of tokens, without end tokens."""
    return "".join(PIECES[token] for token in tokens if token != END)
