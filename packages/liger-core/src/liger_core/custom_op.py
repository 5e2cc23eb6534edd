"""Launches that torch.compile can't trace."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from liger_core import torch_state

P = ParamSpec("P")
R = TypeVar("R")

# What torch.library.custom_op makes runs Python around each call, for gradients and versions that a launch in a compiled graph
# has no use for.
_library = torch.library.Library("liger", "FRAGMENT")

DEFINED: dict[str, Callable[..., Any]] = {}
"""The custom ops that there are, by their names without the namespace, ``liger``; and what each runs."""


def opaque(
    *, writes: tuple[str, ...], within: str | None = None, fake: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Hide a kernel launch from torch.compile, for languages that Dynamo can't trace.

    Eager calls go straight to the function. A traced call becomes one custom op that writes to the tensors named in
    `writes`; its fake does nothing, since the host code around it, which is traced, has allocated them.

        @opaque(writes=("y", "inverse_rms"))
        def _launch_forward(y: Tensor, inverse_rms: Tensor, x: Tensor, eps: float) -> None:
            ct.launch(stream(), (x.shape[0],), _forward, (y, inverse_rms, x, eps))

    It is also for a launch that writes to some rows or columns of a tensor. Of a traced launch, Inductor copies those, and
    where they aren't the first ones it may read behind them (torch 2.11).

    And it is for a launch that is repeated: of each traced launch, torch compiles the kernel anew to see what it writes to.

    The function takes and annotates tensors, ints, floats, bools, strings, sequences and None of those, and NamedTuples of all
    that, which are given by place; it returns nothing, or with a `fake` one tensor.

    Args:
        writes: names of the tensors that the launch writes to, or of NamedTuples of them.
        within: a module in whose name the op is, where several have the same function: a graph that is kept on disk calls it by
            name in the next process as well.
        fake: takes what the function takes, of tensors without values, and returns a tensor like the function's. Such a
            function takes no NamedTuples.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        name = re.sub(r"\W", "_", f"{within or launch.__module__}.{launch.__qualname__}")
        while name in DEFINED:  # by "a.b" for "a_b", or by another function that the same code made
            name += "_"
        hints = typing.get_type_hints(launch)
        tree = {given: _tree(hints[given]) for given in inspect.signature(launch).parameters}
        parameters = [leaf for given, inner in tree.items() for leaf in inner.leaves(given)]
        paths = [(place, path) for place, inner in enumerate(tree.values()) for path in inner.paths()]

        def gathering(*leaves: Any) -> None:
            rest = iter(leaves)
            launch(*[inner.gathered(rest) for inner in tree.values()])  # pyright: ignore[reportCallIssue]

        flat = launch if all(inner.fields is None for inner in tree.values()) else gathering
        DEFINED[name] = flat
        returns = None if fake is None else torch.Tensor
        gathering.__signature__ = inspect.Signature(parameters, return_annotation=returns)
        written = [leaf.name for given in writes for leaf in tree[given].leaves(given) if _is_tensor(leaf.annotation)]
        schema = torch.library.infer_schema(gathering, mutates_args=written)  # pyright: ignore[reportUnknownMemberType]
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # pyright: ignore[reportUnknownMemberType]
        _library.impl(name, flat, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
        stand_in = f"liger::{name}", fake or _writes_nothing
        torch.library.register_fake(*stand_in, lib=_library)  # pyright: ignore[reportUnknownMemberType]
        custom = getattr(torch.ops.liger, name).default

        @functools.wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch_state.compiling():
                return launch(*args, **kwargs)
            if flat is launch:
                return custom(*args, **kwargs)
            return custom(*_spread(args, paths))

        return call

    return decorate


def _is_tensor(annotation: Any) -> bool:
    return torch.Tensor in (annotation, *typing.get_args(annotation))


class _Tree(NamedTuple):
    """An argument as what a custom op takes: itself, or the leaves of a NamedTuple's fields.

    Attributes:
        kind: the NamedTuple, or the leaf's annotation.
        fields: of the NamedTuple, by name; None for a leaf.
        optional: whether None may stand in place of the NamedTuple. Its first field is then never None.
    """

    kind: Any
    fields: dict[str, _Tree] | None
    optional: bool

    def leaves(self, name: str) -> list[inspect.Parameter]:
        """The op's parameters."""
        if self.fields is None:
            kind = self.kind | None if self.optional else self.kind
            return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)]
        return [leaf for field, inner in self.fields.items() for leaf in inner.leaves(f"{name}_{field}")]

    def paths(self) -> list[tuple[int, ...]]:
        """Where the leaves are: the places of fields that lead to each."""
        if self.fields is None:
            return [()]
        return [(place, *path) for place, inner in enumerate(self.fields.values()) for path in inner.paths()]

    def gathered(self, leaves: Iterator[Any]) -> Any:
        """The argument, from its leaves."""
        if self.fields is None:
            return next(leaves)
        values = [inner.gathered(leaves) for inner in self.fields.values()]
        return None if self.optional and values[0] is None else self.kind(*values)


# Dynamo takes longer for calls than for loops.
def _spread(args: Sequence[Any], paths: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
    """The leaves of arguments."""
    leaves: list[Any] = []
    for place, path in paths:
        value = args[place]
        for step in path:
            value = None if value is None else value[step]
        leaves.append(value)
    return leaves


def _tree(annotation: Any, optional: bool = False) -> _Tree:
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    named = [kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "_fields")]
    if not named:
        return _Tree(annotation, None, optional)
    optional = optional or types.NoneType in kinds
    fields = {name: _tree(inner, optional) for name, inner in typing.get_type_hints(named[0]).items()}
    return _Tree(named[0], fields, optional)


def _writes_nothing(*args: object, **kwargs: object) -> None:
    """The fake of a launch."""
