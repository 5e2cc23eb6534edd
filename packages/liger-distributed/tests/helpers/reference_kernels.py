"""A language whose kernels are the references: autograd sees a kernel, on a CPU and without an interpreter."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from liger_core import BackendInfo, backend
from liger_core.contract import ops


def kernel_of(name: str) -> types.ModuleType:
    """Forward and backward of an op, by autograd on its reference."""
    op = ops[name]

    def forward(needs: Any, **arguments: Any) -> Any:
        leaves = {
            n: arguments[n].detach().requires_grad_()
            for n, needed in zip(op.differentiable, needs, strict=True)
            if needed
        }
        with torch.enable_grad():
            result = op.reference(**arguments | leaves)
        results = result if isinstance(result, tuple) else (result,)
        detached = tuple(None if value is None else value.detach() for value in results)
        ran.append(name)
        return detached if isinstance(result, tuple) else detached[0], tuple(arguments[n] for n in op.tensors) if any(
            needs
        ) else ()

    def backward(needs: Any, saved: Any, *gradients: Any, **options: Any) -> Any:
        arguments = dict(zip(op.tensors, saved, strict=True)) | options
        leaves = {
            n: arguments[n].detach().requires_grad_()
            for n, needed in zip(op.differentiable, needs, strict=True)
            if needed
        }
        with torch.enable_grad():
            result = op.reference(**arguments | leaves)
        results = result if isinstance(result, tuple) else (result,)
        flags = op.has_gradient(options)
        if flags is not None and isinstance(result, tuple):
            results = tuple(value for value, keeps in zip(results, flags, strict=True) if keeps)
        flowing = [
            (value, g) for value, g in zip(results, gradients, strict=True) if value is not None and g is not None
        ]
        computed = torch.autograd.grad(
            [v for v, _ in flowing], [*leaves.values()], [g for _, g in flowing], allow_unused=True
        )
        by_name = dict(zip(leaves, computed, strict=True))
        # An addition gives both of its operands the same tensor, as a kernel may.
        return tuple(by_name.get(n) for n in op.differentiable)

    kernel = types.ModuleType(f"references.ops.{name}")
    kernel.forward, kernel.backward = forward, backward  # type: ignore[attr-defined]
    return kernel


ran: list[str] = []
"""The ops whose kernels ran."""


@contextlib.contextmanager
def installed() -> Iterator[list[str]]:
    """The language is installed for every op, and the CPU's default; no other one is. Gives what ran."""
    info = BackendInfo("references", ("cpu", "cuda"), "torch", "references", "nothing to install", ("cpu", "cuda"))
    with (
        mock.patch.object(backend, "discover", return_value=((info,), ())),
        mock.patch.object(BackendInfo, "has_kernel", return_value=True),
        mock.patch.object(BackendInfo, "kernel", lambda self, op: kernel_of(op)),
    ):
        for op in ops.values():
            op.forget_plans()
        ran.clear()
        yield ran
    for op in ops.values():
        op.forget_plans()
