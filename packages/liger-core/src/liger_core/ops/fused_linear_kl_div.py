"""Kullback-Leibler divergence of a linear layer's predictions from given probabilities, without its logits."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.budget import check_accum_dtype, check_memory_budget
from liger_core.contract import op, upcast
from liger_core.ops.cross_entropy import check_labels
from liger_core.ops.kl_div import REDUCTIONS, terms_of


@op(
    differentiable=("x", "linear_weight", "bias"),
    autocast=("x", "linear_weight", "bias"),
    dimensions="x: n H, linear_weight: V H, target: n V, labels: n, bias: V -> n",
)
def fused_linear_kl_div(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    log_target: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    eps: float = 1e-10,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> Tensor:
    """`kl_div` of log_softmax((x @ linear_weightᵀ + bias) / temperature) from a target, summed over classes.

    It is for a teacher whose probabilities were kept. With q the softmax, a row's loss is Σ y (log max(y, eps) − log q). With
    `log_target`, target holds t = log y, and the loss is Σ exp(t)(t − log q). A term with y = 0 is 0. The target needn't add up
    to 1: the gradient of a logit is (q Σ y − y) / temperature.

    A kernel makes the N × V logits a chunk of rows at a time, and never copies the target. Logits are computed in x's dtype,
    the rest in float32. The gradients of linear_weight and bias are summed over rows in `accum_dtype` and float32, and rounded
    once. The target gets no gradient.

    Args:
        x: ``[N, H]``; float32, bfloat16 or float16.
        linear_weight: ``[V, H]``, in x's dtype.
        target: ``[N, V]``, probabilities, or their logarithms; float32, bfloat16 or float16; x may have another dtype.
        labels: int64 ``[N]``, or None: all rows count. A row whose label is `ignore_index` has loss 0 and gradient 0,
            whatever its target. Labels have no other effect.
        bias: ``[V]``, or None.
        log_target: whether target holds log-probabilities.
        temperature: the divisor of logits; greater than 0.
        softcap: a bound of the logits' magnitudes, softcap · tanh(logits / softcap) before the temperature; or None.
        eps: the least probability whose logarithm is taken; at least 0. Not used with `log_target`.
        reduction: ``"batchmean"`` divides the sum by the number of rows that count, ``"mean"`` by that times V, both by at
            least 1. ``"sum"`` adds up. ``"none"`` gives a loss per row.
        ignore_index: the label of rows that don't count.
        accum_dtype, memory_budget: as in `fused_linear_cross_entropy`.

    Returns:
        float32 scalar, 0 if no row counts; for ``"none"`` ``[N]``.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.

    Source:
        `kl_div`; chunks of rows: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> fused_linear_kl_div(torch.ones(1, 2), torch.zeros(2, 2), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """
    logits = x @ linear_weight.T
    z = upcast(logits if bias is None else logits + bias)
    ignored = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    if labels is not None:
        ignored = labels == ignore_index
    z, y = z.masked_fill(ignored[:, None], 0.0), target.masked_fill(ignored[:, None], 0.0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_q = (z / temperature).log_softmax(-1)
    losses = terms_of(log_q, y, log_target=log_target, eps=eps).sum(-1).masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = (~ignored).sum().clamp(min=1)
    return losses.sum() / (counted if reduction == "batchmean" else counted * linear_weight.shape[0])


@fused_linear_kl_div.checks
def _(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    labels: Tensor | None,
    bias: Tensor | None,
    log_target: bool,
    temperature: float,
    softcap: float | None,
    eps: float,
    reduction: str,
    ignore_index: int,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
) -> None:
    name = "fused_linear_kl_div"
    checks.floating(name, x=x, linear_weight=linear_weight, target=target, bias=bias)
    checks.ndim(name, 2, 2, x=x, linear_weight=linear_weight)
    checks.same_dtype(name, x=x, linear_weight=linear_weight)
    vocabulary, rows = linear_weight.shape[0], x.shape[0]
    if vocabulary == 0:
        raise ValueError(f"{name}: linear_weight has shape {tuple(linear_weight.shape)}; it takes at least one row")
    checks.shape(name, "linear_weight", linear_weight, (vocabulary, x.shape[1]), "x's last dimension")
    checks.shape(name, "target", target, (rows, vocabulary), "a row per row of x, a column per row of linear_weight")
    check_labels(name, labels, rows, "a label per row of x", "labels")
    checks.shape(name, "bias", bias, (vocabulary,), "linear_weight's first dimension")
    checks.flag(name, log_target=log_target)
    checks.number(name, above=0, temperature=temperature)
    if softcap is not None:
        checks.number(name, above=0, softcap=softcap)
    checks.number(name, least=0, eps=eps)
    checks.one_of(name, REDUCTIONS, reduction=reduction)
    checks.label(name, ignore_index=ignore_index)
    check_accum_dtype(name, accum_dtype)
    check_memory_budget(name, memory_budget, x, linear_weight, accum_dtype)
