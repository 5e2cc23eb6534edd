"""Layers that save less for backward, or whose linear layers share an input in 8 bits."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
from liger_core.contract import compiling
from liger_transformers.scaled import OP, linears, shared_inputs
from liger_transformers.swap import Swap, by_forward, has_own_forward, is_unit, original_class, subclass, swapped_for

LEAN, EAGER = "lean", "lean(in eager mode)"
"""The swap of a layer that is lean, and of one that is so unless it is compiled."""
SHARED = "shared_inputs"
"""The swap of a layer with linear layers in 8 bits, such as q, k and v, which quantize their input once."""


def layer(module: nn.Module, lean: bool | None, compiled: bool) -> Swap:
    """The swap of a layer, which transformers checkpoints.

    Args:
        module: any module. A layer shares inputs if its linear layers are in 8 bits.
        lean: its forward runs in `liger_core.lean`, also in a checkpoint. None: the layer's swap is the one that it has.
        compiled: under torch.compile as well. If an earlier call asked for that, it stays.
    """
    if not isinstance(module, GradientCheckpointingLayer):
        return None
    swapped = swapped_for(module)
    if swapped is None and (why := has_own_forward(module)) is not None:
        return why
    if lean is None:
        return type(module) if swapped is not None else None
    swaps = [] if swapped is None else swapped.split(", ")
    shared = [SHARED] if any(swapped_for(linear) == OP for _, linear, _ in linears(module, "")) else []
    wanted = [LEAN if compiled or LEAN in swaps else EAGER, *shared] if lean else shared
    if wanted == swaps:
        return type(module) if swaps else None
    return _layer_class(original_class(type(module)), tuple(wanted)) if wanted else None


def _has_units_of_norms(layer: nn.Module) -> bool:
    """Whether FSDP frees a norm's weight behind a unit inside the layer: recomputing takes it before FSDP gathers it again."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    units = [module for module in layer.modules() if module is not layer and is_unit(module)]
    return any("norm" in (swapped_for(module) or "") for unit in units for module in unit.modules())


@by_forward
def _layer_class(cls: type[nn.Module], swaps: tuple[str, ...]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        lean = LEAN in swaps if compiling() else swaps[0] in (LEAN, EAGER) and not _has_units_of_norms(self)
        shared = SHARED in swaps and not compiling()
        with (
            liger.lean() if lean else contextlib.nullcontext(),
            shared_inputs() if shared else contextlib.nullcontext(),
        ):
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, functools.wraps(cls.forward)(forward), ", ".join(swaps))
