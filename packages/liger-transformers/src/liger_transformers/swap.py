"""A module gets another forward: its class becomes a subclass, which is made once and remembers what it replaced."""

from __future__ import annotations

import copy
import copyreg
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

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

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # pickle compares the class that copyreg.__newobj__ gets with the instance's class. Here these differ.
        return copyreg._reconstructor, (original_class(type(self)), object, None), self.__dict__  # type: ignore[attr-defined]

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(part for part in (cls.extra_repr(self), f"liger: {op}") if part)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "forward": forward,
        "liger_op": op,
        **({"extra_repr": extra_repr} if op else {}),
    }
    swapped = type(cls.__name__, (cls,), namespace)
    # A method __deepcopy__ would be found through a wrapper's __getattr__ as well, as PeftModel's, and copy the inside alone.
    cast("Any", copy)._deepcopy_dispatch[swapped] = _deepcopy
    return swapped


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    clone = memo[id(module)] = module.__new__(type(module))
    clone.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return clone


F = TypeVar("F", bound=Callable[..., Any])


def by_forward(make: F) -> F:
    """functools.cache for a function of a class: another forward, which somebody has put in, is another class."""

    @functools.cache
    def cached(forward: Any, *args: Any) -> Any:
        return make(*args)

    @functools.wraps(make)
    def function(cls: Any, *args: Any) -> Any:
        return cached(cls.forward, cls, *args)

    result: Any = function
    result.cache_clear = cached.cache_clear
    return result


_global_hooks: Any = _has_any_global_hook


def has_hooks(module: Any) -> bool:
    """Whether calling the module calls hooks: its own, accelerate's, or those of all modules."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or "_hf_hook" in module.__dict__ or _global_hooks())


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give the module another class. If the old class's forward is bound to the instance, the new one's runs in its place.

    accelerate's hooks call such a forward, and leave it behind when they are removed.
    """
    attributes, old = vars(module), cast("Any", type(module)).forward
    if getattr(attributes.get("forward"), "__func__", None) is old:
        del attributes["forward"]
    module.__class__ = cls
    if getattr(attributes.get("_old_forward"), "__func__", None) is old:
        attributes["_old_forward"] = types.MethodType(cast("Any", cls).forward, module)


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP1 or FSDP2 gathers the module's parameters before its call, and may free them behind it."""
    return type(module).__name__ == "FullyShardedDataParallel" or hasattr(type(module), "unshard")


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
    """Why `set_class` would have no effect on this module: a forward is bound to it that is not its class's. None if none is."""
    forward: Any = vars(module).get("forward")
    if getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks":
        forward = vars(module).get("_old_forward", forward)
    if forward is None:
        return None
    if getattr(forward, "__func__", None) is cast("Any", type(module)).forward and forward.__self__ is module:
        return None
    binder = getattr(forward, "__module__", None)
    return f"its forward is bound to the instance{f', by {binder}' if binder else ''}; apply before that"
