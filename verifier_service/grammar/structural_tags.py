"""Convert structural tags of vLLM and xgrammar to the Lark dialect of llguidance.

Two layouts are supported: `{"structures": [...], "triggers": [...]}`, and the formats of xgrammar 0.1.25 and later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.structured_output import FIELD
from verifier_service.grammar.lark import ebnf_to_lark, regex_to_lark

TAG_FIELD = f"{FIELD}.structural_tag"
FORMATS = (
    *("const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "tag", "triggered_tags"),
    "tags_with_separator",
)
MOST_NESTED = 16


def structural_tag_grammar(
    tag: Mapping[str, Any], special_tokens: Mapping[str, int]
) -> tuple[str, list[dict[str, str]]]:
    """Return the Lark grammar of a structural tag, and llguidance's grammars that the Lark grammar refers to.

    Args:
        tag: The parsed JSON object.
        special_tokens: Ids of special tokens by text. The token replaces its text in literals.

    Raises:
        InvalidArgumentError: If a part is invalid.
    """
    writer = _Writer(special_tokens)
    if "structures" in tag:
        tags = [
            {"type": "tag", "begin": _get(one, "begin", str), "content": _content_of(one), "end": _get(one, "end", str)}
            for one in _get(tag, "structures", list)
        ]
        root: Mapping[str, Any] = {"type": "triggered_tags", "triggers": _get(tag, "triggers", list), "tags": tags}
    else:
        root = _get(tag, "format", dict)
    start = writer.write(root, [], 0)
    return writer.grammar(start), writer.parts


def _content_of(structure: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": _get(structure, "schema", dict)}


def _refuse(value: Any, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError(TAG_FIELD, value, allowed)


def _get(mapping: Any, key: str, kind: type) -> Any:
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    if not isinstance(value, kind):
        words = {"str": "text", "list": "a list", "dict": "an object"}
        raise _refuse(mapping, f"{key} must be {words[kind.__name__]}")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Writer:
    """Collects the rules of one grammar.

    A format is written together with the texts that may follow it, because free text ends where one of them begins.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        texts = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._rules: list[str] = []
        self.parts: list[dict[str, str]] = []

    def grammar(self, start: str) -> str:
        """Return the grammar whose first rule is `start`."""
        return "\n".join([f"start: {start}", *self._rules, r"FREE_TEXT: /(.|\n)*/", ""])

    def write(self, form: Any, ends: Sequence[str], depth: int) -> str:
        """Return the expression of a format and of one of the texts `ends` after it; without `ends`, of the format."""
        kind = _get(form, "type", str)
        writers: Mapping[str, Callable[[Any, int], str]] = {
            "const_string": lambda one, _: self._literal(_get(one, "value", str)),
            "json_schema": lambda one, _: f"%json {json.dumps(_get(one, 'json_schema', dict))}",
            "regex": lambda one, _: self._part(regex_to_lark(TAG_FIELD, _get(one, "pattern", str))),
            "grammar": lambda one, _: self._part(ebnf_to_lark(TAG_FIELD, _get(one, "grammar", str))),
            "sequence": self._sequence,
            "or": self._alternatives,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        if depth > MOST_NESTED:
            raise _refuse(form, f"allowed nesting: {MOST_NESTED} formats")
        if kind == "any_text":
            return self._free_text(ends)
        if kind not in writers:
            raise _refuse(kind, f"unknown type; known: {', '.join(FORMATS)}")
        expression = writers[kind](form, depth + 1)
        return f"({expression}) {self._one_of(ends)}" if ends else f"({expression})"

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {body}" if is_lazy else f"{name}: {body}")
        return name

    def _part(self, lark: str) -> str:
        self.parts.append({"name": f"p{len(self.parts)}", "lark_grammar": lark})
        return f"@{self.parts[-1]['name']}"

    def _literal(self, text: str) -> str:
        """Return the expression of a text, in which the texts of special tokens are replaced by tokens."""
        words: list[str] = []
        last = 0
        for match in self._split.finditer(text) if self._split is not None else ():
            words += [_quoted(text[last : match.start()]), f"<[{self._special[match.group()]}]>"]
            last = match.end()
        words.append(_quoted(text[last:]))
        return " ".join(word for word in words if word != '""') or '""'

    def _one_of(self, texts: Sequence[str]) -> str:
        return "(" + " | ".join(map(self._literal, texts)) + ")"

    def _free_text(self, ends: Sequence[str]) -> str:
        """Return the expression of text up to and including the first of the `ends`."""
        if not ends:
            return "FREE_TEXT"
        rules = []
        for end in ends:
            if not end:
                rules.append("FREE_TEXT")
            elif end in self._special:
                rules.append(f"FREE_TEXT {self._literal(end)}")
            elif self._split is not None and self._split.search(end):
                raise _refuse(end, "a text that ends free text is a special token or contains none")
            else:
                rules.append(self._rule(f"FREE_TEXT {self._literal(end)}", is_lazy=True))
        return "(" + " | ".join(rules) + ")"

    def _sequence(self, form: Any, depth: int) -> str:
        elements = _get(form, "elements", list)
        if any(_get(one, "type", str) == "any_text" for one in elements[:-1]):
            raise _refuse(form, "any_text is allowed as the last element of a sequence, or as the content of a tag")
        return " ".join(self.write(one, [], depth) for one in elements) or '""'

    def _alternatives(self, form: Any, depth: int) -> str:
        elements = _get(form, "elements", list)
        if not elements:
            raise _refuse(form, "elements must have at least one")
        return " | ".join(self.write(one, [], depth) for one in elements)

    def _tag(self, tag: Any, depth: int, skipped: str = "") -> str:
        """Return the expression of a tag, without `skipped`, the first part of its begin."""
        begin, end = _get(tag, "begin", str), tag.get("end", "")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(one, str) for one in ends):
            raise _refuse(tag, "end must be text or a list of texts")
        rest = begin[len(skipped) :]
        return f"{self._literal(rest) if rest else ''} {self.write(_get(tag, 'content', dict), ends, depth)}"

    def _triggered(self, form: Any, depth: int) -> str:
        """Return the expression of free text with tags; the text before a tag ends at the end of the tag's trigger."""
        triggers, tags = _get(form, "triggers", list), _get(form, "tags", list)
        if not triggers or not tags or not all(isinstance(one, str) and one for one in triggers):
            raise _refuse(form, "triggers and tags must have at least one, and no trigger is empty")
        triggered, bare = [], []
        for tag in tags:
            begin = _get(tag, "begin", str)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise _refuse(begin, f"must begin with a trigger, one of: {', '.join(triggers)}")
            triggered.append(self._rule(f"{self._free_text([trigger])} {self._tag(tag, depth, trigger)}"))
            if form.get("at_least_one"):
                bare.append(self._rule(self._tag(tag, depth)))
        some = "(" + " | ".join(triggered) + ")"
        first = "(" + " | ".join(bare) + ")"
        if form.get("stop_after_first"):
            return first if form.get("at_least_one") else f"{some} | FREE_TEXT"
        return f"{first} {some}* FREE_TEXT" if form.get("at_least_one") else f"{some}* FREE_TEXT"

    def _separated(self, form: Any, depth: int) -> str:
        tags = [self._tag(one, depth) for one in _get(form, "tags", list)]
        if not tags:
            raise _refuse(form, "tags must have at least one")
        one = self._rule("(" + " | ".join(tags) + ")")
        separator = _get(form, "separator", str)
        more = "" if form.get("stop_after_first") else f" ({self._literal(separator)} {one})*"
        return f"{one}{more}" if form.get("at_least_one") else f"({one}{more})?"
