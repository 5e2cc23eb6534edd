"""PyTorch's state around a call: tracing, recording, transforms. Only this thread's state counts.

`torch.compiler.is_compiling` and the level of forward-mode differentiation belong to the process: they are set in one thread
while another one exports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _dispatch_tls_is_dispatch_key_included,
    _has_storage,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx.proxy import TracerBase
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

P = ParamSpec("P")
T = TypeVar("T")

compiling = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces, for torch.compile or for ``torch.export(strict=True)``. A launch is then part of the graph."""

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Remember the last results of a function of sizes. Not while Dynamo traces: then sizes may be symbols."""
    cached = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs) if compiling() else cached(*args, **kwargs)

    return call


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Have Dynamo run a function and take its result as a constant. It can't trace the look-up of installed packages, for one.

    The effect of `torch.compiler.assume_constant_result`, without importing Dynamo for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def plain() -> bool:
    """Whether nothing is active that `recording` or `transforming` could report. It is fast: each call of an op asks."""
    return not (
        _len_torch_dispatch_stack()
        or _is_tracing()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (_len_torch_function_stack() and _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH))
    )


def recording() -> str | None:
    """The reason if something records PyTorch's operators and would miss a launch: results would be memory that nothing wrote."""
    if _is_tracing():
        return "torch.jit.trace is active, which records no launch"
    ahead = _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    if ahead or torch._C._get_dispatch_mode(_PROXY) is not None:
        if torch.compiler.is_exporting():
            return "torch.export without strict=True is active, which records no launch; with strict=True it does"
        return "make_fx is active, which records no launch; torch.compile and torch.export(strict=True) do"
    return None


def symbolic_tracer(arguments: Iterable[Any]) -> TracerBase | None:
    """The FX tracer of a symbolic argument, which has no type and no shape: the call is recorded, and not run."""
    for value in arguments:
        if isinstance(value, Proxy):
            return value.tracer
    return None


def transforming(tensors: Iterable[Tensor | None]) -> str | None:
    """The reason if something differentiates or maps by other means than autograd's graph. Kernels have only that."""
    if _are_functorch_transforms_active():
        return "a torch.func transform is active; kernels take plain tensors"
    level = forward_ad._current_level
    # The level belongs to the process. Only a tensor shows whether a thread differentiates it.
    if level >= 0 and any(t is not None and torch._VF._unpack_dual(t, level=level)[1] is not None for t in tensors):
        return "forward-mode automatic differentiation is active; kernels take plain tensors"
    return None


def without_values(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the tensors' data can't be read, because they stand for the tensors of later calls."""
    if recording() is not None or torch._C._get_dispatch_mode(_FUNCTIONAL) is not None:
        return True
    return _are_functorch_transforms_active() or any(isinstance(t, FakeTensor) for t in tensors)


def readable(tensor: Tensor | None) -> bool:
    """Whether a check may read the tensor's data: nothing traces, and no device and no other process has to be waited for."""
    if tensor is None or tensor.device.type != "cpu" or compiling() or without_values([tensor]):
        return False
    return not is_traceable_wrapper_subclass(tensor)


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several, as with ``is_grads_batched=True``: it has no memory."""
    return tensor.layout is torch.strided and not _has_storage(tensor) and not is_traceable_wrapper_subclass(tensor)


def resolved(tensor: Tensor) -> Tensor:
    """The tensor as it is, or a copy of a negative or conjugate view, whose memory has other values than it has itself."""
    # Dynamo can't test for such views. If these methods change nothing, AOTAutograd removes them from the graph.
    return tensor.resolve_neg().resolve_conj()
