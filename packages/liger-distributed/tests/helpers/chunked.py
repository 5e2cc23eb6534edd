"""A language with one kernel, in PyTorch: fused statistics of a few rows at a time, forward and again in backward."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from liger_core import BackendInfo, backend, fused_linear_logit_statistics

CHUNK = 8


def forward(
    needs: Any, x: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Any:
    chunks = [
        fused_linear_logit_statistics.reference(x[i : i + CHUNK], linear_weight, target[i : i + CHUNK], bias, **options)
        for i in range(0, x.shape[0], CHUNK)
    ]
    joined = tuple(None if field[0] is None else torch.cat(field) for field in zip(*chunks, strict=True))
    return joined, (x, linear_weight, target) if any(needs) else ()


def backward(needs: Any, saved: Any, *gradients: Any, **options: Any) -> Any:
    x, linear_weight, target = saved
    dx, dweight = torch.zeros_like(x), torch.zeros_like(linear_weight)
    for i in range(0, x.shape[0], CHUNK):
        rows = slice(i, i + CHUNK)
        with torch.enable_grad():
            leaves = x[rows].detach().requires_grad_(), linear_weight.detach().requires_grad_()
            results = fused_linear_logit_statistics.reference(*leaves, target[rows], **options)
        flowing = [
            (result, g[rows])
            for result, g in zip(results, gradients, strict=False)
            if result is not None and g is not None
        ]
        of_rows = torch.autograd.grad([result for result, _ in flowing], leaves, [g for _, g in flowing])
        dx[rows] = of_rows[0]
        dweight += of_rows[1]
    return dx, dweight, None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The language is installed, and the CPU's default; no other one is."""
    kernel = types.ModuleType("chunked.ops.fused_linear_logit_statistics")
    kernel.forward, kernel.backward = forward, backward  # type: ignore[attr-defined]
    info = BackendInfo("chunked", ("cpu", "cuda"), "torch", "chunked", "nothing to install", ("cpu", "cuda"))
    name = fused_linear_logit_statistics.name
    with (
        mock.patch.object(backend, "discover", return_value=((info,), ())),
        mock.patch.object(BackendInfo, "has_kernel", lambda self, op: op == name),
        mock.patch.object(BackendInfo, "kernel", return_value=kernel),
    ):
        fused_linear_logit_statistics.forget_plans()
        yield
    fused_linear_logit_statistics.forget_plans()
