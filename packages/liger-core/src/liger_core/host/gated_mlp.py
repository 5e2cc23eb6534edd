"""`gated_mlp` by PyTorch's matrix products and a language's activation kernels: what is made when, and what is kept.

Without a memory budget the two branches are kept, and backward makes the activation again from them. With a budget only x is
kept. Forward then goes by rows, whose results are final. Backward goes by columns of the branches: each column's weight
gradients are final, and x's gradient is a float32 sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.linear import Linear
from liger_core.ops.gated_mlp import accumulator_memory, whole_memory


class Activation(NamedTuple):
    """A language's `swiglu` or `geglu`.

    Attributes:
        forward: takes `needs`, gate and up.
        backward: takes `needs`, gate and up as saved, and the gradient of the product.
    """

    forward: Callable[..., tuple[Tensor, Saved]]
    backward: Callable[..., tuple[Tensor | None, ...]]


class GatedMLP:
    """The op in a language.

    Args:
        linear: the language's products.
        silu: its `swiglu`.
        gelu_tanh: its `geglu`.
    """

    def __init__(self, linear: Linear, silu: Activation, gelu_tanh: Activation) -> None:
        self.linear = linear
        self.activations = {"silu": silu, "gelu_tanh": gelu_tanh}

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        *,
        activation: str = "silu",
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
        memory_budget: int | None = None,
    ) -> tuple[Tensor, Saved]:
        grad = True in needs
        options = _options(activation, gate_multiplier, down_multiplier)
        act = self.activations[activation].forward
        shape = (*x.shape[:-1], down_weight.shape[0])
        rows = x.reshape(-1, x.shape[-1])
        if memory_budget is None or whole_memory(x, gate_weight, grad) <= memory_budget:
            gate, up = torch.mm(rows, gate_weight.t()), torch.mm(rows, up_weight.t())
            y = torch.mm(act((False, False), gate, up, **options)[0], down_weight.t()).view(shape)
            if not grad:
                return y, ()
            kept = x if needs[1] or needs[2] else None
            return y, (kept, gate_weight, up_weight, down_weight, gate, up)
        y = torch.empty((rows.shape[0], shape[-1]), dtype=x.dtype, device=x.device)
        most = max(1, memory_budget // (3 * gate_weight.shape[0] * x.dtype.itemsize))
        for first, last in self.linear.chunks(rows.shape[0], most):
            some = rows[first:last]
            gate, up = torch.mm(some, gate_weight.t()), torch.mm(some, up_weight.t())
            product = act((False, False), gate, up, **options)[0]
            torch.mm(product, down_weight.t(), out=y[first:last])
            del gate, up, product  # freed before the next rows' are made
        return y.view(shape), (x, gate_weight, up_weight, down_weight, None, None) if grad else ()

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dy: Tensor,
        *,
        activation: str,
        gate_multiplier: float,
        down_multiplier: float,
        memory_budget: int | None,
    ) -> tuple[Tensor | None, ...]:
        x, gate_weight, up_weight, down_weight, gate, up = saved
        options = _options(activation, gate_multiplier, down_multiplier)
        dys = dy.reshape(-1, dy.shape[-1])
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        hidden, inner = gate_weight.shape[1], gate_weight.shape[0]
        gradients = _Gradients(self.activations[activation], options, needs, rows, dys)
        for name, weight in (("gate", gate_weight), ("up", up_weight), ("down", down_weight)):
            gradients.allocate(name, weight)
        dx = None
        if gate is not None:
            both = gradients.of(slice(0, inner), gate, up, down_weight)
            if needs[0]:
                dx = torch.mm(both[0], gate_weight).addmm_(both[1], up_weight)
        else:
            assert rows is not None
            assert memory_budget is not None
            room = memory_budget - accumulator_memory(rows, needs[0])
            most = max(1, room // (5 * rows.shape[0] * rows.dtype.itemsize))
            for first, last in self.linear.chunks(inner, most):
                some = slice(first, last)
                gate, up = torch.mm(rows, gate_weight[some].t()), torch.mm(rows, up_weight[some].t())
                both = gradients.of(some, gate, up, down_weight[:, some])
                del gate, up  # frees their memory for the products
                if needs[0]:
                    dx = self.linear.add_product(dx, both[0].t(), gate_weight[some], torch.float32)
                    dx = self.linear.add_product(dx, both[1].t(), up_weight[some], torch.float32)
                del both  # freed before the next columns' are made
        if dx is not None:
            dx = dx.to(dy.dtype).view((*dy.shape[:-1], hidden))
        return dx, gradients.made.get("gate"), gradients.made.get("up"), gradients.made.get("down")


def _options(activation: str, gate_multiplier: float, down_multiplier: float) -> dict[str, Any]:
    if activation != "silu":
        return {}
    return {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}


class _Gradients:
    """The gradients of weights, made for some columns of the branches after others."""

    def __init__(
        self,
        activation: Activation,
        options: dict[str, Any],
        needs: Needs,
        rows: Any,
        dys: Tensor,
    ) -> None:
        self.activation, self.options, self.rows, self.dys = activation, options, rows, dys
        self.needs_x, *wanted = needs
        self.wants: dict[str, bool] = dict(zip(("gate", "up", "down"), wanted, strict=True))
        self.made: dict[str, Tensor] = {}

    def allocate(self, name: str, weight: Tensor) -> None:
        """Allocate the gradient of a weight, if it is wanted."""
        if self.wants[name]:
            self.made[name] = torch.empty_like(weight, memory_format=torch.contiguous_format)

    def of(self, some: slice, gate: Tensor, up: Tensor, down_weight: Tensor) -> tuple[Any, Any]:
        """Write these columns of the weights' gradients, and return those of gate and up; None for one that isn't needed."""
        if self.wants["down"]:
            product = self.activation.forward((False, False), gate, up, **self.options)[0]
            torch.mm(self.dys.t(), product, out=self.made["down"][:, some])
            del product
        needs = self.needs_x or self.wants["gate"], self.needs_x or self.wants["up"]
        if True not in needs:
            return None, None
        both: tuple[Any, ...] = self.activation.backward(
            needs, (gate, up), torch.mm(self.dys, down_weight), **self.options
        )
        for name, gradient in zip(("gate", "up"), both, strict=True):
            if self.wants[name]:
                torch.mm(gradient.t(), self.rows, out=self.made[name][some])
        return both[0], both[1]
