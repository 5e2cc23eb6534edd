"""The one autograd wiring of every kernel, in every language, eager and traced."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

if TYPE_CHECKING:
    from liger_core.contract import Op


class Once:
    """Tensors that forward made and that backward may overwrite and return, as it may not with saved ones.

    Only the first backward gets them. Another one, of a graph that is retained, makes them anew. A kernel doesn't use
    it while torch.compile traces.
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors: tuple[Tensor | None, ...] | None = tensors

    def take(self) -> tuple[Tensor | None, ...] | None:
        """The tensors, or None when a backward has taken them."""
        tensors, self._tensors = self._tensors, None
        return tensors


def differentiable(
    op: Op[..., Any], kernel: ModuleType, language: str
) -> Callable[[dict[str, Any], tuple[bool, ...], dict[str, Any]], Any]:
    """A function of an op's checked arguments that runs `kernel`, and records it when a gradient is wanted.

    It takes every argument by name, which differentiable ones require a gradient, and the options by name.
    """
    tensors = op.tensors
    takes_gradient = tuple(name in op.differentiable for name in tensors)
    all_take_gradient = all(takes_gradient)
    keeps_gradient = op.keeps_gradient
    nothing = (False,) * len(op.differentiable)
    no_double = (
        f"{op.name} in {language} has no second derivative; liger_core.use('torch') runs the reference, which has"
    )

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *given: Tensor | None) -> Any:
            needs, arguments, options = call
            if arguments is None:
                options = dict(zip(op.options, options, strict=True))
                arguments = dict(zip(tensors, given, strict=True)) | options
            result, saved = kernel.forward(needs, **arguments)
            once = None
            if saved and type(saved[-1]) is Once:
                *saved, once = saved
                if _top_saved_tensors_default_hooks(True) is not None:
                    once.take()  # activation checkpointing, or another hook that keeps no tensors: backward makes them anew
            ctx.call = needs, options, once
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            if isinstance(result, tuple):
                if torch.compiler.is_compiling():
                    return tuple(_absent(given[0]) if r is None else r for r in result)
                if keeps_gradient is not None:
                    ctx.mark_non_differentiable(
                        *[r for r, keeps in zip(result, keeps_gradient, strict=True) if not keeps and r is not None]
                    )
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs, options, once = ctx.call
            if keeps_gradient is not None:
                grads = tuple(g for g, keeps in zip(grads, keeps_gradient) if keeps)  # noqa: B905  a bare tensor is the first result
            device = None
            for grad in grads:
                if grad is not None:
                    device = grad.device.type
            if device is None:  # nothing flows into any result
                return (None,) * (1 + len(tensors))
            kept = ctx.saved_tensors  # read once: checkpointing gives them no second time
            saved = kept if once is None else (*kept, once)
            traced = torch.compiler.is_compiling()
            if not traced and torch.is_autocast_enabled(device):  # forward ran without, too
                with torch.no_grad(), torch.autocast(device, enabled=False):
                    found = kernel.backward(needs, saved, *grads, **options)
            elif traced or not torch.is_grad_enabled():
                found = kernel.backward(needs, saved, *grads, **options)
            else:
                with torch.no_grad():
                    found = kernel.backward(needs, saved, *grads, **options)
            if not traced and torch.is_grad_enabled():
                sources = [t for t in (*kept, *grads) if t is not None and t.requires_grad]
                sources = sources or [torch.empty(0, requires_grad=True)]
                found = tuple(g if g is None else _NoSecondDerivative.apply(no_double, g, *sources) for g in found)
            if all_take_gradient:
                return None, *found
            gradients = iter(found)
            return None, *[next(gradients) if takes else None for takes in takes_gradient]

    # Kernel.apply, but for 1.8 of its 6.7 µs: it asks whether a torch.func transform is active, as `Op.call` has done.
    apply = super(torch.autograd.Function, Kernel).apply  # pyright: ignore[reportAttributeAccessIssue]

    def run(arguments: dict[str, Any], needs: tuple[bool, ...], options: dict[str, Any]) -> Any:
        result: Any
        if needs == nothing:
            if torch.is_grad_enabled():
                # A teacher's logits may require a gradient that this op doesn't give.
                with torch.no_grad():
                    result = kernel.forward(nothing, **arguments)[0]
            else:
                result = kernel.forward(nothing, **arguments)[0]
        elif torch.compiler.is_compiling():
            given = [arguments[name] for name in tensors]
            result = Kernel.apply((needs, None, tuple(options.values())), *given)
            if isinstance(result, tuple):
                kept = keeps_gradient or (True,) * len(result)
                result = tuple(
                    None if _is_absent(r) else r if keeps else r.detach() for r, keeps in zip(result, kept, strict=True)
                )
        else:
            result = apply((needs, arguments, options), *[arguments[name] for name in tensors])
        if op.result is not None and isinstance(result, tuple):
            return op.result(*result)
        return result

    return run


# Dynamo (torch 2.13) traces neither a None among a Function's results nor marks of some of them as non-differentiable.
# So a traced Function returns all of them as tensors; a bool, which is no op's result, stands for None.
def _absent(beside: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.bool, device=None if beside is None else beside.device)


def _is_absent(result: Tensor) -> bool:
    return result.dtype is torch.bool


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
