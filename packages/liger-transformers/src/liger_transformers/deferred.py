"""Tensors that aren't computed yet: the next steps of the model's own code decide which op computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from liger_core.contract import compiling

MUL = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__})
NEG = frozenset({torch.neg, torch.negative, Tensor.neg, Tensor.__neg__})


class DeferredTensor:
    """Stands for the output of a swapped module.

    `handle` runs a function that the subclass knows, mostly with another deferred tensor or with an op's result. Anything else
    materializes the tensor: it is computed, once, and from then on the object is that tensor. So an unknown function costs speed
    and never the result. Everyone who holds the object sees a write into the tensor. It is given to code that is known alone,
    since an object is no tensor: a hook or an autograd Function would not see one.

    `__torch_function__` makes it pass for a tensor in torch's functions, in eager mode and in Dynamo. Dynamo sends an operator
    on a deferred tensor there as well, so no code in here applies an operator to one: it calls a function.
    """

    __slots__ = ("__weakref__", "_tensor", "grad")

    def __init__(self, grad: bool) -> None:
        """`grad` is the grad mode in which the tensor would have been computed, and will be."""
        self._tensor: Tensor | None = None
        self.grad = grad

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

    def handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result while this tensor, one of `args`, is deferred; or NotImplemented to materialize it."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """The tensor, which is computed at the first call."""
        if self._tensor is None:
            if self.grad == torch.is_grad_enabled():
                self._tensor = self.compute()
            else:
                with torch.set_grad_enabled(self.grad):
                    self._tensor = self.compute()
        return self._tensor

    @property
    def materialized(self) -> bool:
        """Whether the tensor exists."""
        return self._tensor is not None

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for argument in args:
            if not isinstance(argument, DeferredTensor) and type(argument) is list and argument:
                argument = cast("list[Any]", argument)[0]  # torch.stack takes a list
            if isinstance(argument, DeferredTensor):
                if argument._tensor is None:
                    result = argument.handle(function, args, kwargs)
                    if result is not NotImplemented:
                        return result
                break
        return function(*[materialize(a) for a in args], **{name: materialize(a) for name, a in kwargs.items()})

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
        state = "materialized" if self.materialized else "deferred"
        return f"<{state} {type(self).__name__}, {tuple(self.shape)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def materialize(value: Any) -> Any:
    """`value` with a tensor in place of every deferred one: itself, or items of a list or a tuple."""
    if isinstance(value, DeferredTensor):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", value)
        if any(isinstance(item, DeferredTensor) for item in items):
            tensors = [materialize(item) for item in items]
            cls: Any = type(items)
            return cls(*tensors) if hasattr(items, "_fields") else cls(tensors)
    return cast("Any", value)


def add_methods(cls: type[DeferredTensor], *names: str) -> None:
    """Give the class these methods of Tensor, through `__torch_function__`. Python looks operators up only on the class."""
    for name in names:
        setattr(cls, name, _method(getattr(Tensor, name)))


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: DeferredTensor, *args: Any, **kwargs: Any) -> Any:
        return DeferredTensor.__torch_function__(function, (), (self, *args), kwargs)

    return method


OPERATORS = """
    __abs__ __add__ __and__ __array__ __bool__ __contains__ __eq__ __float__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__
    __iand__ __ifloordiv__ __ilshift__ __imod__ __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__ __isub__
    __iter__ __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__
    __pow__ __radd__ __rand__ __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__
    __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ __xor__ __complex__ __format__
"""
add_methods(DeferredTensor, *[name for name in OPERATORS.split() if hasattr(Tensor, name)])
DeferredTensor.__hash__ = object.__hash__  # __eq__ removed it; tensors are hashed by identity


def version(tensor: Tensor) -> int | None:
    """How often the tensor was written to, or None if nobody counts."""
    # Dynamo doesn't trace is_inference, and knows every write in what it compiles.
    return None if compiling() or tensor.is_inference() else tensor._version


def check_unmodified(tensor: Tensor, expected: int | None) -> None:
    """Raise RuntimeError if a deferred tensor's input was written to since: it can't be computed any more."""
    if expected is not None and tensor._version != expected:
        raise RuntimeError(
            "liger_transformers: the input of an activation or of the head was modified in place before its output was used; "
            "apply(model, glu=False) or apply(model, loss=False) leaves that module as it is"
        )
