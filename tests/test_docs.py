"""The documentation runs: `>>>` examples in Markdown and in liger_core's docstrings, and Python blocks are Python."""

import doctest
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import liger_core

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "conformance/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
MODULES = sorted(m.name for m in pkgutil.walk_packages(liger_core.__path__, "liger_core.") if "__main__" not in m.name)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The fenced blocks marked `python`, each with the number of its first line, counted from 0."""
    for fence in re.finditer(r"^( *)```python[^\n]*\n(.*?)^\1```", text, re.M | re.S):
        yield text.count("\n", 0, fence.start(2)), textwrap.dedent(fence[2])


def run(test: doctest.DocTest) -> None:
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append, clear_globs=False)
    assert not failed, "".join(report)


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str) -> None:
    """The examples of one page run in order, in one namespace."""
    names: dict[str, object] = {}
    for line, block in python_blocks((ROOT / page).read_text(encoding="utf-8")):
        if ">>>" in block:
            test = doctest.DocTestParser().get_doctest(block, names, page, str(ROOT / page), line)
            run(test)
            names = test.globs
        else:
            try:
                compile("\n" * line + block, str(ROOT / page), "exec")
            except SyntaxError as error:
                pytest.fail(f"{page}:{error.lineno}: {error.msg}. Mark the block ```text if it isn't Python.")


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module)):
        run(test)
