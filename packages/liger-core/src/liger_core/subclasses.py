"""Tensor types that are not plain: a package can handle such a type, and then runs the ops on it.

The package has an entry point of the group ``liger.tensors``. The entry point's name is the type's full name, such as
``torch.distributed.tensor.DTensor``, and its object a `Handler`. Nothing is imported before such a tensor arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

Handler = Callable[[Any, "str | None", "dict[str, Any]"], Any]
"""A function that runs a call. It takes the op, the demand, and every argument by name, and returns the op's result.

It may have an attribute ``explain``, a function of the op and the arguments. It returns lines for `liger_core.explain` about what
the call divides and sends."""

DTENSOR = "torch.distributed.tensor.DTensor"
IN_FLIGHT = "torch.distributed._functional_collectives.AsyncCollectiveTensor"

_handlers: dict[str, Handler | None] = {}
"""Handlers by a type's full name; None if no package handles it."""


def handler_of(tensors: Iterable[Any]) -> Handler | None:
    """The handler that runs an op on these tensors, or None if core runs it."""
    for tensor in tensors:
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter and isinstance(tensor, Tensor):
            name = full_name(kind)
            find_once(name)  # before the table is read: Dynamo takes the table as it is then
            if (handler := _handlers[name]) is not None:
                return handler
    return None


def full_name(kind: type) -> str:
    """A type's module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def find_once(name: str) -> bool:
    """Look for a type's handler, and import it. Dynamo can't trace that; it can run it, here."""
    if name == IN_FLIGHT:
        _handlers[name] = redispatch
    elif name not in _handlers:
        from importlib.metadata import entry_points

        entry_point = next(iter(entry_points(group="liger.tensors", name=name)), None)
        _handlers[name] = None if entry_point is None else entry_point.load()
    return True


# The effect of torch.compiler.assume_constant_result, without importing Dynamo for it.
find_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def redispatch(op: Any, demand: str | None, arguments: dict[str, Any]) -> Any:
    """Wait for collectives in flight, and call the op with the plain tensors that arrive."""
    landed = {
        name: arrived(value) if isinstance(value, Tensor) and full_name(type(value)) == IN_FLIGHT else value
        for name, value in arguments.items()
    }
    return op.call(demand, (), landed)


class _Arrival(torch.autograd.Function):
    """Wait for a tensor in flight. The method `wait` loses the gradient, as does the wait operator before torch 2.11."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # Detached: otherwise the tensor inside of the one in flight would get this node.
        return torch.ops._c10d_functional.wait_tensor(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def arrived(tensor: Tensor) -> Tensor:
    """Wait for a collective in flight, and return its result as a plain tensor. Autograd records this."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast("Any", _Arrival).apply(tensor)
    return torch.ops._c10d_functional.wait_tensor(tensor)


def refusal(op: str, name: str, kind: type, first: str | None) -> str:
    """Why no kernel takes an argument of a type that is not plain.

    Raises:
        TypeError: it is a DTensor, and the `first` argument isn't. It is then nearly always a parameter that FSDP has
            divided. Each process sees other rows, so to take it as a whole would give wrong gradients.
    """
    if full_name(kind) != DTENSOR:
        return f"{name} is a {kind.__name__}; kernels take plain tensors"
    if first is not None:
        raise TypeError(mixed(op, first, name))
    return f'{name} is a DTensor; kernels take plain tensors: uv pip install "liger-core[distributed]" runs them on its parts'


def mixed(op: str, first: str, name: str) -> str:
    """The error text for a plain tensor as first argument beside a DTensor."""
    return (
        f"{op}: {first} is a plain tensor and {name} a DTensor; it takes both of one kind. If fully_shard divided {name}, "
        f"read it inside its module's forward, or in a method named to register_fsdp_forward_method. If {first} is the same "
        f"on every process, DTensor.from_local({first}, {name}.device_mesh) says so"
    )


def refuse_partitioned(op: str, tensors: dict[str, Any]) -> None:
    """Raise a clearer error if an op refuses its arguments, `tensors` by name, because ZeRO-3 has divided one.

    Raises:
        ValueError: one is a parameter that DeepSpeed's ZeRO-3 has divided. It is empty outside of its module's forward.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and hasattr(tensor, "ds_id") and tensor.numel() == 0:
            whole = list(getattr(tensor, "ds_shape", ()))
            raise ValueError(
                f"{op}: {name} is a parameter of shape {whole} that DeepSpeed's ZeRO-3 has divided: it is empty here. Read it "
                "inside the forward of the module that holds it, for which DeepSpeed gathers it, or under "
                f"deepspeed.zero.GatheredParameters([{name}])"
            )
