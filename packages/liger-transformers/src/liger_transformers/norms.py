"""Norms: running one on random numbers shows whether it is `rms_norm` or `layer_norm`, and then it is swapped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import liger_core as liger
from liger_transformers.deferred import materialize
from liger_transformers.probe import PROBE_ERRORS, plain_attributes, stand_in_for
from liger_transformers.swap import Swap, by_forward, has_own_forward, subclass, swapped_for

WIDTH = 48
"""Columns of a stand-in for a norm without a weight."""

CANCELLED = 1e-6
"""By how much results of `layer_norm` may differ in bfloat16 and float16 beside one rounding. A bias that nearly cancels the
product leaves the float32 errors of both, up to 4e-7, in a result of any size. Wide norms have such elements."""


def norm(module: nn.Module) -> Swap:
    """The swap of a norm: a module without children, with one float with `eps` in its name, and at most weight and bias.

    If its forward takes a second tensor, it is a gated norm or is left: silu(gate) · rms_norm(x) is `swiglu` of the two.
    """
    if (op := swapped_for(module)) is not None:
        return type(module) if "norm" in op else None
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        return "its eps is None, for which PyTorch takes one from the dtype; rms_norm takes a number, such as eps=1e-6"
    eps = next((name for name, value in vars(module).items() if "eps" in name and isinstance(value, float)), None)
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    if eps is None or module._modules or module._buffers or not {*parameters} <= {"weight", "bias"}:
        return None
    if (why := has_own_forward(module)) is not None:
        return why
    if any(value.dim() != 1 for value in parameters.values()):
        return "its weight has more than one dimension"
    return _norm_class(type(module), eps, tuple(parameters), _width(module), plain_attributes(module))


def _width(module: nn.Module) -> int:
    sizes = [value.numel() for value in module._parameters.values() if value is not None]
    return sizes[0] if sizes and sizes[0] else WIDTH


@by_forward
def _norm_class(
    cls: type[nn.Module], eps: str, parameters: tuple[str, ...], width: int, attributes: tuple[tuple[str, Any], ...]
) -> Swap:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    stand_in = stand_in_for(cls, attributes)
    weights = {name: draw(width) for name in parameters}
    gated = len(inspect.signature(cls.forward).parameters) > 2
    inputs = [[draw(2, 3, width) * scale for _ in range(1 + gated)] for scale in (0.01, 1.0, 30.0)]
    value = dict(attributes)[eps]

    def same(op: NormOp, dtype: torch.dtype, rounding: float) -> bool:
        cast = {name: weight.to(dtype) for name, weight in weights.items()}
        for name in ("weight", "bias"):
            stand_in._parameters[name] = nn.Parameter(cast[name], requires_grad=False) if name in cast else None
        for tensors in inputs:
            x, *gate = (t.to(dtype) for t in tensors)
            want = cls.forward(stand_in, x, *gate)
            if not isinstance(want, Tensor) or want.shape != x.shape or want.dtype != dtype:
                return False
            actual = op(x, cast.get("weight"), cast.get("bias"), value)
            actual = liger.swiglu(gate[0], actual) if gated else actual
            least = rounding if dtype == torch.float32 else CANCELLED if rounding else 0.0
            if not torch.allclose(actual.double(), want.double(), rtol=rounding, atol=least):
                return False
        return True

    def proved(op: NormOp, rounding: float) -> bool:
        low = (torch.bfloat16, torch.float16)
        return same(op, torch.float32, 1e-5) and all(same(op, d, rounding * torch.finfo(d).eps) for d in low)

    try:
        with torch.no_grad():
            if "bias" not in parameters:
                for offset in (0.0, 1.0) if parameters else (0.0,):
                    for mode in ("llama", "gemma", "none"):
                        op = functools.partial(_rms_norm, offset=offset, casting_mode=mode)
                        if proved(op, 0.0):
                            return _rms_norm_class(cls, eps, offset, mode, gated)
            # layer_norm rounds in one way, and has no options that could be confused with each other. So a last bit may differ.
            for offset in (0.0, 1.0) if "weight" in parameters and not gated else ():
                if proved(functools.partial(_layer_norm, offset=offset), 1.0):
                    return _layer_norm_class(cls, eps, offset)
    except PROBE_ERRORS as error:
        return f"its forward raises {type(error).__name__} on {'two tensors' if gated else 'a tensor'}"
    return (
        "it is not rms_norm times silu(gate)" if gated else "it is neither rms_norm, under any options, nor layer_norm"
    )


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter, or the plain tensor that FSDP1 sets as an attribute in its place. It is `getattr`, in less time."""
    attributes = module.__dict__
    return attributes[name] if name in attributes else module._parameters.get(name)


NormOp = Callable[[Tensor, Any, Any, float], Tensor]
"""A norm as a function of x, weight, bias and eps."""


def _rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Tensor:
    return liger.rms_norm(x, weight, eps, offset=offset, casting_mode=casting_mode)


@by_forward
def _rms_norm_class(cls: type[nn.Module], eps: str, offset: float, casting_mode: str, gated: bool) -> type[nn.Module]:
    widens = casting_mode != "gemma"  # the others multiply in the wider dtype of x and weight, and return it

    def normed(self: nn.Module, x: Tensor) -> Tensor:
        weight = _parameter(self, "weight")
        if weight is not None and widens and x.dtype != weight.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        return liger.rms_norm(x, weight, getattr(self, eps), offset=offset, casting_mode=casting_mode)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()
        return normed(self, materialize(x))

    def forward_gated(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        x, gate = map(materialize, args) if len(args) == 2 else (None, None)
        weight = _parameter(self, "weight")
        dtypes = {t.dtype for t in (x, gate, weight) if t is not None}
        if x is None or gate is None or x.shape != gate.shape or len(dtypes) > 1:
            return cls.forward(self, *args, **kwargs)
        return liger.swiglu(gate, normed(self, x))

    op = f"rms_norm(offset={offset:g}, casting_mode={casting_mode!r})"
    return subclass(cls, forward_gated, f"{op}, swiglu") if gated else subclass(cls, forward, op)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    return liger.layer_norm(x, weight + offset if offset else weight, bias, eps)


@by_forward
def _layer_norm_class(cls: type[nn.Module], eps: str, offset: float) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()
        x, weight, bias = materialize(x), _parameter(self, "weight"), _parameter(self, "bias")
        assert weight is not None
        if torch.is_autocast_enabled(x.device.type):
            if offset:
                return cls.forward(self, x)  # it casts by itself, in its own way
            if x.dtype != weight.dtype:
                x = x.to(weight.dtype)  # as autocast does with F.layer_norm
        return _layer_norm(x, weight, bias, getattr(self, eps), offset)

    return subclass(cls, forward, "layer_norm(weight + 1)" if offset else "layer_norm")
