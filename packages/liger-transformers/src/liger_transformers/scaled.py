"""Linear layers whose products are in 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
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


@by_forward
def _scaled_class(cls: type[nn.Linear]) -> type[nn.Module]:
    def forward(self: Any, input: Any) -> Any:
        return liger.scaled_linear(*as_called(materialize(input), self.weight, self.bias))

    return subclass(cls, functools.wraps(cls.forward)(forward), OP)
