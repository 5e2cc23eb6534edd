"""Which dimensions of an op's tensors are independent: a line of its declaration, read like an einsum."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

_SEVERAL = ("...", "*")
_TERM = re.compile(r"\.\.\.|\*|[a-z]\w*'?|[A-Z]\w*(@\w+)?")


class Result(NamedTuple):
    """A result's dimensions. It is a sum over the names that it lacks, or their mean over the `counted` labels."""

    names: tuple[str, ...]
    counted: str | None


class Dimensions(NamedTuple):
    """The names of the dimensions of each tensor, and of each result.

    A lower-case name is independent, and so is each dimension of ``...``: the op can be called on any part of it, and
    the parts of the results are those of the whole. A capital name is needed whole, and so is each dimension of ``*``.

    - A tensor that lacks an independent name is needed by every part, so its gradient is a sum over them. A dimension
      of size 1 lacks its name where another tensor has more of it; missing leading dimensions are lacking.
    - A result that lacks one is a sum over the parts.
    - ``h'`` is divided as ``h`` is, and has a size of its own, such as the heads of k beside those of q.
    - ``V@dim`` is the dimension whose number is the option ``dim``, wherever it is written.
    - A result that ends in ``/labels`` is that sum, divided by the number of labels that aren't ``ignore_index``; by
      the size of their dimension, where labels is None.
    - The results are those of ``reduction="none"``, where an op has that option; with ``"sum"`` the first one lacks
      all names. What a mean of it divides by is in the op's docstring.
    """

    tensors: dict[str, tuple[str, ...]]
    results: tuple[Result, ...]

    def of(self, tensor: str, dims: int, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The name of each dimension of an argument that has `dims` of them, in a call with these options."""
        return expand(self.tensors[tensor], dims, options)

    def of_result(self, number: int, dims: int, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The name of each dimension of a result."""
        return expand(self.results[number].names, dims, options)


def independent(name: str) -> bool:
    """Whether any part of a dimension can be computed alone."""
    return name[0] == "." or name[0].islower()


def expand(declared: Sequence[str], dims: int, options: Mapping[str, Any]) -> tuple[str, ...]:
    """A name per dimension. Dimensions of ``...`` and ``*`` are numbered from the right, where tensors are aligned."""
    placed = [name for name in declared if "@" in name]
    rest = [name for name in declared if "@" not in name]
    several = dims - len(declared) + 1
    if several > 1 and not any(name in _SEVERAL for name in declared):
        raise ValueError(f"{' '.join(declared) or 'a number'} is declared; a tensor has {dims} dimensions")
    named: list[str] = []
    for name in rest:
        named += [f"{name}{several - 1 - i}" for i in range(several)] if name in _SEVERAL else [name]
    for name in placed:
        named.insert(options[name.partition("@")[2]] % dims, name)
    return tuple(named[len(named) - dims :])


def parse(text: str, op: str, tensors: Sequence[str], options: Sequence[str], results: int | None) -> Dimensions:
    """Read an op's line.

    Args:
        text: such as ``"x: ... H, weight: H -> ... H"``.
        op: the op's name, for messages.
        tensors: its tensor arguments; the line names each of them once.
        options: its other arguments.
        results: how many results it has, or None for what can't be known.

    Raises:
        ValueError: what is wrong with the line, and what it takes.
    """

    def wrong(why: str) -> NoReturn:
        raise ValueError(f"{op}: dimensions is {text!r}: {why}")

    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        wrong("it takes the arguments, one ->, and the results")
    parsed_inputs: dict[str, tuple[str, ...]] = {}
    for part in left.split(","):
        name, colon, words = (word.strip() for word in part.partition(":"))
        if not colon:
            wrong(f"{part.strip()!r} has no colon; it takes an argument's name, a colon, and its dimensions")
        if name not in tensors:
            wrong(f"there is no tensor argument {name!r}; they are {', '.join(tensors)}")
        if name in parsed_inputs:
            wrong(f"{name} stands twice")
        parsed_inputs[name] = _terms(words, options, wrong)
    if missing := [name for name in tensors if name not in parsed_inputs]:
        wrong(f"{', '.join(missing)} is missing; it takes every tensor argument")
    known = {name for names in parsed_inputs.values() for name in names}
    for name in known:
        if name[0].swapcase() + name[1:] in known and name[0].isupper():
            wrong(f"{name} differs from another name in its case alone")
        if name.endswith("'") and name[:-1] not in known:
            wrong(f"{name} is divided as {name[:-1]}, which no argument has")
    parsed = tuple([_result(part, known, tensors, options, wrong) for part in right.split(",")])
    if results is not None and len(parsed) != results:
        wrong(f"it has {len(parsed)} results; the op has {results}")
    return Dimensions(parsed_inputs, parsed)


def _result(
    text: str, known: set[str], tensors: Sequence[str], options: Sequence[str], wrong: Callable[[str], NoReturn]
) -> Result:
    words, slash, counted = (word.strip() for word in text.partition("/"))
    if slash and (counted not in tensors or "ignore_index" not in options):
        wrong(f"/{counted} divides by labels that aren't ignore_index; it takes a tensor argument, and that option")
    names = _terms(words, options, wrong)
    if unknown := [name for name in names if name not in known]:
        wrong(f"no argument has {', '.join(unknown)}, which a result has")
    return Result(names, counted or None)


def _terms(words: str, options: Sequence[str], wrong: Callable[[str], NoReturn]) -> tuple[str, ...]:
    names = tuple(words.split())
    for name in names:
        if not _TERM.fullmatch(name):
            wrong(
                f"{name!r} is no dimension; it takes ..., *, a name in lower case (with ' or without), or a capital one"
            )
        if names.count(name) > 1 or (name in _SEVERAL and sum(names.count(several) for several in _SEVERAL) > 1):
            wrong(f"{words!r} has {name} beside another of its kind")
        if "@" in name and name.partition("@")[2] not in options:
            wrong(f"there is no option {name.partition('@')[2]!r}; they are {', '.join(options)}")
    return names
