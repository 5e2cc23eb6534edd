"""Cross-entropy: the logits are read once forward and once backward, and copied nowhere."""

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved, implements
from liger_core.ops.cross_entropy import cross_entropy
from liger_cutile.ops._cross_entropy import (
    new_rows,
    new_totals,
    options_of,
    reduce,
    run_gradient,
    run_rows,
    weight_sum_of,
)


@implements(cross_entropy)
def forward(
    needs: Needs,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor | tuple[Tensor | None, ...], Saved]:
    (differentiable,) = needs
    options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling=False)
    target = target.contiguous()
    weight = None if weight is None else weight.contiguous()
    weight_sum = weight_sum_of(weight, options)
    wanted = {
        "reduction": reduction,
        "return_z_loss": return_z_loss,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }
    rows = new_rows(target, options, differentiable=differentiable, **wanted)
    run_rows(rows, logits, target, weight, weight_sum, options, reduction)
    totals = new_totals(target) if differentiable and reduction == "mean" else None
    result = reduce(rows, target, weight, totals, logits.shape[1], options, **wanted)
    return result, (logits, target, weight, weight_sum, rows.statistics, totals) if differentiable else ()


def backward(
    needs: Needs,
    saved: Saved,
    dloss: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
) -> tuple[Tensor | None, ...]:
    logits, target, weight, weight_sum, statistics, totals = saved
    options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling=False)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    run_gradient(dlogits, logits, target, weight, weight_sum, statistics, dloss, totals, options)
    return (dlogits,)
