"""Grammars of every kind of structured output, with masks that match their language."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from grammar_scene import END, PIECES, allowed, make_tokenizer, matcher_of, source_of, vocabulary
from llguidance import LLParserLimits

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.structured_output import check_structured_output
from draftwire.v1 import config_pb2
from verifier_service.grammar import trial
from verifier_service.grammar.matcher import MaskedRows, MaskFiller
from verifier_service.grammar.trial import grammar_error
from verifier_service.grammar.vocabulary import Vocabulary

ALPHABET = "abc01"
LONGEST = 6
REGEXES = ["(ab|ba|c){0,3}", "a*b{1,2}(c|0)?", "(a|ab)(c|bc)", "[01]{2}|abc"]
CHOICES = ["abc", "ab", "b", "cc0", "cca", '"a":1']


def language(regex: str) -> set[str]:
    """Return every text of at most LONGEST characters that a regular expression matches."""
    texts = ("".join(letters) for n in range(LONGEST + 1) for letters in itertools.product(ALPHABET, repeat=n))
    return {text for text in texts if re.fullmatch(regex, text)}


def expected(texts: set[str], prefix: str) -> set[int]:
    """Return the tokens that extend `prefix` towards a text of the language, and END if `prefix` is such a text."""
    found = {i for i, piece in enumerate(PIECES[:-1]) if any(text.startswith(prefix + piece) for text in texts)}
    return found | ({END} if prefix in texts else set())


def walk(texts: set[str], draw: random.Random) -> list[int]:
    """Return the tokens of a random text, and END."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != END:
        tokens.append(draw.choice(sorted(expected(texts, "".join(PIECES[t] for t in tokens)))))
    return tokens


LANGUAGES = [({"regex": regex}, language(regex)) for regex in REGEXES] + [({"choice": CHOICES}, set(CHOICES))]
LANGUAGE_NAMES = [*REGEXES, "choice"]


@pytest.mark.parametrize(("output", "texts"), LANGUAGES, ids=LANGUAGE_NAMES)
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
    # With draft logits, the first draft outside is verified and rejected; cutting it would bias the output.
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


def test_each_request_of_a_step_has_its_own_end_ids():
    """An end id that continues an incomplete text is held back if another token can follow."""
    one, other = matcher_of({"regex": "[ab]c"}), matcher_of({"regex": "[ab]c"}, end_ids=(END, 0))
    masks = MaskFiller(torch.device("cpu")).fill([MaskedRows(one, 0, []), MaskedRows(other, 1, [])])
    assert masks.bits[:, 0].tolist() == [1 << 0 | 1 << 1, 1 << 1]


def test_a_grammar_that_gets_too_complex_ends_its_request_alone(monkeypatch):
    monkeypatch.setattr(trial, "limits", lambda: LLParserLimits(max_lexer_states=80, verbose_errors=False))
    complex_one, simple = matcher_of({"regex": "(a|b)*a(a|b){12}"}), matcher_of({"regex": "[ab]*"})
    draw = random.Random(1)
    for _ in range(100):
        masks = MaskFiller(torch.device("cpu")).fill([MaskedRows(complex_one, 0, []), MaskedRows(simple, 1, [])])
        if complex_one.error is not None:
            break
        token = draw.choice([0, 1])
        for matcher in (complex_one, simple):
            matcher.follow([token])
    assert "is too complex after" in str(complex_one.error)
    assert masks.bits[:, 0].tolist() == [1 << END, 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << END]
    assert simple.error is None


TAGS = {"structures": [{"begin": "<a", "schema": {"enum": [1, 2]}, "end": "b"}], "triggers": ["<"]}


def formatted(form: dict) -> dict:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def tag(begin: str, content: dict, end: object = "b") -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TEXT, NUMBER = {"type": "any_text"}, {"type": "json_schema", "json_schema": {"enum": [0, 12]}}
FREE = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a", NUMBER), tag("<c", TEXT)]}
# Structured output, texts that follow it, and texts that do not.
CASES = [
    ({"json_schema": {"enum": [1, "a"]}}, ["1", '"a"'], ["a", "2"]),
    ({"json_schema": '{"type": "array", "items": {"enum": [0]}}'}, ["[]", "[0,0]"], ["[1]", "0"]),
    ({"json_object": True}, ["{}", '{"a":1}'], ["[]", "1"]),
    ({"regex": "a(b|c)*"}, ["a", "abc"], ["b", "a0"]),
    ({"regex": "a|/b"}, ["a"], ["b"]),
    ({"grammar": 'root ::= "a" x*\nx ::= [b-c] "0"\n'}, ["a", "ab0c0"], ["ab", "b0"]),
    ({"grammar": 'start: "a" X*\nX: /[bc]/ "0"\n'}, ["a", "ab0c0"], ["ab", "b0"]),
    ({"choice": ["a", "{", '"b"']}, ["a", "{", '"b"'], ["b", "aa"]),
    ({"structural_tag": TAGS}, ["abc", "a<a1bc", "<a2b<a1b"], ["<c", "<a0b", "<a1"]),
    (formatted({"type": "const_string", "value": "ab"}), ["ab"], ["a", "abc"]),
    (formatted({"type": "regex", "pattern": "a+"}), ["aaa"], ["b"]),
    (formatted({"type": "grammar", "grammar": 'root ::= "a" | "b"'}), ["a"], ["c"]),
    (formatted({"type": "or", "elements": [NUMBER, tag("a", TEXT)]}), ["12", "a00b"], ["ab0", "1"]),
    (formatted({"type": "sequence", "elements": [NUMBER, TEXT]}), ["0", "12abc"], ["abc"]),
    (formatted(tag("a", TEXT, ["}", "]"])), ["a0}", "abc]"], ["a0", "a0}0"]),
    (formatted(FREE), ["abc", "0<a12b0", "<c00b"], ["<b", "<a1b"]),
    (formatted({**FREE, "at_least_one": True, "stop_after_first": True}), ["<a0b"], ["abc", "<a0b0"]),
    (formatted({**FREE, "at_least_one": True}), ["<a0b0<c0b"], ["abc"]),
    (
        formatted({"type": "tags_with_separator", "separator": ",", "tags": [tag("a", NUMBER)]}),
        ["", "a0b", "a0b,a12b"],
        ["a0b,", "a0ba0b"],
    ),
    (formatted(tag("<eos>", NUMBER)), [], ["<eos>0b"]),
]


def follows(output: dict, text: str) -> bool:
    """Return whether a structured output allows exactly this text. Each character is one token."""
    matcher = matcher_of(output, end_ids=[END])
    tokens = [PIECES.index(character) for character in text]
    return matcher.num_verified([*tokens, END], has_logits=False) == len(tokens) + 1


@pytest.mark.parametrize(("output", "right", "wrong"), CASES, ids=lambda value: str(value)[:50])
def test_texts_follow_their_structured_output(output, right, wrong):
    assert [text for text in right if not follows(output, text)] == []
    assert [text for text in wrong if "<eos>" not in text and follows(output, text)] == []


def test_a_special_token_of_a_tag_is_that_token():
    matcher = matcher_of(formatted(tag("<eos>", NUMBER)), end_ids=[5])
    assert matcher.num_verified([END, 10, 1], has_logits=False) == 3


WRONG = [
    ({"json_schema": '{"type"'}, "json_schema", "is not valid JSON"),
    ({"json_schema": "[]"}, "json_schema", "must be a JSON object"),
    ({"json_schema": '{"items":' * 129 + "{}" + "}" * 129}, "json_schema", "nests more than 128"),
    ({"structural_tag": "1"}, "structural_tag", "must be a JSON object"),
    ({"structural_tag": {}}, "structural_tag", "format must be an object"),
    ({"structural_tag": {"structures": []}}, "structural_tag", "triggers must be a list"),
    ({"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["a"]}}, "structural_tag", "schema must be"),
    (formatted({"type": "poem"}), "structural_tag", "unknown type; known: const_string"),
    (formatted({**FREE, "triggers": ["x"]}), "structural_tag", "must begin with a trigger"),
    (formatted({"type": "sequence", "elements": [TEXT, NUMBER]}), "structural_tag", "any_text is allowed as the last"),
    ({"choice": ["a", "a"]}, "choice", "is given more than once"),
    ({"choice": []}, "choice", "at least one"),
    ({"grammar": "root ::= x"}, "grammar", "not a valid EBNF grammar"),
    ({"grammar": "root ::= " + "(" * 30000}, "grammar", "not a valid EBNF grammar"),
    ({"regex": "a\nb"}, "regex", "line breaks"),
]


@pytest.mark.parametrize(("output", "kind", "allowed"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_before_the_engine(output, kind, allowed):
    with pytest.raises(InvalidArgumentError, match=allowed) as caught:
        source_of(output)
    assert caught.value.field == f"sampling_params.structured_output.{kind}"


REFUSED = [
    ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
    ({"json_schema": {"type": "object", "if": {}}}, "if"),
    ({"regex": "a("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "no text follows it"),
    ({"grammar": "start: x"}, 'unknown name: "x"'),
    ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
]


@pytest.mark.parametrize(("output", "error"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_compiled_says_why(output, error):
    assert error in grammar_error(vocabulary().tokenizer, source_of(output).text)[1]


@pytest.mark.parametrize(
    ("message", "allowed"),
    [
        (config_pb2.StructuredOutput(), "exactly one is required of: json_schema, json_object"),
        (config_pb2.StructuredOutput(json_object=False), "must be true"),
    ],
)
def test_a_message_without_a_kind_is_refused(message, allowed):
    with pytest.raises(InvalidArgumentError, match=allowed):
        check_structured_output(message)
