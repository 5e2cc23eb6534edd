"""The one autograd wiring of every kernel, in every language, eager and traced."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_core.contract import Op


def differentiable(op: Op[..., Any], kernel: ModuleType, language: str) -> Callable[[dict[str, Any]], Any]:
    """A function of an op's checked arguments that runs `kernel`, and records it when a gradient is wanted."""
    wanted, options, tensors = op.differentiable, op.options, op.tensors
    # Where each tensor's gradient stands among the kernel's; autograd wants one value per argument of `apply`.
    places = tuple(wanted.index(name) if name in wanted else None for name in tensors)
    nothing = (False,) * len(wanted)
    no_double = (
        f"{op.name} in {language} has no second derivative; liger_core.use('torch') runs the reference, which has"
    )

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, needs: tuple[bool, ...], chosen: tuple[Any, ...], *given: Tensor | None) -> Any:
            ctx.needs = needs
            ctx.options = dict(zip(options, chosen, strict=True))
            result, saved = kernel.forward(needs, **dict(zip(tensors, given, strict=True)), **ctx.options)
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            if op.grad_results is not None and isinstance(result, tuple):
                ctx.mark_non_differentiable(
                    *(r for i, r in enumerate(result) if i not in op.grad_results and r is not None)
                )
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if op.grad_results is not None:
                grads = tuple(grads[i] for i in op.grad_results if i < len(grads))
            saved = ctx.saved_tensors
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                found = kernel.backward(ctx.needs, saved, *grads, **ctx.options)
            else:
                with torch.no_grad():
                    found = kernel.backward(ctx.needs, saved, *grads, **ctx.options)
                sources = [t for t in (*saved, *grads) if t is not None and t.requires_grad]
                sources = sources or [torch.empty(0, requires_grad=True)]
                found = tuple(g if g is None else _NoSecondDerivative.apply(no_double, g, *sources) for g in found)
            return None, None, *[None if place is None else found[place] for place in places]

    def run(arguments: dict[str, Any]) -> Any:
        result: Any
        if not torch.is_grad_enabled():
            result = kernel.forward(nothing, **arguments)[0]
        else:
            needs = tuple([arguments[name] is not None and arguments[name].requires_grad for name in wanted])
            if needs != nothing:
                chosen = tuple([arguments[name] for name in options])
                result = Kernel.apply(needs, chosen, *[arguments[name] for name in tensors])
            else:
                # A teacher's logits may require a gradient that this op doesn't give.
                with torch.no_grad():
                    result = kernel.forward(nothing, **arguments)[0]
        if op.result is not None and isinstance(result, tuple):
            return op.result(*result)
        return result

    return run


class _NoSecondDerivative(torch.autograd.Function):
    """The identity of a gradient, whose backward says that a kernel can't be differentiated twice.

    The `sources` are what the gradient was computed from: through them it hangs on the op's inputs.
    """

    @staticmethod
    def forward(ctx: Any, message: str, grad: Tensor, *sources: Tensor) -> Tensor:
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)
