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

# A torch.library.custom_op runs Python code around each call, for gradients and versions. A launch in a compiled graph needs
# neither.
_library = torch.library.Library("liger", "FRAGMENT")

DEFINED: dict[str, Callable[..., Any]] = {}
"""Custom ops by their name without the namespace ``liger``, each with the function that it runs."""


def opaque(
    *, writes: tuple[str, ...], within: str | None = None, fake: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Hide a kernel launch from torch.compile, for languages that Dynamo can't trace.

    Eager calls go straight to the function. A traced call becomes one custom op that writes to the tensors named in
    `writes`; its fake does nothing, since the host code around it, which is traced, has allocated them.

        @opaque(writes=("y", "inverse_rms"))
        def _launch_forward(y: Tensor, inverse_rms: Tensor, x: Tensor, eps: float) -> None:
            ct.launch(stream(), (x.shape[0],), _forward, (y, inverse_rms, x, eps))

    Use it as well for a launch that writes to a part of a tensor's rows or columns. If such a launch is traced, Inductor copies
    them, and if they aren't the first ones it may read behind them (torch 2.11).

    Use it for a launch that is repeated: for each traced launch, torch compiles the kernel again to see what it writes to.

    The function takes and annotates tensors, ints, floats, bools, strings, sequences of these, None, and NamedTuples.
    NamedTuples are passed by position. The function returns nothing, or with a `fake` one tensor.

    Args:
        writes: names of the tensors that the launch writes to, or of NamedTuples of them.
        within: a module name to put into the op's name, if several modules have the same function. A graph that is cached on
            disk calls the op by name in the next process.
        fake: a function of the same arguments, with tensors without values. It returns a tensor like the function's. A
            function with a fake takes no NamedTuples.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        name = re.sub(r"\W", "_", f"{within or launch.__module__}.{launch.__qualname__}")
        while name in DEFINED:  # "a.b" and "a_b" have one name; so have functions that the same code defines
            name += "_"
        hints = typing.get_type_hints(launch)
        tree = {parameter: _tree(hints[parameter]) for parameter in inspect.signature(launch).parameters}
        parameters = [leaf for parameter, inner in tree.items() for leaf in inner.leaves(parameter)]
        paths = [(place, path) for place, inner in enumerate(tree.values()) for path in inner.paths()]

        def gathering(*leaves: Any) -> None:
            rest = iter(leaves)
            launch(*[inner.gathered(rest) for inner in tree.values()])  # pyright: ignore[reportCallIssue]

        flat = launch if all(inner.fields is None for inner in tree.values()) else gathering
        DEFINED[name] = flat
        returns = None if fake is None else torch.Tensor
        gathering.__signature__ = inspect.Signature(parameters, return_annotation=returns)
        written = [leaf.name for each in writes for leaf in tree[each].leaves(each) if _is_tensor(leaf.annotation)]
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
    """The form in which a custom op takes an argument: as it is, or as the leaves of a NamedTuple's fields.

    Attributes:
        kind: the NamedTuple, or the leaf's annotation.
        fields: the NamedTuple's fields by name; None for a leaf.
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
        """The path to each leaf: field positions from the outermost NamedTuple to it."""
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
