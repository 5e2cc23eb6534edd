"""Imports for authors of ops and kernels: the decorators that declare an op and tie a kernel to it, and their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor

from liger_core.autograd import Saved as Saved
from liger_core.autograd import SavedEarly as SavedEarly
from liger_core.autograd import SavedOnce as SavedOnce
from liger_core.declaration import GradResults
from liger_core.declaration import Needs as Needs
from liger_core.op import Op as Op
from liger_core.op import OverloadedOp as OverloadedOp
from liger_core.op import by_name as by_name
from liger_core.op import ops as ops
from liger_core.recompute import Recompute as Recompute
from liger_core.torch_state import compiling as compiling
from liger_core.torch_state import transforming

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Callable[..., Any])


@overload
def op(
    *,
    differentiable: tuple[str, ...],
    result: type[tuple[Any, ...]] | None = None,
    grad_results: tuple[str, ...] | GradResults | None = None,
    autocast: tuple[str, ...] = (),
    dimensions: str | None = None,
    recompute: Recompute | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]: ...
@overload
def op(
    *,
    differentiable: tuple[str, ...],
    result: type[tuple[Any, ...]] | None = None,
    grad_results: tuple[str, ...] | GradResults | None = None,
    autocast: tuple[str, ...] = (),
    dimensions: str | None = None,
    recompute: Recompute | None = None,
    overloads: type[C],
) -> Callable[[Callable[P, R]], OverloadedOp[P, R, C]]: ...
def op(
    *,
    differentiable: tuple[str, ...],
    result: type[tuple[Any, ...]] | None = None,
    grad_results: tuple[str, ...] | GradResults | None = None,
    autocast: tuple[str, ...] = (),
    dimensions: str | None = None,
    recompute: Recompute | None = None,
    overloads: type[Any] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a reference function a contract.

    Its annotations are read: a parameter that starts with ``Tensor`` is a tensor, every other one an option.

    Args:
        differentiable: the tensor arguments that can get a gradient.
        result: the NamedTuple that the reference returns, when it returns one.
        grad_results: the fields of `result` that have a gradient, or a function of the options that says so; all, when it is
            left out.
        autocast: the tensors that are cast to the autocast dtype in an autocast region. The op then runs with
            autocast off; every other tensor keeps its dtype.
        dimensions: which dimensions are independent, such as ``"x: ... H, weight: H -> ... H"``; `Dimensions` says how
            it is read. Code that divides a call among processes uses it.
        recompute: for a cheap op, how `lean` recomputes its results from the tensors that backward saves.
        overloads: for type checkers, a class whose ``__call__`` has an overload for each type of result.
    """
    kind: Any = Op if overloads is None else OverloadedOp

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        return kind(reference, differentiable, result, grad_results, autocast, dimensions, recompute)

    return decorate


def implements(
    contract: Op[P, R],
) -> Callable[[Callable[Concatenate[Needs, P], tuple[Any, Saved]]], Callable[Concatenate[Needs, P], tuple[R, Saved]]]:
    """Tie a kernel's ``forward`` to its contract, for the type checker and for Find References.

    It returns the function as it is. A kernel module defines

    - ``forward(needs, <the contract's signature>) -> (result, saved)``. `needs` says which differentiable arguments
      need a gradient; if none does, `saved` is ``()``. `result` is a tensor, or a tuple in the contract's order with
      None for a result that was not requested. `saved` holds tensors and None; the last entry may be a `SavedOnce`. Backward gets
      them with their strides. If a saved-tensor hook has changed these, it gets them without gaps, with their dimensions in the
      same order in memory.
    - ``backward(needs, saved, <a gradient per differentiable result>, *, <options>) -> gradients``, one per differentiable
      argument, None if `needs` is False for it. A result's gradient is None if no gradient comes in for it. Neither
      function writes to its arguments. An op without differentiable arguments has no `backward`.
    - optionally ``refuses(<the contract's signature>) -> str | None``: why this kernel can't take a call. It reads
      metadata, not data.
    - optionally ``saves_early(<the contract's signature>) -> SavedEarly``, if `backward` can do with arguments alone, in place of
      the tensors that `forward` saves. In activation checkpointing autograd then saves these before `forward` runs, without any
      needs, and `forward` doesn't run again if nothing after it saves a tensor. The op has one result.
    """

    def same(forward: Callable[Concatenate[Needs, P], tuple[Any, Saved]]) -> Any:
        return forward

    return same


def upcast(tensor: Tensor) -> Tensor:
    """At least float32; float64 stays float64, so that a float64 call of a reference is the exact answer."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, for a reference that runs without autocast. Its backward then runs without autocast as well.

    Under torch.compile, autograd's own backward would run under the autocast that is on while tracing.

    Args:
        a: ``[..., N, K]``.
        b: ``[..., K, M]``.

    Returns:
        ``[..., N, M]``.
    """
    if compiling() and transforming((a, b)) is None:
        return cast("Any", _Product).apply(a, b)
    return a @ b


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return (grad @ b.mT).sum_to_size(a.shape), (a.mT @ grad).sum_to_size(b.shape)
