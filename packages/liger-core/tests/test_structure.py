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
    own = place(file.removesuffix(".py").replace("/", "."))
    below = [m for m in imported(ast.parse((SOURCE / file).read_text("utf-8"))) if place(m) > own]
    assert not below, f"{file} imports {', '.join(below)}, which the README's table has below it"
