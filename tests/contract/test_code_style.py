"""Limits on the length of files, functions and test names; tests use no private names of the code under test."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = "draftwire/v1/"
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
"""Without the docstring."""
MAX_KERNEL_LINES = 150
"""Of a Triton kernel, whose arguments and compile-time constants alone fill dozens of lines."""
MAX_TEST_NAME = 60
PACKAGES = ("draftwire", "drafter_service", "verifier_service", "kernels", "benchmarks", "training", "deploy", "proto")
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples."""


def sources() -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file that is tracked, or new and not ignored; generated stubs excepted."""
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    for path in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines():
        if not path.startswith(STUBS) and (ROOT / path).exists():
            yield path, (ROOT / path).read_text(encoding="utf-8")


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function without its decorators and docstring."""
    first, last = function.body[0], function.body[-1]
    has_docstring = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (last.end_lineno or 0) - function.lineno + 1 - docstring


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def test_no_file_is_too_long():
    counts = {path: len(text.splitlines()) for path, text in sources()}
    assert {path: count for path, count in counts.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    too_long = {
        f"{path}: {one.name}": lines_of(one)
        for path, text in sources()
        for one in functions(text)
        if lines_of(one) > (MAX_KERNEL_LINES if is_kernel(one) else MAX_FUNCTION_LINES)
    }
    assert too_long == {}


def test_names_of_tests_are_short():
    names = {
        f"{path}: {one.name}": len(one.name)
        for path, text in sources()
        for one in functions(text)
        if one.name.startswith("test_") and path.startswith("tests/") and len(one.name) > MAX_TEST_NAME
    }
    assert names == {}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined(text: str) -> set[str]:
    """Return the private names that a file gives to its functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ):
                names.add(name)
    return set(filter(is_private, names))


def used(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private attribute, import, or name in a call of setattr or getattr."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr") | ast.Name(id="setattr" | "getattr")):
                texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                yield from ((node.lineno, one.rpartition(".")[2]) for one in texts)


def test_tests_touch_no_private_name_of_the_code():
    texts = dict(sources())
    own = {name for path, text in texts.items() if path.startswith(PACKAGES) for name in defined(text)}
    found = [
        f"{path}:{line}: {name}"
        for path, text in texts.items()
        if path.startswith("tests/")
        for line, name in used(text)
        if is_private(name) and name in own - defined(text)
    ]
    assert found == []
