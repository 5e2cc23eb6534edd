"""A case of the conformance package made into the two calls that are timed: forward, and forward + backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from traffic import FORWARD

from liger_conformance.case import Case, cases_of
from liger_core.contract import Op

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Arguments = dict[str, Any]
Function = Callable[..., Any]


def arguments_of(op: Op[..., Any], case: Case, dtype: torch.dtype, device: str) -> Arguments:
    """Arguments of a case without its Nones; differentiable ones require a gradient."""
    return {
        name: value.requires_grad_() if name in op.differentiable else value
        for name, value in cases_of(op.name).build(case, dtype, device).items()
        if value is not None
    }


def shrunk(case: Case) -> Case:
    """The case with every size above 256 made 64: the same options, fast enough for a CPU."""
    return Case(f"{case.id}-shrunk", case.group, **{name: _shrink(value) for name, value in case.values.items()})


def _shrink(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shrink, value))
    return 64 if isinstance(value, int) and value > 256 else value


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    """The tensors that a call returned."""
    return tuple(t for t in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(t, Tensor))


def trained(returned: Any) -> Any:
    """The results that a trainer differentiates: `loss` alone if a result has that name. The others are for logs."""
    return getattr(returned, "loss", returned) if isinstance(returned, tuple) else returned


def make_call(
    function: Function, arguments: Arguments, mode: str, dtype: torch.dtype
) -> Callable[[], tuple[Tensor | None, ...]]:
    """A function of nothing that returns the results, or, with the backward, the gradients in the order of the arguments.

    The gradient that comes in is `gradient_into`'s, the same for every implementation, and comes into what is `trained`. It is
    made at the first call, which isn't timed.
    """
    if mode == FORWARD:

        def forward() -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                return tensors_of(function(**arguments))

        return forward

    leaves = [value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad]
    incoming: list[Tensor] = []

    def forward_and_backward() -> tuple[Tensor | None, ...]:
        results = [result for result in tensors_of(trained(function(**arguments))) if result.requires_grad]
        if not incoming:
            incoming.extend(gradient_into(result, dtype) for result in results)
        return torch.autograd.grad(results, leaves, incoming, allow_unused=True)

    return forward_and_backward


def gradient_into(result: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient that comes in for a result: 1 for a scalar, as in training, else random values rounded to `dtype`."""
    if result.dim() == 0:
        return torch.ones_like(result)
    generator = torch.Generator(result.device).manual_seed(result.numel())
    return torch.randn(result.shape, generator=generator, device=result.device).to(dtype).to(result.dtype)
