"""Every declaration of the contract has a comment that agrees with its limits, and pages keep rules for their form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf.descriptor import FieldDescriptor

from draftwire.v1 import config_pb2, draft_pb2, generate_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto" / "draftwire" / "v1").glob("*.proto"))
MODULES = (config_pb2, generate_pb2, draft_pb2)

# Fields, enum values, messages, enums, services, rpcs and oneofs; not `option`, `import`, `package`, `extend`.
DECLARATION = re.compile(
    r"^\s*(?:(?:message|enum|service|oneof|rpc)\s+(?P<block>\w+)"
    r"|(?:(?:optional|repeated)\s+)?(?:map<[^>]+>|[\w.]+)\s+(?P<field>\w+)\s*=\s*\d+"
    r"|(?P<value>[A-Z][A-Z0-9_]*)\s*=\s*\d+)"
)


class Declaration(NamedTuple):
    path: str
    comment: str


def declarations(proto: Path) -> Iterator[Declaration]:
    """Yield each declaration with the comment directly above it."""
    comment: list[str] = []
    scopes: list[str] = []
    for line in proto.read_text(encoding="utf-8").splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            comment.append(stripped.removeprefix("//").strip())
            continue
        match = DECLARATION.match(line)
        if match and not stripped.startswith(("syntax", "import", "package")):
            name = match["block"] or match["field"] or match["value"]
            yield Declaration(".".join([*scopes, name]), " ".join(comment))
        if stripped.endswith("{"):
            scopes.append(match["block"] if match and match["block"] else "")
        elif stripped == "}":
            scopes.pop()
        comment = []


COMMENTS = {entry.path: entry.comment for proto in PROTOS for entry in declarations(proto)}


def all_fields() -> dict[str, FieldDescriptor]:
    """Return the fields by the path that `declarations` gives them."""
    return {
        ".".join(filter(None, [message.name, field.containing_oneof and oneof_scope(field), field.name])): field
        for module in MODULES
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }


def oneof_scope(field: FieldDescriptor) -> str:
    # protoc puts each `optional` field into a synthetic oneof, which is not written in the file.
    oneof = field.containing_oneof
    return "" if oneof.name == f"_{field.name}" else oneof.name


def test_the_text_was_parsed_whole():
    expected = set(all_fields())
    for module in MODULES:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            expected.add(message.name)
            expected.update(f"{message.name}.{o.name}" for o in message.oneofs if not o.name.startswith("_"))
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            expected.update([enum.name, *(f"{enum.name}.{value.name}" for value in enum.values)])
        for service in module.DESCRIPTOR.services_by_name.values():
            expected.update([service.name, *(f"{service.name}.{method.name}" for method in service.methods)])
    expected.add(".limits")  # the extension that carries the limits
    assert set(COMMENTS) == expected


@pytest.mark.parametrize("path", COMMENTS)
def test_is_documented_by_a_sentence(path):
    comment = COMMENTS[path]
    assert comment, f"{path} has no comment line of its own"
    assert re.search(r"[.;:]$", comment), f"the comment of {path} is no whole sentence"


LIMITED = {path: field for path, field in all_fields().items() if field.GetOptions().HasExtension(config_pb2.limits)}


def limits(path: str) -> config_pb2.Limits:
    return LIMITED[path].GetOptions().Extensions[config_pb2.limits]


def interval(text: str) -> tuple[str, float, float | str] | None:
    """Return (bracket, low, high) of the first interval in the text; high is a string if it names another field."""
    match = re.search(r"([\[(])(-?[\d.]+), ([^\])]+)([\])])", text)
    if match is None:
        return None
    high: float | str = match[3]
    if match[3] == "inf":
        high = math.inf
    elif power := re.fullmatch(r"(\d+)\^(\d+)", match[3]):
        high = float(int(power[1]) ** int(power[2]) - (match[4] == ")"))
    elif re.fullmatch(r"-?[\d.]+", match[3]):
        high = float(match[3])
    return match[1], float(match[2]), high


@pytest.mark.parametrize("path", LIMITED)
def test_words_give_the_range_of_the_limits(path):
    limit, comment = limits(path), COMMENTS[path]
    if not limit.HasField("min"):
        assert "range" not in comment
        return
    if LIMITED[path].name == "num_speculative_tokens" and "maximum" in comment:
        assert "Default and maximum: the server's k" in comment
        return
    found = interval(comment)
    assert found is not None, f"{path} states no range"
    bracket, low, high = found
    assert (bracket == "(", low) == (limit.exclusive_min, limit.min)
    if isinstance(high, float):
        assert high == (limit.max if limit.HasField("max") else math.inf)
    else:  # a limit that depends on another field
        assert high in ("max_tokens", "k + 1", "draft vocabulary size")


@pytest.mark.parametrize("path", LIMITED)
def test_words_give_the_default_of_the_limits(path):
    limit, comment = limits(path), COMMENTS[path]
    stated = re.search(r"Default:? ([\w.-]+)", comment)
    if limit.HasField("default"):
        words = {"true": 1.0, "false": 0.0}
        assert stated is not None, f"{path} states no default"
        word = stated[1].rstrip(".")
        assert words.get(word) == limit.default or float(word) == limit.default
    elif stated is not None:
        assert not re.fullmatch(r"-?\d.*|true|false", stated[1]), f"{path} states a default that nothing fills in"


@pytest.mark.parametrize("path", LIMITED)
def test_words_give_the_sizes_of_the_limits(path):
    limit, comment = limits(path), COMMENTS[path]
    names_its_values = '"eagle", "eagle3"' in comment
    if limit.HasField("max_bytes") and not names_its_values:
        assert f"{limit.max_bytes} bytes" in comment
    if limit.HasField("max_items"):
        assert f"at most {limit.max_items}" in comment or "k values" in comment


def test_every_sampling_parameter_states_its_default():
    for field in config_pb2.SamplingParams.DESCRIPTOR.fields:
        assert "Default" in COMMENTS[f"SamplingParams.{field.name}"]
    for field in config_pb2.SpeculativeConfig.DESCRIPTOR.fields:
        assert "Default" in COMMENTS[f"SpeculativeConfig.{field.name}"]


OTHER_PAGES = (
    *("README.md", "SECURITY.md", "benchmarks/README.md", "training/README.md"),
    *("models/demo/README.md", "models/smollm2/README.md"),
)
PAGES = sorted([*(ROOT / page for page in OTHER_PAGES), *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9][0-9][0-9]-*.md"))
TABLE_LINE = re.compile(r"\s*[|┏┃┡│└]")  # of a Markdown table or a terminal's table
CODE_BLOCK = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def heading_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lines_of_pages_are_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 140 and not TABLE_LINE.match(line)]
    assert long == [], "lines have at most 140 characters, tables excepted"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_of_pages_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        if anchor and linked.suffix == ".md":
            assert anchor in heading_anchors(linked), f"{target} names no heading"


def test_decision_records_are_few_and_short():
    assert 0 < len(DECISIONS) <= 25
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    for record in DECISIONS:
        assert len(record.read_text(encoding="utf-8").splitlines()) <= 40, record.name
        assert f"({record.name})" in index, record.name


def test_performance_fits_in_150_lines():
    assert len((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()) <= 150
