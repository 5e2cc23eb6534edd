"""Launches that torch.compile can't trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

from liger_core import modes

P = ParamSpec("P")

# What torch.library.custom_op makes runs Python around each call, for gradients and versions that a launch in a compiled graph
# has no use for.
_library = torch.library.Library("liger", "FRAGMENT")
_taken: set[str] = set()


def opaque(*, writes: tuple[str, ...]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Hide a kernel launch from torch.compile, for languages that Dynamo can't trace.

    Eager calls go straight to the function. A traced call becomes one custom op that writes to the tensors named in
    `writes`; its fake does nothing, since the host code around it, which is traced, has allocated them.

        @opaque(writes=("y", "inverse_rms"))
        def _launch_forward(y: Tensor, inverse_rms: Tensor, x: Tensor, eps: float) -> None:
            ct.launch(stream(), (x.shape[0],), _forward, (y, inverse_rms, x, eps))

    It is also for a launch that writes to some rows or columns of a tensor. Of a traced launch, Inductor copies those, and
    where they aren't the first ones it may read behind them (torch 2.11).

    The function takes and annotates tensors, ints, floats, bools, strings, and sequences and None of those; it returns
    nothing.

    Args:
        writes: names of the tensors that the launch writes to.
    """

    def decorate(launch: Callable[P, None]) -> Callable[P, None]:
        name = f"{launch.__module__}.{launch.__qualname__}".replace(".", "_").replace("<locals>", "")
        while name in _taken:  # by "a.b" for "a_b", or by another function that the same code made
            name += "_"
        _taken.add(name)
        schema = torch.library.infer_schema(launch, mutates_args=writes)  # pyright: ignore[reportUnknownMemberType]
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # pyright: ignore[reportUnknownMemberType]
        _library.impl(name, launch, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
        fake = f"liger::{name}", _writes_nothing
        torch.library.register_fake(*fake, lib=_library)  # pyright: ignore[reportUnknownMemberType]
        custom = getattr(torch.ops.liger, name).default

        @functools.wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if modes.compiling():
                custom(*args, **kwargs)
            else:
                launch(*args, **kwargs)

        return call

    return decorate


def _writes_nothing(*args: object, **kwargs: object) -> None:
    """The fake of a launch."""
