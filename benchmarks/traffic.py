"""The least work of each op: what a speed is measured against.

Bytes are given as the tensors that have to cross the device's memory, and how often: a kernel that reads x once and
writes a result of its size moves x twice. Tensors of one row, and tables shared by all heads, are left out. A linear
layer with a loss is bound by its matrix products, which are given instead.

The counts of the backward are those beyond the forward's; what a backward has to read again, because it fits in no
cache, is counted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

Passes = Mapping[str, int]
"""Argument, or ``result``, to the number of times that as many bytes as it has are read or written."""

FORWARD, FULL = "forward", "forward+backward"
MODES = (FORWARD, FULL)


class Moves(NamedTuple):
    """The memory traffic of an op."""

    forward: Passes
    backward: Passes


class Product(NamedTuple):
    """A matrix product x[N, H] · weight[V, H]ᵀ, of 2·N·H·V operations, and how often one of its size is computed.

    A `grouped` one has a weight[E, V, H], and `x` names the experts of N rows, each of which takes one.
    """

    x: str
    weight: str
    forward: int
    backward: int
    grouped: bool = False


MOVES = {
    "attn_res": Moves({"blocks": 1, "partial": 1, "result": 1}, {"blocks": 2, "partial": 2, "result": 1}),
    "cross_entropy": Moves({"logits": 1}, {"logits": 2}),
    "distillation": Moves({"student_logits": 1, "teacher_logits": 1}, {"student_logits": 2, "teacher_logits": 1}),
    "dyt": Moves({"x": 2}, {"x": 3}),
    "embedding": Moves({"result": 2}, {"result": 1, "weight": 1}),
    "fused_add_rms_norm": Moves({"x": 4}, {"x": 4}),
    "fused_neighborhood_attention": Moves({"q": 2, "k": 1, "v": 1}, {"q": 4, "k": 2, "v": 2}),
    "geglu": Moves({"gate": 3}, {"gate": 5}),
    "group_norm": Moves({"x": 2}, {"x": 3}),
    "grpo_loss": Moves({"logits": 1}, {"logits": 2}),
    "jsd": Moves({"student_logprobs": 1, "teacher_logprobs": 1}, {"student_logprobs": 1}),
    "kl_div": Moves({"log_pred": 1, "target": 1}, {"log_pred": 1}),
    "layer_norm": Moves({"x": 2}, {"x": 3}),
    "llama4_rope": Moves({"q": 2, "k": 2}, {"q": 2, "k": 2}),
    "logit_statistics": Moves({"logits": 1}, {"logits": 2}),
    "mhc_post": Moves({"x": 1, "f": 1, "result": 1}, {"x": 2, "f": 2, "result": 1}),
    "mhc_pre": Moves({"x": 1, "result": 1}, {"x": 2, "result": 1}),
    "modulated_rms_norm": Moves({"x": 2}, {"x": 3}),
    "poly_norm": Moves({"x": 2}, {"x": 3}),
    "qwen2vl_mrope": Moves({"q": 2, "k": 2}, {"q": 2, "k": 2}),
    "relu_squared": Moves({"x": 2}, {"x": 3}),
    "rms_norm": Moves({"x": 2}, {"x": 3}),
    "rope": Moves({"q": 2, "k": 2}, {"q": 2, "k": 2}),
    "softmax": Moves({"x": 2}, {"x": 3}),
    "sparsemax": Moves({"x": 2}, {"x": 3}),
    "swiglu": Moves({"gate": 3}, {"gate": 5}),
    "tvd": Moves({"p": 1, "q": 1}, {"p": 1}),
}

PRODUCTS = {
    "fused_linear_cross_entropy": (Product("x", "linear_weight", 1, 2),),
    "fused_linear_kl_div": (Product("x", "linear_weight", 1, 2),),
    "fused_linear_logit_statistics": (Product("x", "linear_weight", 1, 3),),
    "fused_moe": (
        Product("expert_indices", "gate_up_weight", 1, 2, grouped=True),
        Product("expert_indices", "down_weight", 1, 2, grouped=True),
    ),
    "fused_linear_distillation": (
        Product("student_x", "student_weight", 1, 2),
        Product("teacher_x", "teacher_weight", 1, 0),
    ),
    "gated_mlp": (
        Product("x", "gate_weight", 1, 2),
        Product("x", "up_weight", 1, 2),
        Product("result", "gate_weight", 1, 2),
    ),
    "fused_linear_jsd": (Product("student_x", "student_weight", 1, 2), Product("teacher_x", "teacher_weight", 1, 0)),
}


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
        KeyError: the op isn't declared in this file.
    """
    if op not in MOVES and op not in PRODUCTS:
        raise KeyError(
            f"{op} has no entry in benchmarks/traffic.py: add the bytes that it has to move, or its products"
        )
    moved = flops = None
    if op in MOVES:
        moves = MOVES[op]
        moved = _bytes(moves.forward, tensors) + (_bytes(moves.backward, tensors) if mode == FULL else 0)
    if op in PRODUCTS:
        flops = sum(_flops(product, mode, tensors) for product in PRODUCTS[op])
    return Work(moved, flops)


def _flops(product: Product, mode: str, tensors: Mapping[str, object]) -> int:
    x, weight = _tensor(tensors, product.x), _tensor(tensors, product.weight)
    one = 2 * x.numel() * (weight[0].numel() if product.grouped else weight.shape[0])
    return one * (product.forward + (product.backward if mode == FULL else 0))


def _bytes(passes: Passes, tensors: Mapping[str, object]) -> int:
    return sum(times * _tensor(tensors, name).nbytes for name, times in passes.items())


def _tensor(tensors: Mapping[str, object], name: str) -> Tensor:
    tensor = tensors[name]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"benchmarks/traffic.py counts {name}, which is {tensor!r} in this call, not a tensor")
    return tensor
