"""Masks of structured output against every text of small languages, token by token."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from grammar_scene import END, PIECES, allowed, make_tokenizer, matcher_of, source_of, vocabulary

from verifier_service.grammar.matcher import MaskedRows, MaskFiller
from verifier_service.grammar.trial import grammar_error
from verifier_service.grammar.vocabulary import Vocabulary

ALPHABET = "abc01"
LONGEST = 6
REGEXES = ["(ab|ba|c){0,3}", "a*b{1,2}(c|0)?", "(a|ab)(c|bc)", "[01]{2}|abc"]
CHOICES = ["abc", "ab", "b", "cc0", "cca", '"a":1']


def language(regex: str) -> set[str]:
    """Every text of at most LONGEST characters that a regular expression matches."""
    texts = ("".join(letters) for n in range(LONGEST + 1) for letters in itertools.product(ALPHABET, repeat=n))
    return {text for text in texts if re.fullmatch(regex, text)}


def expected(texts: set[str], prefix: str) -> set[int]:
    """The tokens after which a text of the language can still come, and the end where one is complete."""
    found = {i for i, piece in enumerate(PIECES[:-1]) if any(text.startswith(prefix + piece) for text in texts)}
    return found | ({END} if prefix in texts else set())


def walk(texts: set[str], draw: random.Random) -> list[int]:
    """The tokens of a random text, with the end."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != END:
        tokens.append(draw.choice(sorted(expected(texts, "".join(PIECES[t] for t in tokens)))))
    return tokens


CASES = [({"regex": regex}, language(regex)) for regex in REGEXES] + [({"choice": CHOICES}, set(CHOICES))]
IDS = [*REGEXES, "choice"]


@pytest.mark.parametrize(("output", "texts"), CASES, ids=IDS)
def test_each_row_allows_what_can_follow_its_drafts(output, texts):
    draw = random.Random(1)
    for _ in range(20):
        tokens = walk(texts, draw)
        matcher, begin = matcher_of(output), 0
        while begin < len(tokens):
            drafts = tokens[begin : begin + draw.randrange(4)]
            rows = allowed(matcher, drafts)
            for j, row in enumerate(rows):
                done = tokens[: begin + j]
                if len("".join(PIECES[t] for t in done if t != END)) >= LONGEST - 3:
                    continue  # longer texts of an unbounded language are not in the reference
                assert row == (expected(texts, "".join(PIECES[t] for t in done)) if END not in done else {END})
            accepted = draw.randrange(len(drafts) + 1)
            matcher.follow(tokens[begin : begin + accepted + 1])
            begin += accepted + 1
        assert matcher.error is None


def test_an_output_that_is_rolled_back_has_the_masks_of_before():
    matcher = matcher_of({"choice": CHOICES})
    matcher.follow([0])
    before = allowed(matcher)
    matcher.follow([1, END, END])
    assert allowed(matcher) == [{END}]
    matcher.rewind(1)
    assert allowed(matcher) == before
    matcher.rewind(7)
    assert allowed(matcher) == before


def test_drafts_are_verified_up_to_the_first_outside():
    matcher = matcher_of({"choice": ["abc", "ab"]})
    assert [matcher.num_verified(d, has_logits=False) for d in ([0, 1, 2], [0, 2, 2], [2], [3, END, 0])] == [3, 1, 0, 2]
    # With its logits the first draft outside is verified, and is refused: to leave it out would bias the output.
    assert [matcher.num_verified(d, has_logits=True) for d in ([0, 1, 2], [0, 2, 2], [2], [3, END, 0])] == [3, 2, 1, 2]
    synthetic = matcher_of({"choice": ["abc", "ab"]}, keeps_rejected=False)
    assert synthetic.num_verified([0, 2, 2], has_logits=True) == 1


def test_an_end_inside_of_a_text_is_a_draft_outside():
    matcher = matcher_of({"choice": ["abc"]})
    assert matcher.num_verified([0, END], has_logits=False) == 1
    assert matcher.num_verified([5, END, END], has_logits=False) == 2


def test_min_tokens_hold_ends_back_where_more_can_follow():
    matcher = matcher_of({"regex": "a|ab"}, min_tokens=3)
    assert allowed(matcher, [0]) == [{0, 3}, {1}]
    matcher.follow([3])
    assert allowed(matcher) == [{END}]


def test_several_end_ids_may_end_a_text():
    matcher = matcher_of({"choice": ["a"]}, end_ids=(END, 18))
    assert allowed(matcher, [0]) == [{0}, {18, END}]


def test_end_ids_of_the_text_are_drawn_where_it_may_end():
    matcher = matcher_of({"regex": "(a|b)*c"}, end_ids=(END, 1))
    assert allowed(matcher, [0]) == [{0, 2, 3, 4, 5}] * 2
    matcher = matcher_of({"regex": "a(b|c)*"}, end_ids=(END, 1))
    assert allowed(matcher, [0]) == [{0, 3, 5}, {1, 2, 16, END}]
    matcher = matcher_of({"choice": ["{b}"]}, end_ids=(END, 1), min_tokens=9)
    assert allowed(matcher, [6, 1, 7]) == [{6}, {1}, {7}, {1, END}]


def test_an_end_id_ends_the_text_in_drafts_as_in_the_output():
    output, ends = {"regex": "a(bc)?"}, (END, 1)
    drafted, followed = (matcher_of(output, end_ids=ends, min_tokens=9) for _ in range(2))
    assert drafted.num_verified([0, 1, 2], has_logits=False) == 2
    followed.follow([0, 1])
    assert allowed(drafted, [0, 1])[-1] == allowed(followed)[0] == set(ends)


def test_a_token_outside_of_the_grammar_is_an_error():
    matcher = matcher_of({"choice": ["abc"]})
    matcher.follow([1])
    assert "token 1 is not in the request's grammar" in str(matcher.error)


def test_ids_without_a_token_of_the_tokenizer_are_never_allowed():
    padded = Vocabulary(make_tokenizer(), 90)
    matcher, error = grammar_error(padded.tokenizer, source_of({"regex": r"(.|\n)*"}).text)
    assert error == ""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    ids = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
    assert ids == set(range(END)) | {padded.end_bit}


def test_a_target_with_fewer_ids_than_its_tokenizer_has_masks():
    assert vocabulary(5).num_words == 1
    assert vocabulary(90).num_words == 3


def test_rows_of_several_requests_are_filled_together():
    one, other = matcher_of({"choice": ["abc", "{"]}), matcher_of({"regex": "[01]{3}"})
    masks = MaskFiller(torch.device("cpu")).fill([MaskedRows(one, 2, [0]), MaskedRows(other, 7, [])])
    assert masks.rows.tolist() == [2, 3, 7]
    assert masks.bits[:, 0].tolist() == [1 << 0 | 1 << 3 | 1 << 5 | 1 << 6, 1 << 1, 1 << 10 | 1 << 11]
