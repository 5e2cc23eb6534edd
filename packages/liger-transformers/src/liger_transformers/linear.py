"""Several heads' scaled logits as one linear layer, and its cross-entropy with the options that a model's loss has."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

import liger_core as liger

OTHER_VALUE: dict[str, Any] = {"lse_square_scale": 0.0, "token_scaling": False}
"""Options that make another loss, with the values that don't."""

LOSS_OPTIONS = (*OTHER_VALUE, "accum_dtype", "memory_budget")
"""Options of `fused_linear_cross_entropy` that a model's loss may have."""


class _Loss(threading.local):
    """The options of the loss in the thread that runs a model's forward, and whether a fused loss has had them."""

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}
        self.taken = False


model_loss = _Loss()


@contextmanager
def loss_options(options: Mapping[str, Any]) -> Generator[None, None, None]:
    """A context in which cross-entropies of deferred logits have these options.

    RuntimeError: there was none, and the options make another loss.
    """
    before = model_loss.options, model_loss.taken
    model_loss.options, model_loss.taken = options, False
    try:
        yield
        lost = [name for name in options if name in OTHER_VALUE]
        if lost and not model_loss.taken:
            raise RuntimeError(
                f"liger_transformers: the loss lacks {', '.join(lost)}, since the head's logits were made, as by "
                "skip_logits=False, a hook on the head or DoRA. Avoid that, or leave the option out of apply's loss"
            )
    finally:
        model_loss.options, model_loss.taken = before


def as_called(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias as F.linear takes them now: in an autocast region in its dtype; x contiguous, as the output is."""
    kind = x.device.type
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    return x.contiguous(), weight, bias


def one_linear(
    terms: list[tuple[Tensor, Tensor, Tensor | None, float]], outer: float | None
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """x, weight, bias, softcap and temperature of outer · tanh(Σ scaleᵢ · (xᵢ Wᵢᵀ + bᵢ)), or of the sum alone if `outer` is None.

    z = softcap · tanh((x Wᵀ + b) / softcap) / temperature; or the same without the softcap. A scale of all terms goes into these
    two numbers, and x stays unchanged.
    """
    scale = terms[0][3]
    one = all(own == scale for *_, own in terms)
    scale, tail = scale if one else 1.0, 1.0 if outer is None else outer
    xs: list[Tensor] = []
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for x, weight, bias, own in terms:
        factor = math.copysign(1.0, scale * tail) * (1.0 if one else own)
        if factor != 1.0:  # (s · x) Wᵀ = s · (x Wᵀ)
            x, bias = x * factor, bias if bias is None else bias * factor
        xs.append(x.reshape(-1, x.shape[-1]))
        weights.append(weight)
        biases += [] if bias is None else [bias]
    # Several linears are one with more columns: Σ xᵢ Wᵢᵀ = [x₁ x₂ …] [W₁ W₂ …]ᵀ.
    x, weight = (xs[0], weights[0]) if len(xs) == 1 else (torch.cat(xs, -1), torch.cat(weights, -1))
    how = {"softcap": None if outer is None else 1.0 / abs(scale), "temperature": 1.0 / abs(scale * tail)}
    return x, weight, functools.reduce(torch.add, biases) if biases else None, how


def cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    softcap: float | None,
    temperature: float,
    **how: Any,
) -> Tensor:
    """`fused_linear_cross_entropy`, which has no temperature: a scale of the logits becomes one of x."""
    if temperature != 1.0:
        x, bias = x * (1.0 / temperature), bias if bias is None else bias * (1.0 / temperature)
        softcap = softcap if softcap is None else softcap / temperature
    model_loss.taken = True
    how = {**how, **model_loss.options}
    return cast("Any", liger.fused_linear_cross_entropy)(x, weight, target, bias, softcap=softcap, **how)


def takes(target: Any, weight: Tensor | None, rows: torch.Size) -> bool:
    """Whether the op takes this target and these class weights."""
    ids = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == rows and len(rows) == 1
    return bool(ids) and (weight is None or not weight.requires_grad)
