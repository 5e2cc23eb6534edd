"""Digests of kernels: what a compiler reads changes them, and nothing else does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_conformance import sources

KERNEL = '''
import enum
import math

import helpers
from helpers import shift

SIZE = 16
PAIR = (1, 2.5)
UNUSED = 1
NAMES = {"add": lambda x: x}


class Mode(enum.Enum):
    FAST = 1


MODE = Mode.FAST


def outer(step):
    def kernel(x, y=3):
        """Adds."""
        # a comment
        return shift(x) + SIZE + PAIR[1] + step + helpers.scaled(x) + math.pi + (MODE is not None)

    return kernel


kernel = outer(2)
'''
HELPERS = """
FACTOR = 2


def shift(x):
    return x - 1


def scaled(x):
    return x * FACTOR


def unused(x):
    return x
"""

Digest = Callable[..., str]


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """A function that makes the digest of the kernel where texts of the two files are replaced."""
    count = 0

    def load(name: str, text: str, folder: Path) -> Any:
        path = folder / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def digest(old: str = "", new: str = "", lines: bool = False) -> str:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        assert old in KERNEL + HELPERS
        texts = (text.replace(old, new) if old else text for text in (HELPERS, KERNEL))
        modules = [load(name, text, folder) for name, text in zip(("helpers", "kernels"), texts, strict=True)]
        return sources.digest(modules[1].kernel, lines)

    return digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ SIZE", "- SIZE"),
        ("SIZE = 16", "SIZE = 32"),
        ("SIZE = 16", "SIZE = 16.0"),
        ("PAIR = (1, 2.5)", "PAIR = (1, 2.6)"),
        ("y=3", "y=4"),
        ("outer(2)", "outer(3)"),
        ("x - 1", "x - 2"),
        ("FACTOR = 2", "FACTOR = 4"),
        ("MODE = Mode.FAST", "MODE = None"),
        ("import math", "import cmath as math"),
        ("import shift", "import unused as shift"),
    ],
)
def test_what_a_compiler_reads_changes_the_digest(digest: Digest, old: str, new: str) -> None:
    assert digest(old, new) != digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),  # of another folder
        ("import enum", "import enum\n\n\n"),
        ("# a comment", "# another one\n        # of two lines"),
        ('"""Adds."""', '"""Adds up."""'),
        ("UNUSED = 1", "UNUSED = 2"),
        ("def unused(x):\n    return x", "def unused(x):\n    return -x"),
        ("return shift(x) + SIZE", "return shift( x )+SIZE"),
    ],
)
def test_what_no_compiler_reads_does_not(digest: Digest, old: str, new: str) -> None:
    assert digest(old, new) == digest()


def test_lines_count_where_they_are_asked_for(digest: Digest) -> None:
    assert digest(lines=True) == digest(lines=True)
    assert digest("import enum", "import enum\n", lines=True) != digest(lines=True)
    assert digest("FACTOR = 2", "\nFACTOR = 2", lines=True) != digest(lines=True)


class Printed:
    """An object of a package that isn't known to print all."""

    def __repr__(self) -> str:
        return "Printed()"


@pytest.mark.parametrize(
    "value", [torch.tensor(1.00001), object(), Printed()], ids=["a rounded number", "an address", "a name alone"]
)
def test_a_value_that_does_not_say_all_of_itself(value: object) -> None:
    def kernel(x: Any) -> Any:
        return x + value

    with pytest.raises(sources.NoDigest):
        sources.digest(kernel)


def test_kernels_of_triton() -> None:
    """The same digest as of the function, and another one for another callee."""
    triton = pytest.importorskip("triton")
    compiled = triton.runtime.jit.JITFunction  # triton.jit may be that of the interpreter

    def one(x: Any) -> Any:
        return x + 1

    def two(x: Any) -> Any:
        return x + 2

    def digest(callee: Any) -> str:
        def kernel(x: Any) -> Any:
            return callee(x)

        return sources.digest(kernel)

    assert digest(compiled(one)) != digest(compiled(two))
    assert digest(compiled(one)) != digest(compiled(one, noinline=True))
    assert digest(triton.language.constexpr(1)) != digest(triton.language.constexpr(2))
    assert digest(triton.language.sum) == digest(triton.language.sum)


def test_modules() -> None:
    from liger_conformance.compilers import alignment, chips

    assert sources.of_modules(chips) == sources.of_modules(chips)
    assert sources.of_modules(chips) != sources.of_modules(chips, alignment)
