"""The files of liger_core stand in a line, which its README shows: each imports only what stands above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import liger_core

SOURCE = Path(liger_core.__file__).parent
README = Path(__file__).parent.parent / "README.md"
ROWS = re.findall(r"^\| ((?:`\w+(?:\.py|/)`(?:, )?)+) \|", README.read_text("utf-8"), re.M)
LINE = [re.findall(r"`(\w+)", row) for row in ROWS]
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.name != "__init__.py")


def place(module: str) -> int:
    """Where a module stands: a contract where all contracts do."""
    first = module.removeprefix("liger_core.").split(".")[0]
    return next(i for i, row in enumerate(LINE) if first in row)


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of liger_core that a file imports anywhere, in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("liger_core."))
        elif isinstance(node, ast.ImportFrom) and node.module == "liger_core":
            yield from (f"liger_core.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("liger_core."):
            yield node.module  # type: ignore[misc]


def test_every_file_is_in_the_line() -> None:
    assert {name for row in LINE for name in row} == {file.removesuffix(".py").split("/")[0] for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_what_stands_above_it(file: str) -> None:
    position = place(file.removesuffix(".py").replace("/", "."))
    below = [m for m in imported(ast.parse((SOURCE / file).read_text("utf-8"))) if place(m) > position]
    assert not below, f"{file} imports {', '.join(below)}, which the README's table has below it"


LONGEST = 60
"""Lines of a function without its docstring; a nested function's are among them."""

MOST_BRANCHES = 20
"""Ways through a function: one, and one more for each place where it branches. A nested function's are its own."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines(function: Function) -> int:
    """A function's lines without its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    described = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - described


def branches(function: Function) -> int:
    """The ways through a function, without those through functions that are nested in it."""
    count = 1
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(
            node, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
        ):
            count += 1
        waiting += ast.iter_child_nodes(node)
    return count


@pytest.mark.parametrize("file", FILES)
def test_a_function_is_short_and_branches_little(file: str) -> None:
    for node in ast.walk(ast.parse((SOURCE / file).read_text("utf-8"))):
        if isinstance(node, Function):
            assert lines(node) <= LONGEST, f"{node.name}, line {node.lineno}: {lines(node)} lines; at most {LONGEST}"
            assert branches(node) <= MOST_BRANCHES, (
                f"{node.name}, line {node.lineno}: {branches(node)} branches; at most {MOST_BRANCHES}"
            )


def test_lines_and_branches_are_counted() -> None:
    """A nested function's lines are its outer function's, its branches are not."""
    text = '''
def outer(a, b):
    """Two
    lines."""
    def inner():
        return 1 if a else 2
    if a and b or [x for x in a if x]:
        return inner
'''
    (outer,) = ast.parse(text).body
    assert isinstance(outer, ast.FunctionDef)
    assert (lines(outer), branches(outer)) == (5, 5)
