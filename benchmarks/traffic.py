"""The least work of each op: what a speed is measured against.

An op is bound by the bytes that have to cross the device's memory, or, as a linear layer with a loss is, by its matrix
products. Its case file says which: `MOVES`, or `PRODUCTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from liger_conformance.case import Passes, Product, cases_of
from liger_core.op import Op

FORWARD, FULL = "forward", "forward+backward"
MODES = (FORWARD, FULL)


def modes_of(op: Op[..., Any]) -> tuple[str, ...]:
    """The modes in which an op is timed: one without gradients has no backward."""
    return MODES if op.differentiable else (FORWARD,)


class Work(NamedTuple):
    """The least work of one call: bytes moved, and floating-point operations. None where it isn't what bounds the op."""

    bytes: int | None
    flops: int | None

    def rates(self, seconds: float) -> dict[str, float]:
        """``GB/s`` and ``TFLOP/s`` (decimal) that a time amounts to, those that apply."""
        rates = {}
        if self.bytes is not None:
            rates["GB/s"] = self.bytes / seconds / 1e9
        if self.flops is not None:
            rates["TFLOP/s"] = self.flops / seconds / 1e12
        return rates


def work_of(op: str, mode: str, tensors: Mapping[str, object]) -> Work:
    """The least work of a call.

    Args:
        op: the op's name.
        mode: one of `MODES`.
        tensors: the call's arguments by name, and the first tensor that it returns as ``result``.

    Raises:
        TypeError: what the op's case file counts isn't a tensor in this call.
    """
    cases = cases_of(op)
    moved = flops = None
    if moves := cases.moves:
        moved = _bytes(moves.forward, tensors) + (_bytes(moves.backward, tensors) if mode == FULL else 0)
    if products := cases.products:
        flops = sum(_flops(product, mode, tensors) for product in products)
    return Work(moved, flops)


def _flops(product: Product, mode: str, tensors: Mapping[str, object]) -> int:
    x, weight = _tensor(tensors, product.x), _tensor(tensors, product.weight)
    one = 2 * x.numel() * (weight[0].numel() if product.grouped else weight.shape[0])
    return one * (product.forward + (product.backward if mode == FULL else 0))


def _bytes(passes: Passes, tensors: Mapping[str, object]) -> int:
    return int(sum(times * _tensor(tensors, name).nbytes for name, times in passes.items()))


def _tensor(tensors: Mapping[str, object], name: str) -> Tensor:
    tensor = tensors[name]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"the work is counted by {name}, which is {tensor!r} in this call, not a tensor")
    return tensor
