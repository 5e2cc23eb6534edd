"""A module gets another forward: its class becomes a subclass, which is made once and remembers what it replaced."""

from __future__ import annotations

import copy
import copyreg
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Swap = type[nn.Module] | str | None
"""The class that a module may become, the reason why it stays unchanged, or None for a module of another kind."""


def subclass(cls: type[nn.Module], forward: Callable[..., Any], op: str) -> type[nn.Module]:
    """A subclass of `cls` that differs in its forward, for a module's ``__class__``.

    It keeps the name, from which transformers writes ``config.architectures``. A copy of a swapped module is swapped as well. A
    pickle has the original class, so that it loads where this package isn't installed.

    Args:
        cls: the module's class.
        forward: the other forward.
        op: the op with its options, which `swapped_for` returns.
    """

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        clone = memo[id(self)] = self.__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # pickle compares the class that copyreg.__newobj__ gets with the instance's class. Here these differ.
        return copyreg._reconstructor, (original_class(type(self)), object, None), self.__dict__  # type: ignore[attr-defined]

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
        "forward": forward,
        "liger_op": op,
    }
    return type(cls.__name__, (cls,), namespace)


def swapped_for(module: nn.Module) -> str | None:
    """The op that the module was swapped for, or None."""
    return getattr(type(module), "liger_op", None)


def original_class(cls: type[Any]) -> type[Any]:
    """The class without our subclass, even if FSDP has derived its own class from ours."""
    if "liger_op" in vars(cls):
        return cls.__bases__[0]
    bases = tuple(map(original_class, cls.__bases__)) if hasattr(cls, "liger_op") else cls.__bases__
    if bases == cls.__bases__:
        return cls
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, bases, namespace)


def replaced_by(method: Any, module: nn.Module) -> Callable[..., Any] | None:
    """The forward that was bound to the instance before ours; None if `method` is not ours."""
    replaced = getattr(method, "liger_replaces", None)
    return types.MethodType(replaced, module) if replaced is not None and hasattr(method, "__self__") else replaced


def has_own_forward(module: nn.Module) -> str | None:
    """Why a swap would have no effect on this module: its forward is an attribute of the instance. None if it isn't."""
    if "forward" not in vars(module):
        return None
    binder = getattr(vars(module)["forward"], "__module__", None)
    return f"its forward is bound to the instance{f', by {binder}' if binder else ''}; apply before that"
