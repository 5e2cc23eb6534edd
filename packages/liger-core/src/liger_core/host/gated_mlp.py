"""`gated_mlp` by PyTorch's matrix products and a language's activation kernels: what is made when, and what is kept.

Without a memory budget the two branches are kept, and backward makes the activation again from them. With a budget, or in
activation checkpointing, only x is kept. Forward then goes by rows, whose results are final. Backward goes by columns of the
branches or by rows, whichever reads and writes less: each column's weight gradients are final, and x's gradient is a float32
sum; each row's gradient of x is final, and the weights' gradients are float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.budget import MOST_CHUNKS
from liger_core.contract import Needs, Saved, SavedEarly, compiling
from liger_core.custom_op import opaque
from liger_core.host.linear import Linear
from liger_core.ops.gated_mlp import accumulator_memory, whole_memory


class GatedActivation(NamedTuple):
    """A language's `swiglu` or `geglu`.

    Attributes:
        forward: takes `needs`, gate and up.
        backward: takes `needs`, gate and up as saved, and the gradient of the product.
    """

    forward: Callable[..., tuple[Tensor, Saved]]
    backward: Callable[..., tuple[Tensor | None, ...]]


class GatedMLPWeights(NamedTuple):
    """``[C, H]``, ``[C, H]`` and ``[O, C]``."""

    gate: Tensor
    up: Tensor
    down: Tensor


class GatedMLPGrads(NamedTuple):
    """Memory for the gradients of x and of the three weights; None for those that aren't made, or not there."""

    x: Tensor | None
    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None


class GatedMLP:
    """The op in a language.

    Args:
        linear: the language's products.
        silu: its `swiglu`: the kernel's module, or its two functions.
        gelu_tanh: its `geglu`, in the same way.
    """

    def __init__(self, linear: Linear, silu: GatedActivation, gelu_tanh: GatedActivation) -> None:
        self.linear = linear
        self.activations = {"silu": silu, "gelu_tanh": gelu_tanh}
        module = silu.forward.__module__
        self.go = opaque(writes=("y",), within=module)(self._go)
        self.go_back = opaque(writes=("grads",), within=module)(self._go_back)

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
        shape = (*x.shape[:-1], down_weight.shape[0])
        rows = x.reshape(-1, x.shape[-1])
        if memory_budget is None or whole_memory(x, gate_weight, grad) <= memory_budget:
            options = _options(activation, gate_multiplier, down_multiplier)
            act = self.activations[activation].forward
            gate, up = torch.mm(rows, gate_weight.t()), torch.mm(rows, up_weight.t())
            y = torch.mm(act((False, False), gate, up, **options)[0], down_weight.t()).view(shape)
            if not grad:
                return y, ()
            saved_x = x if needs[1] or needs[2] else None
            return y, (saved_x, gate_weight, up_weight, down_weight, gate, up)
        y = torch.empty((rows.shape[0], shape[-1]), dtype=x.dtype, device=x.device)
        most = max(1, memory_budget // (3 * gate_weight.shape[0] * x.dtype.itemsize))
        weights = GatedMLPWeights(gate_weight, up_weight, down_weight)
        self.go(y, rows, weights, activation, float(gate_multiplier), float(down_multiplier), most)
        return y.view(shape), (x, *weights, None, None) if grad else ()

    def _go(
        self,
        y: Tensor,
        rows: Tensor,
        weights: GatedMLPWeights,
        activation: str,
        gate_multiplier: float,
        down_multiplier: float,
        most: int,
    ) -> None:
        """Write y, in chunks of at most so many rows. It is one custom op in a trace, as a `LinearLossPass` is."""
        options = _options(activation, gate_multiplier, down_multiplier)
        act = self.activations[activation].forward
        gate_weight, up_weight, down_weight = weights
        for first, last in self.linear.chunks(rows.shape[0], most):
            x_chunk = rows[first:last]
            gate, up = torch.mm(x_chunk, gate_weight.t()), torch.mm(x_chunk, up_weight.t())
            product = act((False, False), gate, up, **options)[0]
            torch.mm(product, down_weight.t(), out=y[first:last])
            del gate, up, product  # freed before the next rows' are made

    def saves_early(
        self,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        *,
        activation: str = "silu",
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
        memory_budget: int | None = None,
    ) -> SavedEarly:
        """In checkpointing x is enough: what would make the branches again there makes them in backward."""
        shape = (*x.shape[:-1], down_weight.shape[0])
        return SavedEarly((x, gate_weight, up_weight, down_weight, None, None), shape)

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
        x, *_, gate, up = saved
        weights = GatedMLPWeights(*saved[1:4])
        dys = dy.reshape(-1, dy.shape[-1])
        rows: Any = None if x is None else x.reshape(-1, x.shape[-1])
        if gate is not None or memory_budget is None or whole_memory(rows, weights[0], grad=True) <= memory_budget:
            grads = GatedMLPGrads(None, *_memory(needs, weights, weights.gate.dtype))
            options = _options(activation, gate_multiplier, down_multiplier)
            run = GatedMLPBackward(
                self.linear, self.activations[activation], options, needs[0], grads, rows, weights, dys
            )
            grads = grads._replace(x=run.at_once(gate, up))
        else:
            by_rows, most = _way(self.linear, needs, rows, weights, memory_budget)
            wide = torch.float32
            of_x, of_weights = (rows.dtype, wide) if by_rows else (wide, rows.dtype)
            dx = rows.new_empty(rows.shape, dtype=of_x) if needs[0] else None
            grads = GatedMLPGrads(dx, *_memory(needs, weights, of_weights))
            multipliers = float(gate_multiplier), float(down_multiplier)
            self.go_back(grads, rows, weights, dys, activation, *multipliers, by_rows, most)
        dx, *dweights = (None if each is None else each.to(dy.dtype) for each in grads)
        return None if dx is None else dx.view((*dy.shape[:-1], weights.gate.shape[1])), *dweights

    def _go_back(
        self,
        grads: GatedMLPGrads,
        rows: Tensor,
        weights: GatedMLPWeights,
        dys: Tensor,
        activation: str,
        gate_multiplier: float,
        down_multiplier: float,
        by_rows: bool,
        most: int,
    ) -> None:
        """Write the gradients, in chunks of at most so many rows, or else columns. As `_go`."""
        options = _options(activation, gate_multiplier, down_multiplier)
        wants_x = grads.x is not None
        run = GatedMLPBackward(self.linear, self.activations[activation], options, wants_x, grads, rows, weights, dys)
        (run.by_rows if by_rows else run.by_columns)(most)


def _memory(needs: Needs, weights: GatedMLPWeights, dtype: torch.dtype) -> list[Tensor | None]:
    """Memory for the gradients of weights."""
    needed_by_weight = zip(weights, needs[1:], strict=True)
    return [weight.new_empty(weight.shape, dtype=dtype) if needed else None for weight, needed in needed_by_weight]


def _options(activation: str, gate_multiplier: float, down_multiplier: float) -> dict[str, Any]:
    if activation != "silu":
        return {}
    return {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}


def _way(linear: Linear, needs: Needs, rows: Any, weights: Sequence[Tensor], memory_budget: int) -> tuple[bool, int]:
    """Whether backward goes by rows, and of how many rows or columns a chunk has room: the way that moves less for its sums."""
    (count, hidden), inner, size = rows.shape, weights[0].shape[0], rows.dtype.itemsize
    most = max(1, (memory_budget - accumulator_memory(rows, needs[0])) // (5 * count * size))
    sums = 4 * sum(weight.numel() for weight, needed in zip(weights, needs[1:], strict=True) if needed)
    most_rows = (memory_budget - (0 if rows.dtype is torch.float32 else sums)) // (5 * inner * size)
    if most_rows < 1 or linear.takes_memory(rows, torch.float32):
        return False, most
    # A chunk of columns has two products, each of which reads x's sum and writes it.
    moved = -(-inner // most) * (8 * count * hidden if needs[0] else 0)
    chunks = -(-count // most_rows)
    by_rows = chunks * sums < moved and chunks <= MOST_CHUNKS
    return by_rows, most_rows if by_rows else most


class GatedMLPBackward:
    """The gradients, from all rows and columns of the branches at once or in chunks.

    Attributes:
        grads: memory for those that are wanted, by "x", "gate", "up" and "down"; "x" only for chunks.
    """

    def __init__(
        self,
        linear: Linear,
        activation: GatedActivation,
        options: dict[str, Any],
        needs_x: bool,
        grads: GatedMLPGrads,
        rows: Any,
        weights: GatedMLPWeights,
        dys: Tensor,
    ) -> None:
        self.linear, self.activation, self.options = linear, activation, options
        self.rows, self.weights, self.dys, self.needs_x = rows, weights, dys, needs_x
        self.grads = {name: memory for name, memory in grads._asdict().items() if memory is not None}
        self.branches = needs_x or "gate" in self.grads, needs_x or "up" in self.grads

    def at_once(self, gate: Tensor | None, up: Tensor | None) -> Tensor | None:
        """x's gradient. Branches that weren't kept are made."""
        gate_weight, up_weight, _ = self.weights
        if gate is None or up is None:
            gate, up = torch.mm(self.rows, gate_weight.t()), torch.mm(self.rows, up_weight.t())
        both = self._columns(slice(0, gate_weight.shape[0]), gate, up)
        return torch.mm(both[0], gate_weight).addmm_(both[1], up_weight) if self.needs_x else None

    def by_columns(self, most: int) -> None:
        """x's gradient is a float32 sum. Each column's gradients of weights are made in one piece."""
        gate_weight, up_weight, _ = self.weights
        dx = self.grads.get("x")
        for first, last in self.linear.chunks(gate_weight.shape[0], most):
            columns = slice(first, last)
            gate, up = torch.mm(self.rows, gate_weight[columns].t()), torch.mm(self.rows, up_weight[columns].t())
            both = self._columns(columns, gate, up)
            del gate, up  # frees their memory for the products
            if dx is not None:
                self.linear.add_product(dx, both[0].t(), gate_weight[columns], dx.dtype, adds=first > 0)
                self.linear.add_product(dx, both[1].t(), up_weight[columns], dx.dtype)
            del both  # freed before the next columns' are made

    def by_rows(self, most: int) -> None:
        """x's gradient is made of each row in one piece. The gradients of weights are float32 sums."""
        gate_weight, up_weight, down_weight = self.weights
        dx = self.grads.get("x")
        for first, last in self.linear.chunks(self.rows.shape[0], most):
            rows, dys = self.rows[first:last], self.dys[first:last]
            gate, up = torch.mm(rows, gate_weight.t()), torch.mm(rows, up_weight.t())
            if "down" in self.grads:
                product = self._product(gate, up)
                self._add("down", dys, product, first > 0)
                del product
            both: Any = None, None
            if True in self.branches:
                both = self._branches(gate, up, torch.mm(dys, down_weight))
            del gate, up  # as in `by_columns`
            self._add("gate", both[0], rows, first > 0)
            self._add("up", both[1], rows, first > 0)
            if dx is not None:
                torch.mm(both[0], gate_weight, out=dx[first:last]).addmm_(both[1], up_weight)
            del both

    def _columns(self, columns: slice, gate: Tensor, up: Tensor) -> tuple[Any, Any]:
        """Write these columns of the weights' gradients, and return those of gate and up; None for one that isn't needed."""
        if "down" in self.grads:
            product = self._product(gate, up)
            if compiling():  # Dynamo takes no `out` with gaps
                self.grads["down"][:, columns] = torch.mm(self.dys.t(), product)
            else:
                torch.mm(self.dys.t(), product, out=self.grads["down"][:, columns])
            del product
        if True not in self.branches:
            return None, None
        both = self._branches(gate, up, torch.mm(self.dys, self.weights[2][:, columns]))
        for name, gradient in zip(("gate", "up"), both, strict=True):
            if name in self.grads:
                torch.mm(gradient.t(), self.rows, out=self.grads[name][columns])
        return both

    def _product(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation.forward((False, False), gate, up, **self.options)[0]

    def _branches(self, gate: Tensor, up: Tensor, dproduct: Tensor) -> tuple[Any, Any]:
        both: Any = self.activation.backward(self.branches, (gate, up), dproduct, **self.options)
        return both

    def _add(self, name: str, a: Any, b: Tensor, adds: bool) -> None:
        """Add aᵀ b to a weight's gradient, if it is wanted, or else write it."""
        if name in self.grads:
            total = self.grads[name]
            self.linear.add_product(total, a, b, total.dtype, adds)
