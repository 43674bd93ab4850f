"""Structured output of every kind becomes a grammar; what is wrong with one is named."""

from __future__ import annotations

import pytest
from grammar_scene import END, PIECES, matcher_of, source_of, vocabulary

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.structured_output import check_structured_output
from draftwire.v1 import config_pb2
from verifier_service.grammar.trial import grammar_error

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
    """Whether a text, token by token of one character, is complete under a structured output."""
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
