"""Layers that save less for backward."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
from liger_transformers.swap import Swap, by_forward, has_own_forward, subclass, swapped_for


def layer(module: nn.Module) -> Swap:
    """The swap of a layer, which transformers checkpoints. Its forward runs in `liger_core.lean`, also in a checkpoint."""
    if not isinstance(module, GradientCheckpointingLayer):
        return None
    if swapped_for(module) is not None:
        return type(module)
    return has_own_forward(module) or _layer_class(type(module))


@by_forward
def _layer_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with liger.lean():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, functools.wraps(cls.forward)(forward), "lean")
