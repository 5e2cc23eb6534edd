"""Activations: calling one shows which gated op it belongs to, and then it waits for the product that makes the op."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_core as liger
from liger_transformers.deferred import MUL, DeferredTensor, add_methods, check_unmodified, materialize, version
from liger_transformers.probe import PROBE_ERRORS
from liger_transformers.swap import Swap, by_forward, has_hooks, has_own_forward, subclass, swapped_for


class Gate(DeferredTensor):
    """act(gate), waiting for the other branch of a gated linear unit."""

    __slots__ = ("act", "gate", "op", "version")

    def __init__(self, gate: Tensor, act: Callable[[Tensor], Tensor], op: Callable[[Tensor, Tensor], Tensor]) -> None:
        # A layer makes a Gate each time it runs. Calling DeferredTensor.__init__ would cost time.
        self.grad, self._tensor = torch.is_grad_enabled(), None
        self.gate, self.act, self.op, self.version = gate, act, op, version(gate)

    @property
    def shape(self) -> torch.Size:
        return self.gate.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.gate.dtype

    @property
    def device(self) -> torch.device:
        return self.gate.device

    def compute(self) -> Tensor:
        check_unmodified(self.gate, self.version)
        return self.act(self.gate)

    def handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function not in PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        in_place = function in MUL_IN_PLACE
        if in_place and args[0] is not self:
            return NotImplemented
        y = self.product(args[1] if args[0] is self else args[0])
        if in_place and y is not NotImplemented:
            self._tensor = y
        return y

    def product(self, up: Any) -> Any:
        """The op's result, or NotImplemented if `up` is not the other branch of the unit."""
        gate = self.gate
        if not isinstance(up, Tensor) or up.dtype != gate.dtype or up.shape != gate.shape:
            return NotImplemented
        if torch.is_grad_enabled() != self.grad:
            return NotImplemented
        if self.version is not None and gate._version != self.version:
            check_unmodified(gate, self.version)
        return self.op(gate, up)

    def __mul__(self, up: Any) -> Any:
        # Nearly every layer goes this way. It skips what `__torch_function__` has to find out about other functions.
        if self._tensor is None:
            y = self.product(up)
            if y is not NotImplemented:
                return y
        return DeferredTensor.__torch_function__(Tensor.__mul__, (), (self, up))


add_methods(Gate, "mul", "mul_", "multiply", "multiply_")

MUL_IN_PLACE = frozenset({Tensor.mul_, Tensor.multiply_, Tensor.__imul__})
PRODUCTS = MUL | MUL_IN_PLACE


GATED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "swiglu": (F.silu, liger.swiglu),
    "geglu": (functools.partial(F.gelu, approximate="tanh"), liger.geglu),
    "relu_squared": (liger.relu_squared, liger.relu_squared),
}
"""By op: its activation, and the op as a function of gate and up."""


def activations(parent: nn.Module) -> Iterator[tuple[str, nn.Module, Swap]]:
    """The activations among a module's children that may be an op's: name, child and swap.

    In a module that multiplies they are gates. Elsewhere only the square of ReLU is an op of its own.
    """
    children = [(name, child) for name, child in parent.named_children() if is_activation(child)]
    gates = bool(children) and multiplies(type(parent))
    for name, child in children:
        if swapped_for(child) is not None:
            yield name, child, type(child)
            continue
        op = activation_op(child)
        if not gates and op != "relu_squared":
            continue
        if (why := has_own_forward(child)) is not None:
            yield name, child, why
        elif has_hooks(child):
            yield name, child, "it has hooks, which get a tensor"
        elif gates and crosses_functions(type(parent)):
            yield name, child, "its module calls a checkpoint or an autograd Function, which get tensors"
        elif op is None:
            yield name, child, "it is neither SiLU, nor GELU's tanh approximation, nor the square of ReLU"
        else:
            yield name, child, _gated_class(type(child), op) if gates else _relu_squared_class(type(child))


def activation_call(module: nn.Module) -> str | None:
    """Why the activation of a gated MLP stays if the module's own code calls it as a function; None if the module has none."""
    names = _activation_calls(type(module))
    if not names or not any(hasattr(child, "out_features") for child in module.children()):
        return None
    return f"its code calls {' and '.join(names)} as a function; only a module, such as nn.SiLU(), is swapped"


@by_forward
def _activation_calls(cls: type[nn.Module]) -> list[str]:
    """The activations that the class's own code calls as functions, if it multiplies."""
    names = {name for function in _functions(cls) for name in function.__code__.co_names}
    return sorted({"silu", "gelu"} & names) if multiplies(cls) else []


def is_activation(module: nn.Module) -> bool:
    return (
        type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
        and not module._parameters
    )


@by_forward
def multiplies(cls: type[nn.Module]) -> bool:
    """Whether the class's own code has a `*`: it has one if an activation is a gate."""
    return any(
        i.opname in ("BINARY_MULTIPLY", "INPLACE_MULTIPLY") or (i.opname == "BINARY_OP" and i.argrepr in ("*", "*="))
        for function in _functions(cls)
        for i in dis.get_instructions(function)
    )


@by_forward
def crosses_functions(cls: type[nn.Module]) -> bool:
    """Whether the class's own code names a checkpoint, or `apply` of an autograd Function. These take tensors."""
    return any({"apply", "checkpoint"} & {*function.__code__.co_names} for function in _functions(cls))


def _functions(cls: type[nn.Module]) -> Iterator[types.FunctionType]:
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for value in vars(base).values():
            while isinstance(value, types.FunctionType):
                yield value
                value = getattr(value, "__wrapped__", None)


def activation_op(module: nn.Module) -> str | None:
    """The gated op whose activation this module computes, found by calling the module in float64."""
    if (op := swapped_for(module)) is not None:
        return op
    x = torch.linspace(-9, 9, 181, dtype=torch.float64)
    with torch.no_grad():
        try:
            y = type(module).forward(module, x)
        except PROBE_ERRORS:
            return None
    for name, (act, _) in GATED.items():
        if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, act(x), rtol=1e-12, atol=1e-14):
            return name
    return None


@by_forward
def _gated_class(cls: type[nn.Module], op: str) -> type[nn.Module]:
    act, function = GATED[op]

    def forward(self: nn.Module, x: Tensor) -> Any:
        x = x.tensor() if isinstance(x, DeferredTensor) else x
        return cls.forward(self, x) if has_hooks(self) else Gate(x, act, function)

    return subclass(cls, forward, op)


@by_forward
def _relu_squared_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return liger.relu_squared(materialize(x))

    return subclass(cls, forward, "relu_squared")
