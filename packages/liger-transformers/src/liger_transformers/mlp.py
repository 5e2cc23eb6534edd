"""Gated MLPs: running one on random numbers shows whether it is `gated_mlp`, which it then runs in gradient checkpointing.

If its linear layers are in 8 bits, it is `scaled_gated_mlp` instead, in eager mode.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn

import liger_core as liger
from liger_core import recompute, subclasses
from liger_core.contract import compiling
from liger_core.ops.gated_mlp import whole_memory
from liger_transformers.activations import activation_op, is_activation, multiplies
from liger_transformers.deferred import materialize
from liger_transformers.experts import ACTIVATIONS
from liger_transformers.linear import as_called
from liger_transformers.probe import PROBE_ERRORS, plain_attributes, stand_in_for
from liger_transformers.scaled import OP as SCALED
from liger_transformers.swap import Swap, by_forward, has_hooks, has_own_forward, original_class, subclass, swapped_for

SCALED_MLP = "scaled_gated_mlp"
PARTS, SMALL = 3, 2**29
"""A call's memory budget is a part of what it takes at once, but so many bytes at least: small products are slow.

A third is as little as other parts of a step take: docs/memory.md counts them."""


def mlp(module: nn.Module, scaled: bool = False) -> Swap:
    """The swap of a module of three linear layers and an activation; `scaled`: of linear layers in 8 bits."""
    op = SCALED_MLP if scaled else "gated_mlp"
    if (swapped_for(module) or "").startswith(f"{op}("):
        return type(module)
    children = dict(module.named_children())
    activations = [name for name, child in children.items() if is_activation(child)]
    linears = tuple(name for name in children if name not in activations)
    if len(activations) != 1 or not linears or not multiplies(type(module)):
        return None
    if (why := has_own_forward(module)) is not None:
        return why
    if len(linears) != 3 or module._parameters or module._buffers:
        return "it holds something else than three linear layers and an activation"
    for name in linears:
        if (why := _why_not_linear(children[name], scaled)) is not None:
            return f"{name} {why}"
    (name,) = activations
    if (why := _why_not_alone(children[name])) is not None:
        return f"{name} {why}"
    activation = ACTIVATIONS.get(activation_op(children[name]) or "")
    if activation is None:
        return "its activation is neither SiLU nor GELU's tanh approximation"
    act = name, original_class(type(children[name]))
    return _mlp_class(original_class(type(module)), act, linears, activation, plain_attributes(module), scaled)


def _why_not_alone(module: nn.Module) -> str | None:
    """Why calling the module isn't calling its class's forward, or None."""
    if (why := has_own_forward(module)) is not None:
        return f"stays: {why}"
    return "has hooks, which would not be called" if has_hooks(module) else None


def _why_not_linear(module: Any, scaled: bool) -> str | None:
    """Why a product with the module's weight, `scaled` or not, isn't all that calling the module does, or None."""
    if not isinstance(module, nn.Linear) or original_class(type(module)).forward is not nn.Linear.forward:
        return f"is a {type(module).__name__}, whose forward is not nn.Linear's"
    if (why := _why_not_alone(module)) is not None:
        return why
    if "parametrizations" in module._modules:
        return "has parametrizations"
    if (swapped := swapped_for(module)) != (SCALED if scaled else None):
        return f"is swapped for {swapped}" if swapped else "is not in 8 bits"
    if cast("Any", module).bias is not None:
        return "has a bias, and gated_mlp takes none"
    # FSDP2 makes a DTensor's parameters plain tensors while their module runs.
    if (
        type(module.weight) not in (nn.Parameter, Tensor)
        and subclasses.full_name(type(module.weight)) != subclasses.DTENSOR
    ):
        return f"has a weight of the type {type(module.weight).__name__}"
    return None


@by_forward
def _mlp_class(
    cls: type[nn.Module],
    act: tuple[str, type[nn.Module]],
    linears: tuple[str, ...],
    activation: str,
    attributes: tuple[tuple[str, Any], ...],
    scaled: bool,
) -> Swap:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stand_in = stand_in_for(cls, attributes)
    stand_in._modules[act[0]] = nn.SiLU() if activation == "silu" else nn.GELU(approximate="tanh")
    x, gate_weight, up_weight, down_weight = draw(2, 3, 5), draw(7, 5), draw(7, 5), draw(6, 7)
    numbers = sorted({value for _, value in attributes if type(value) is float}) if activation == "silu" else []
    failed = None
    for names in itertools.permutations(linears):
        for name, weight in zip(names, (gate_weight, up_weight, down_weight), strict=True):
            stand_in._modules[name] = _linear(weight)
        try:
            with torch.no_grad():
                want = cls.forward(stand_in, x)
        except PROBE_ERRORS as error:  # the matrices don't fit in another order than the module's
            failed = failed or f"its forward raises {type(error).__name__} on a tensor"
            continue
        failed = "it is not gated_mlp"
        for gate_multiplier, down_multiplier in itertools.product((1.0, *numbers), repeat=2):
            options: dict[str, Any] = {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}
            got = liger.gated_mlp(x, gate_weight, up_weight, down_weight, activation=activation, **options)
            if (
                isinstance(want, Tensor)
                and want.shape == got.shape
                and torch.allclose(got, want, rtol=1e-10, atol=1e-12)
            ):
                multipliers = gate_multiplier, down_multiplier
                if not scaled:
                    return _swap(cls, act, names, activation, *multipliers)
                if multipliers == (1.0, 1.0):
                    return _scaled_swap(cls, act, names, activation)
                return "it has multipliers, which scaled_gated_mlp doesn't take"
    return failed


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


@by_forward
def _swap(
    cls: type[nn.Module],
    act: tuple[str, type[nn.Module]],
    names: tuple[str, ...],
    activation: str,
    gate_multiplier: float,
    down_multiplier: float,
) -> type[nn.Module]:
    options: dict[str, Any] = {"activation": activation}
    if (gate_multiplier, down_multiplier) != (1.0, 1.0):
        options |= {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and recompute.checkpointed():
            x, matrices = materialize(args[0]), _weights(self, act, names, False)
            if matrices is not None and isinstance(x, Tensor) and _fit(x, matrices):
                return liger.gated_mlp(x, *matrices, **options, memory_budget=memory_budget(x, matrices[0]))
        return cls.forward(self, *args, **kwargs)

    described = ", ".join(["in checkpointing", *(f"{name}={value!r}" for name, value in options.items())])
    return subclass(cls, functools.wraps(cls.forward)(forward), f"gated_mlp({described})")


@by_forward
def _scaled_swap(
    cls: type[nn.Module], act: tuple[str, type[nn.Module]], names: tuple[str, ...], activation: str
) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not compiling():
            x, matrices = materialize(args[0]), _weights(self, act, names, True)
            if matrices is not None and isinstance(x, Tensor) and _fit(x, matrices):
                gate, up, down = matrices
                x, gate, _ = as_called(x, gate, None)
                return liger.scaled_gated_mlp(x, gate, up.to(x.dtype), down.to(x.dtype), activation=activation)
        return cls.forward(self, *args, **kwargs)

    return subclass(cls, functools.wraps(cls.forward)(forward), f"{SCALED_MLP}(activation={activation!r})")


def _weights(
    module: nn.Module, act: tuple[str, type[nn.Module]], names: tuple[str, ...], scaled: bool
) -> list[Tensor] | None:
    """The products' weights; None if the module has become another one since, as by PEFT."""
    child, linears = module._modules.get(act[0]), [cast("Any", module._modules.get(name)) for name in names]
    if child is None or original_class(type(child)) is not act[1] or _why_not_alone(child) is not None:
        return None
    if any(_why_not_linear(linear, scaled) for linear in linears):
        return None
    return [linear.weight for linear in linears]


def _fit(x: Tensor, weights: list[Tensor]) -> bool:
    """Whether the op takes these tensors as the linear layers would. It takes no weights that are divided among processes."""
    if any(type(weight) not in (nn.Parameter, Tensor) for weight in weights):
        return False
    dtypes = {x.dtype, *(weight.dtype for weight in weights)}
    supported = {torch.float32, torch.bfloat16, torch.float16}
    return dtypes <= supported and (len(dtypes) == 1 or torch.is_autocast_enabled(x.device.type))


def memory_budget(x: Tensor, gate_weight: Tensor) -> int | None:
    """Bytes that a call may allocate; None if everything at once is little."""
    whole = whole_memory(x, gate_weight, grad=True)
    if whole <= SMALL:
        return None
    # Under autocast x is narrower in the op, and its sum is float32.
    least = max(12 * gate_weight.shape[0], 4 * x.numel() + 20 * (x.numel() // max(1, x.shape[-1])))
    return max(whole // PARTS, SMALL, least)
