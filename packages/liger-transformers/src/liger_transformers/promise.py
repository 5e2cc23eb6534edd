"""A value that isn't computed yet: the next steps of the model's own code decide which op computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

MUL = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__})
DIV = frozenset({torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__})
SUB = frozenset({torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__})
NEG = frozenset({torch.neg, torch.negative, Tensor.neg, Tensor.__neg__})


class Promise:
    """Stands for a tensor that a swapped module owes.

    `wait` answers a function that the subclass knows, mostly with another promise or with an op's result. Anything else settles
    the promise: its tensor is computed, once, and from then on the promise is that tensor. So an unknown function costs speed
    and never the result. Everyone who holds the promise sees a write into the tensor.

    `__torch_function__` makes it pass for a tensor in torch's functions, in eager mode and in Dynamo. Dynamo sends an operator
    on a promise there as well, so no code in here applies an operator to a promise: it calls a function.
    """

    __slots__ = ("__weakref__", "_base", "_tensor", "_view", "grad")

    def __init__(self, grad: bool, base: Promise | None = None, view: Callable[[Tensor], Tensor] | None = None) -> None:
        """A promise of its own; or, with `base`, the promise of `view(base)`, which shares the base's memory.

        `grad` is the grad mode in which the tensor would have been made, and will be.
        """
        self._tensor: Tensor | None = None
        self.grad, self._base, self._view = grad, base, view

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        raise NotImplementedError

    def compute(self) -> Tensor:
        """The tensor, computed as the original module would have done. It is called in the grad mode `grad`."""
        raise NotImplementedError

    def wait(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result while this promise, one of `args`, isn't settled; or NotImplemented to settle it."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """Settle the promise."""
        if self._tensor is None:
            if self.grad == torch.is_grad_enabled():
                self._tensor = self._compute()
            else:
                with torch.set_grad_enabled(self.grad):
                    self._tensor = self._compute()
        return self._tensor

    def _compute(self) -> Tensor:
        return self.compute() if self._base is None or self._view is None else self._view(self._base.tensor())

    @property
    def settled(self) -> bool:
        """Whether the tensor exists, here or in the promise that this one is a view of."""
        return self._tensor is not None or (self._base is not None and self._base.settled)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for argument in args:
            if not isinstance(argument, Promise) and type(argument) is list and argument:
                argument = cast("list[Any]", argument)[0]  # torch.stack takes a list
            if isinstance(argument, Promise):
                if argument._tensor is None and (argument._base is None or not argument._base.settled):
                    result = argument.wait(function, args, kwargs)
                    if result is not NotImplemented:
                        return result
                break
        return function(*[settle(a) for a in args], **{name: settle(a) for name, a in kwargs.items()})

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or its entry `dim`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"<promise of {type(self).__name__}, {tuple(self.shape)}{', settled' if self.settled else ''}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def settle(value: Any) -> Any:
    """`value` with a tensor in place of every promise: of itself, or in a list or a tuple."""
    if isinstance(value, Promise):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        parts = cast("list[Any] | tuple[Any, ...]", value)
        if any(isinstance(part, Promise) for part in parts):
            values = [settle(part) for part in parts]
            made: Any = type(parts)
            return made(*values) if hasattr(parts, "_fields") else made(values)
    return cast("Any", value)


def follow(cls: type[Promise], *names: str) -> None:
    """Send calls of these methods of Tensor where the functions go. Python looks operators up only on the class."""
    for name in names:
        setattr(cls, name, _follow(getattr(Tensor, name)))


def _follow(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Promise, *args: Any, **kwargs: Any) -> Any:
        return Promise.__torch_function__(function, (), (self, *args), kwargs)

    return method


OPERATORS = """
    __abs__ __add__ __and__ __array__ __bool__ __contains__ __eq__ __float__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__
    __iand__ __ifloordiv__ __ilshift__ __imod__ __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__ __isub__
    __iter__ __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__
    __pow__ __radd__ __rand__ __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__
    __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ __xor__ __complex__ __format__
"""
follow(Promise, *[name for name in OPERATORS.split() if hasattr(Tensor, name)])
Promise.__hash__ = object.__hash__  # __eq__ removed it; tensors are hashed by identity
