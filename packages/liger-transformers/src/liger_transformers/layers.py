"""Layers that save less for backward."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
from liger_core.contract import compiling
from liger_transformers.swap import Swap, by_forward, has_own_forward, is_unit, original_class, subclass, swapped_for

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


def _has_units_of_norms(layer: nn.Module) -> bool:
    """Whether FSDP frees a norm's weight behind a unit inside the layer: recomputing takes it before FSDP gathers it again."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    units = [module for module in layer.modules() if module is not layer and is_unit(module)]
    return any("norm" in (swapped_for(module) or "") for unit in units for module in unit.modules())


@by_forward
def _layer_class(cls: type[nn.Module], compiled: bool) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (not compiled) if compiling() else _has_units_of_norms(self):
            return cls.forward(self, *args, **kwargs)
        with liger.lean():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, functools.wraps(cls.forward)(forward), "lean" if compiled else EAGER)
