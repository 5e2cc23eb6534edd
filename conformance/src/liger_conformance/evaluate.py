"""An op or its reference, called and differentiated; and the reference's answers, in its own dtype and in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import BIG
from liger_core.contract import Op

Arguments = dict[str, Any]


def require(holds: bool, message: str) -> None:
    """Assert what is about tensors: of an ``assert`` on them, pytest would show all their elements."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(message)


@dataclass
class Outcome:
    """An op's results by name, and the gradients of the arguments that wanted one."""

    results: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]

    def items(self) -> dict[str, Tensor | None]:
        """Results and gradients in one."""
        return self.results | {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}


def complete(op: Op[..., Any], arguments: Arguments) -> Arguments:
    """A case's arguments with the contract's defaults filled in."""
    return op.bind((), arguments)


def name_results(op: Op[..., Any], returned: Any) -> dict[str, Tensor | None]:
    """The results of a call by name; a bare tensor is called ``result``."""
    if isinstance(returned, Tensor):
        return {"result": returned}
    names = getattr(returned, "_fields", None) or [f"result {i}" for i in range(len(returned))]
    return dict(zip(names, returned, strict=True))


def kept_gradients(op: Op[..., Any], arguments: Arguments, results: int) -> tuple[bool, ...]:
    """For each of so many results of a call, whether it has a gradient, by the contract."""
    return (op.has_gradient(arguments) if results > 1 else None) or (True,) * results


def differentiable_results(
    op: Op[..., Any], arguments: Arguments, results: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """The results of a call that have a gradient."""
    differentiable = kept_gradients(op, arguments, len(results))
    return {
        name: r for (name, r), keeps in zip(results.items(), differentiable, strict=True) if keeps and r is not None
    }


def present(op: Op[..., Any], arguments: Arguments) -> tuple[str, ...]:
    """The differentiable arguments that this call has."""
    return tuple(name for name in op.differentiable if arguments[name] is not None)


def incoming_for(op: Op[..., Any], arguments: Arguments, results: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """An incoming gradient for each differentiable result, the same at each call: not one, and not uniform."""
    incoming: dict[str, Tensor] = {}
    for name, result in differentiable_results(op, arguments, results).items():
        place = result.device if result.numel() > BIG else "cpu"
        generator = torch.Generator(place).manual_seed(zlib.crc32(f"{op.name}/{name}".encode()))
        values = torch.randn(result.shape, generator=generator, device=place) if result.dim() else torch.tensor(-1.5)
        incoming[name] = values.to(device=result.device, dtype=result.dtype)
    return incoming


def incoming_of(op: Op[..., Any], arguments: Arguments) -> dict[str, Tensor]:
    """An incoming gradient for each differentiable result of a call."""
    arguments = complete(op, arguments)
    with torch.no_grad():
        return incoming_for(op, arguments, name_results(op, op.reference(**arguments)))


def has_rows(value: Any, rows: int) -> bool:
    """Whether an argument or a result is a tensor of so many rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def with_leaves(op: Op[..., Any], arguments: Arguments, grads: tuple[str, ...]) -> Arguments:
    """The arguments, detached but with their strides, the `grads` ones requiring a gradient."""
    return {
        name: value.detach().requires_grad_(name in grads) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def evaluate(
    op: Op[..., Any],
    call: Callable[..., Any],
    arguments: Arguments,
    grads: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
) -> Outcome:
    """Call, then differentiate.

    Args:
        op: the contract.
        call: the op, or its reference.
        arguments: by name, detached.
        grads: the arguments to differentiate by; None: all that are there.
        incoming: gradients of the results; None: those of `incoming_for`.
    """
    arguments = complete(op, arguments)
    grads = present(op, arguments) if grads is None else grads
    arguments = with_leaves(op, arguments, grads)
    results = name_results(op, call(**arguments))
    incoming = incoming_for(op, arguments, results) if incoming is None else incoming
    outputs = {
        n: r for n, r in differentiable_results(op, arguments, results).items() if n in incoming and r.requires_grad
    }
    gradients: dict[str, Tensor | None] = {}
    if grads:
        assert outputs, f"no result has a gradient, though {', '.join(grads)} want one"
        inputs = [arguments[name] for name in grads]
        into = [incoming[name] for name in outputs]
        gradients = dict(
            zip(grads, torch.autograd.grad(list(outputs.values()), inputs, into, allow_unused=True), strict=True)
        )
    for name, result in results.items():
        if name not in differentiable_results(op, arguments, results):
            require(result is None or not result.requires_grad, f"{name} must not have a gradient")
    return Outcome({n: r if r is None else r.detach() for n, r in results.items()}, gradients)


WITHOUT_FLOAT64 = ("npu",)
"""Device types where much of PyTorch refuses float64: there the truth is computed on the CPU."""


def widen(value: Any) -> Any:
    """A tensor in double precision, on a device that has it; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type in WITHOUT_FLOAT64:
        value = value.cpu()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def baseline_and_truth(
    op: Op[..., Any],
    arguments: Arguments,
    grads: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
) -> tuple[Outcome, Outcome]:
    """The reference on these arguments in their own dtype, and in float64.

    The latter is on the CPU where the arguments' device has no float64.
    """
    arguments = complete(op, arguments)
    incoming = incoming_of(op, arguments) if incoming is None else incoming
    baseline = evaluate(op, op.reference, arguments, grads, incoming)
    wide = {name: widen(value) for name, value in arguments.items()}
    truth = evaluate(op, op.reference, wide, grads, {name: widen(value) for name, value in incoming.items()})
    return baseline, truth
