"""The experts of a mixture: running a module on random numbers shows whether it is `fused_moe`, and then it is swapped."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import liger_core as liger
from liger_transformers.activations import activation_op, is_activation
from liger_transformers.probe import PROBE_ERRORS, plain_attributes, stand_in_for
from liger_transformers.swap import Swap, by_forward, has_own_forward, original_class, subclass, swapped_for

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_tanh"}
"""fused_moe's name of an activation, by the op of its gate."""


def experts(module: nn.Module) -> Swap:
    """The swap of a module with the parameters that transformers' experts interface reads, `gate_up_proj` and `down_proj`."""
    if "fused_moe" in (swapped_for(module) or ""):
        return type(module)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if {p.dim() for name, p in parameters.items() if name in ("gate_up_proj", "up_proj", "down_proj")} != {3}:
        return None
    if (why := has_own_forward(module)) is not None:
        return why
    if {*parameters} != {"gate_up_proj", "down_proj"}:
        others = ", ".join(sorted({*parameters} - {"gate_up_proj", "down_proj"}))
        return f"it has {others}; fused_moe takes gate_up_proj and down_proj"
    ((name, act), *others) = (*module.named_children(), ("", module))
    if len(others) != 1 or not is_activation(act):
        return "it doesn't hold an activation alone"
    activation = ACTIVATIONS.get(activation_op(act) or "")
    if activation is None:
        return "its activation is neither SiLU nor GELU's tanh approximation"
    transposed = bool(getattr(module, "is_transposed", False))
    count, rows, columns = parameters["gate_up_proj"].shape
    sizes = (count, rows, columns // 2) if transposed else (count, columns, rows // 2)
    return _experts_class(original_class(type(module)), name, activation, transposed, sizes, plain_attributes(module))


@by_forward
def _experts_class(
    cls: type[nn.Module],
    act: str,
    activation: str,
    transposed: bool,
    sizes: tuple[int, int, int],
    attributes: tuple[tuple[str, Any], ...],
) -> Swap:
    forward = inspect.unwrap(cls.forward)
    if len(inspect.signature(forward).parameters) != 4:
        return "its forward takes other tensors than tokens, their experts and weights"
    # A stand-in has the module's own numbers, except those that are its sizes.
    small: dict[int, int] = {}
    for size, other in zip(sizes, (4, 8, 6), strict=True):
        small.setdefault(size, other)
    count, hidden, width = (small[size] for size in sizes)
    small.setdefault(2 * sizes[2], 2 * width)
    numbers = {name: small.get(value, value) if type(value) is int else value for name, value in attributes}
    stand_in = stand_in_for(cls, tuple(numbers.items()))
    stand_in._modules[act] = nn.SiLU() if activation == "silu" else nn.GELU(approximate="tanh")
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    gate_up, down = draw(count, 2 * width, hidden), draw(count, hidden, width)
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        weight = weight.transpose(1, 2) if transposed else weight
        stand_in._parameters[name] = nn.Parameter(weight, requires_grad=False)
    index, weights = draw(12, count - 1).topk(2).indices, draw(12, 2).softmax(-1)  # the last expert gets no token

    def same(limit: float | None) -> bool:
        for scale in (0.3, 3.0):
            x = draw(12, hidden) * scale
            want = forward(stand_in, x, index, weights)
            actual = liger.fused_moe(x, gate_up, down, index, weights, activation=activation, limit=limit)
            if not isinstance(want, Tensor) or want.shape != actual.shape:
                return False
            if not torch.allclose(actual, want, rtol=1e-4, atol=1e-5 * float(actual.abs().max())):
                return False
        return True

    try:
        with torch.no_grad():
            for limit in (None, *(value for value in numbers.values() if isinstance(value, float) and value > 0)):
                if same(limit):
                    return _swap(cls, activation, transposed, limit)
    except PROBE_ERRORS as error:
        return f"its forward raises {type(error).__name__} on tokens, their experts and weights"
    return "it is not fused_moe"


@by_forward
def _swap(cls: type[nn.Module], activation: str, transposed: bool, limit: float | None) -> type[nn.Module]:
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor | None:
        """The op's result, or None if it doesn't take the call."""
        gate_up: Any = self.gate_up_proj
        down: Any = self.down_proj
        # A weight that is divided among processes is not whole. An expert of another process has its own index.
        whole = type(gate_up) in (nn.Parameter, Tensor) and not getattr(self, "_is_expert_parallel", False)
        if len(args) != 3 or kwargs or not whole or args[0].dim() != 2:
            return None
        x, index, weights = args
        if not gate_up.dtype == down.dtype == x.dtype and not torch.is_autocast_enabled(x.device.type):
            return None
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return liger.fused_moe(x, gate_up, down, index, weights, activation=activation, limit=limit)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        y = fused(self, *args, **kwargs)
        return cls.forward(self, *args, **kwargs) if y is None else y

    op = f"fused_moe(activation={activation!r}{'' if limit is None else f', limit={limit:g}'})"
    swapped = subclass(cls, forward, op)
    swapped.fused = staticmethod(fused)  # type: ignore[attr-defined]
    return swapped


def gate(module: nn.Module) -> Swap:
    """The swap of experts whose gate is no module: `_apply_gate`, which transformers' experts interface calls.

    It gets both factors in one tensor. In gpt_oss they alternate, with the gate clamped from above and the other factor from
    both sides.
    """
    cls = original_class(type(module))
    apply_gate = getattr(cls, "_apply_gate", None)
    if apply_gate is None or module._modules or not callable(apply_gate):
        return None
    numbers = {value for _, value in plain_attributes(module) if type(value) is float and value > 0}
    return _gate_class(cls, apply_gate, tuple(sorted(numbers)), plain_attributes(module))


@functools.cache
def _gate_class(
    cls: type[nn.Module],
    apply_gate: Callable[[nn.Module, Tensor], Tensor],
    numbers: tuple[float, ...],
    attributes: tuple[tuple[str, Any], ...],
) -> Swap:
    stand_in = stand_in_for(cls, attributes)
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    inputs = [draw(7, 24) * scale for scale in (0.3, 3.0, 30.0, 10 * max(numbers, default=1.0))]
    try:
        with torch.no_grad():
            expected = [apply_gate(stand_in, x) for x in inputs]
    except PROBE_ERRORS as error:
        return f"its _apply_gate raises {type(error).__name__} on a tensor of both factors"
    for turns, limit, alpha, shift in itertools.product((False, True), (None, *numbers), (1.0, *numbers), (0.0, 1.0)):
        form = functools.partial(_gated, turns=turns, limit=limit, alpha=alpha, shift=shift)
        if all(_close(want, form(x)) for want, x in zip(expected, inputs, strict=True)):
            options = {"turns": turns, "limit": limit, "alpha": None if alpha == 1 else alpha, "shift": shift}
            described = ", ".join(f"{name}={value:g}" for name, value in options.items() if value)
            swapped = subclass(cls, cls.forward, f"swiglu({described})" if described else "swiglu")
            swapped._apply_gate = staticmethod(form)  # type: ignore[attr-defined]
            return swapped
    return "its _apply_gate is not swiglu"


def _close(want: Any, got: Tensor) -> bool:
    return isinstance(want, Tensor) and want.shape == got.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def _gated(gate_up: Tensor, turns: bool, limit: float | None, alpha: float, shift: float) -> Tensor:
    """g · sigmoid(alpha · g) · (u + shift). The first two factors are silu(alpha · g) / alpha."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if turns else gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    up = up + shift if shift else up
    return liger.swiglu(gate, up, gate_multiplier=alpha, down_multiplier=1.0 / alpha)


def register_experts() -> None:
    """Make ``"liger"`` a name of transformers' experts interface, in this process.

    Then ``from_pretrained(..., experts_implementation="liger")`` and ``model.set_experts_implementation("liger")`` run
    `fused_moe`, in models whose experts were proved to be that op. Other models raise ValueError with the reason.

    ``apply(model, experts=True)`` does the same for one model, leaves other experts unchanged, and can be undone. Use it with
    transformers 5.2, whose interface takes only its own names.
    """
    interface: Any = ALL_EXPERTS_FUNCTIONS
    interface.register("liger", experts_forward)


def experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """A function of the experts interface: `fused_moe`, for a module that was proved to be that op.

    Raises:
        ValueError: the module is another op; the message says why.
    """
    swap: Any = experts(self)
    if not isinstance(swap, type):
        raise ValueError(
            f"liger_transformers: {type(self).__name__} can't run fused_moe: {swap or 'it has no gate_up_proj and down_proj'}; "
            "model.set_experts_implementation('grouped_mm') is transformers' own"
        )
    y: Tensor | None = cast("Any", swap).fused(self, *args, **kwargs)
    return inspect.unwrap(original_class(type(self)).forward)(self, *args, **kwargs) if y is None else y
