"""Asking which kernel would run, and why."""

from __future__ import annotations

from typing import Any

import torch

from liger_core import dispatch, resolve, subclasses
from liger_core.backend import BackendInfo, backends
from liger_core.devices import type_of
from liger_core.op import Op, by_name, ops


def get_current_backend(device: str | torch.device | None = None) -> BackendInfo | None:
    """The language that comes first on a device (default: `infer_device()`), or None where the reference runs.

    The name is the one that users know from liger-kernel. A backend is a package; what it brings is a *language*, which is
    the word for it everywhere else.

    It is the one demanded for every op by `use` or LIGER_LANGUAGE, else the device's first default language that
    can run here.
    """
    device = type_of(device)
    tried = resolve.tried_backends(device, dispatch.demanded_language("", dispatch.state.demand))
    return next((backend for backend in tried if backend.missing(device) is None), None)


def list_overridden_ops(device: str | torch.device | None = None) -> list[str]:
    """The ops that some installed package implements on a device (default: `infer_device()`), in name order."""
    device = type_of(device)
    return [op for op in sorted(ops) if any(device in b.devices and b.has_kernel(op) for b in backends())]


def explain(
    name: str | Op[..., Any],
    /,
    *args: Any,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> resolve.Resolution:
    """Say which kernel a call would run, and why not the others. Nothing is run.

    Args:
        name: the op, or its name.
        *args: the call's arguments; without any, kernels are not asked whether they refuse.
        device: the device or its type, when there are no arguments (default: `infer_device()`).
        **kwargs: the call's arguments by name.

    Raises:
        TypeError, ValueError: what the call itself raises about its arguments. Labels and indices are not read.

    >>> print(explain("rms_norm", torch.ones(2, 4), torch.ones(4)))  # doctest: +ELLIPSIS
    rms_norm on cpu:
    ...
    """
    op = by_name(name)
    parts: tuple[str, ...] = ()
    if args or kwargs:
        arguments = op.bind(args, kwargs)
        original = arguments.copy()
        handler = subclasses.handler_of([arguments[name] for name in op.tensors])
        device, refusal, _ = op.examine(arguments)
        if handler is not None:
            refusal = None  # kernels get plain tensors then
            explained = getattr(handler, "explain", None)
            parts = () if explained is None else tuple(explained(op, original))
        plan = resolve.plan(op, device, dispatch.state.demand)
        resolution = resolve.resolve(plan, op, arguments, refusal)
    else:
        resolution = resolve.plan(op, type_of(device), dispatch.state.demand)
    *tried, reference = resolution.candidates
    others = resolve.untried(op, resolution.device, resolution.demanded)
    return resolution._replace(candidates=(*tried, *others, reference), parts=parts)
