"""Layers that save less for backward."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
from liger_core.contract import compiling
from liger_transformers.swap import Swap, by_forward, has_own_forward, original_class, subclass, swapped_for

EAGER = "lean(in eager mode)"
"""The swap of a layer that doesn't know whether it will be compiled."""


def layer(module: nn.Module, compiled: bool) -> Swap:
    """The swap of a layer, which transformers checkpoints. Its forward runs in `liger_core.lean`, also in a checkpoint.

    Under torch.compile it does so only if `compiled`, or if an earlier call asked for that.
    """
    if not isinstance(module, GradientCheckpointingLayer):
        return None
    if (op := swapped_for(module)) is not None:
        return _layer_class(original_class(type(module)), True) if compiled and op == EAGER else type(module)
    return has_own_forward(module) or _layer_class(type(module), compiled)


@by_forward
def _layer_class(cls: type[nn.Module], compiled: bool) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not compiled and compiling():
            return cls.forward(self, *args, **kwargs)
        with liger.lean():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, functools.wraps(cls.forward)(forward), "lean" if compiled else EAGER)
