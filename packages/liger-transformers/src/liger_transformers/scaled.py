"""Linear layers whose products are in 8 bits."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
from liger_core.contract import compiling
from liger_core.ops.quantize import Quantized
from liger_core.scaled import MULTIPLE, why_not
from liger_transformers.deferred import materialize
from liger_transformers.linear import as_called
from liger_transformers.swap import Swap, by_forward, has_own_forward, original_class, subclass, swapped_for

OP = "scaled_linear"


def linears(layer: nn.Module, prefix: str, adapter: bool = False) -> Iterator[tuple[str, nn.Linear, bool]]:
    """The linear layers inside of a model's layer: name, module, and whether it belongs to an adapter of PEFT's."""
    wraps = "base_layer" in layer._modules
    for name, child in layer.named_children():
        inside = adapter or (wraps and name != "base_layer")
        if isinstance(child, nn.Linear):
            yield f"{prefix}.{name}", child, inside
        if not isinstance(child, GradientCheckpointingLayer):
            yield from linears(child, f"{prefix}.{name}", inside)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`nn.Module.named_modules`, with types."""
    return list(cast("Any", model).named_modules())


def scaled(name: str, linear: nn.Linear, adapter: bool, skip: Sequence[str]) -> Swap:
    """The swap of a linear layer."""
    if swapped_for(linear) == OP:
        return type(linear)
    cls = original_class(type(linear))
    if cls.forward is not nn.Linear.forward:
        return f"it is a {cls.__name__}, whose forward is not nn.Linear's"
    if (why := has_own_forward(linear)) is not None:
        return why
    if adapter:
        return "it belongs to an adapter, whose products are small"
    if any(matches(name, part) for part in skip):
        return "skip names it"
    for size, of in ((linear.in_features, "inputs"), (linear.out_features, "outputs")):
        if size % MULTIPLE:
            return f"its {size} {of} are no multiple of {MULTIPLE}"
    if linear.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {linear.weight.dtype}"
    # A model on the meta device is moved to another one later.
    if linear.weight.device.type != "meta" and (why := why_not(linear.weight.device)) is not None:
        return why
    return _scaled_class(cls)


def matches(name: str, part: str) -> bool:
    """Whether a module's name has a part, such as ``mlp.down_proj`` or ``layers.0``."""
    return f".{part}." in f".{name}."


class _Input(NamedTuple):
    """The input of the last linear layer that ran, in 8 bits.

    Attributes:
        tensor: a weak reference to it.
        kind: its version, its dtype in the product, and whether the columns were wanted.
        quantized: it, in 8 bits.
    """

    tensor: weakref.ref[Tensor]
    kind: tuple[int, torch.dtype, bool]
    quantized: Quantized


class _Inputs(threading.local):
    """Whether a layer runs in this thread, and the input of its last linear layer."""

    def __init__(self) -> None:
        self.shared = False
        self.last: _Input | None = None


_inputs = _Inputs()


@contextmanager
def shared_inputs() -> Generator[None]:
    """While a layer runs, its linear layers that get the same tensor one after another, such as q, k and v, quantize it once.

    Beyond the layer's call nothing is kept: memory that somebody fills anew, as for CUDA graphs, may be the same tensor.
    """
    before = _inputs.shared, _inputs.last
    _inputs.shared, _inputs.last = True, None
    try:
        yield
    finally:
        _inputs.shared, _inputs.last = before


def _quantized(input: Tensor, x: Tensor, weight: Tensor) -> Quantized | None:
    """The input in 8 bits, if a layer runs whose linear layers may share it; `x` is the input as it is multiplied."""
    if compiling() or not _inputs.shared or input.is_inference():
        return None
    kind = input._version, x.dtype, torch.is_grad_enabled() and weight.requires_grad
    last = _inputs.last
    if last is None or last.tensor() is not input or last.kind != kind:
        last = _inputs.last = _Input(weakref.ref(input), kind, liger.quantize_input(x, columns=kind[2]))
    return last.quantized


@by_forward
def _scaled_class(cls: type[nn.Linear]) -> type[nn.Module]:
    def forward(self: Any, input: Any) -> Any:
        input = materialize(input)
        x, weight, bias = as_called(input, self.weight, self.bias)
        return liger.scaled_linear(x, weight, bias, quantized=_quantized(input, x, weight))

    return subclass(cls, functools.wraps(cls.forward)(forward), OP)
