"""Digests of source code, by which what a compiler made of a kernel is found again.

A compiler of a language inside Python reads a kernel's source, that of each function which the kernel calls, and the values that
these take from their modules and closures. Where all of this is the same, so is the result.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

RELEASED = (
    "builtins",
    "copy",
    "cuda",
    "enum",
    "functools",
    "math",
    "numpy",
    "operator",
    "torch",
    "triton",
    "types",
    "typing",
)
"""Packages whose sources a version says: that of Python, or one that the caller adds to the digest."""

PRINTED = "builtins", "cuda", "triton", "types", "typing"
"""Packages whose objects print all that a compiler reads of them, such as types and constants. A tensor doesn't."""


class NoDigest(Exception):
    """A function takes a value that no text here stands for."""


def digest(function: Any, lines: bool = False) -> str:
    """A digest of all that a compiler reads of a kernel, but for constants, types and options of the launch.

    It doesn't depend on the folder of the source, nor on comments, layout and docstrings.

    Args:
        function: the kernel, as a Python function.
        lines: depend on the place of each line in its file, too, which debug information has.

    Raises:
        NoDigest: of a value that the kernel takes nobody can say what a compiler reads of it.
    """
    return _digest(_Reader(lines).function(function))


def of_modules(*modules: types.ModuleType) -> str:
    """A digest of modules' sources, without their comments, layout and docstrings."""
    return _digest(_tree(Path(module.__file__ or "").read_text("utf-8")) for module in modules)


def _digest(texts: Iterable[str]) -> str:
    every = hashlib.sha256(f"Python {sys.version_info[0]}.{sys.version_info[1]}".encode())  # whose syntax trees differ
    for text in texts:
        every.update(text.encode() + b"\0")
    return every.hexdigest()


class _Reader:
    """Reads a function and all that it reaches, each function once."""

    def __init__(self, lines: bool) -> None:
        self.lines = lines
        self.seen: set[int] = set()

    def function(self, function: Any) -> Iterator[str]:
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        code: types.CodeType = function.__code__
        source = _source(code)
        yield function.__qualname__
        if self.lines:
            yield f"{Path(code.co_filename).name}:{code.co_firstlineno}\n{source}"
        else:
            yield _tree(source)
        yield from self.value((function.__defaults__, function.__kwdefaults__), ())
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield from self.value(wrapped, ())
        names = _names(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield name
            yield from self.value(cell.cell_contents, names)
        for name, value in function.__annotations__.items():
            yield f"{name}: {value if isinstance(value, str) else _repr(value)}"
        for name in names:
            if name in function.__globals__:
                yield name
                yield from self.value(function.__globals__[name], names)

    def value(self, value: Any, names: tuple[str, ...]) -> Iterator[str]:
        """Texts that stand for a value; of a module of ours, for those of its values that `names` has."""
        yield type(value).__qualname__
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype)):
            yield repr(value)
        elif isinstance(value, (tuple, list)):
            items = cast("tuple[Any, ...]", value)
            yield str(len(items))
            for item in items:
                yield from self.value(item, names)
        elif isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                yield from self.value(key, names)
                yield from self.value(item, names)
        elif isinstance(value, types.ModuleType):
            yield value.__name__
            if not _is_released(value.__name__):
                for name in names:
                    if hasattr(value, name):
                        yield name
                        yield from self.value(getattr(value, name), names)
        else:
            function = _function(value)
            if function is None or _is_released(function.__module__):
                yield from self.released(value)
            else:
                yield from self.function(function)
            yield repr(getattr(value, "noinline", None))  # of triton.jit

    def released(self, value: Any) -> Iterator[str]:
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if not isinstance(name, str):
            yield _repr(value)
        elif _is_released(getattr(value, "__module__", None) or type(value).__module__):
            yield f"{value.__module__}.{name}"
        else:
            raise NoDigest(f"{value!r} is of {type(value)}")


def _function(value: Any) -> types.FunctionType | None:
    """The Python function of a function, a triton.jit or a cuda.tile.kernel; of anything else None."""
    functions = (value, getattr(value, "fn", None), getattr(value, "_pyfunc", None))
    return next((function for function in functions if isinstance(function, types.FunctionType)), None)


def _is_released(module: str) -> bool:
    return module.partition(".")[0] in RELEASED


def _repr(value: Any) -> str:
    text = repr(value)
    if type(value).__module__.partition(".")[0] not in PRINTED or " at 0x" in text:
        raise NoDigest(f"{text} doesn't say all of a {type(value)}")
    return text


@functools.cache
def _source(code: types.CodeType) -> str:
    try:
        return inspect.getsource(code)
    except OSError as error:
        raise NoDigest(f"{code} has no source") from error


@functools.cache
def _tree(source: str) -> str:
    """A source's syntax tree without docstrings, as text."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError as error:  # a lambda within an expression
        raise NoDigest(f"{source!r} is a part of a statement") from error
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node, False) is not None:
            del node.body[0]
    return ast.dump(tree)


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that code takes, and those of functions within it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted({*code.co_names, *(name for nested in inner for name in _names(nested))}))
