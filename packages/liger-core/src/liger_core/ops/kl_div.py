"""Kullback-Leibler divergence."""

from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast

REDUCTIONS = ("batchmean", "mean", "sum", "none")


@op(differentiable=("log_pred",), dimensions="log_pred: n v, target: n v -> n v")
def kl_div(
    log_pred: Tensor, target: Tensor, *, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """Kullback-Leibler divergence of predictions from a target, in float32: y (log max(y, eps) − log_pred).

    With `log_target`, target holds t = log y, and it is exp(t)(t − log_pred). A term with y = 0 is 0, whatever log_pred
    is.

    Args:
        log_pred: ``[N, V]``, log-probabilities; float32, bfloat16 or float16. The only tensor that gets a gradient.
        target: ``[N, V]``, probabilities, or their logarithms; float32, bfloat16 or float16; log_pred may have another one.
        reduction: ``"batchmean"`` divides the sum by N, ``"mean"`` by N V. ``"sum"`` adds up. ``"none"`` gives every term.
        log_target: whether target holds log-probabilities.
        eps: the least probability whose logarithm is taken; at least 0. Not used with `log_target`.

    Returns:
        float32 scalar, 0 if there are no rows; for ``"none"`` ``[N, V]`` in log_pred's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that differ, an unknown `reduction`, a negative `eps`, or tensors on different devices.

    Source:
        torch.nn.functional.kl_div.

    >>> import torch
    >>> kl_div(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """
    loss = terms_of(log_pred, target, log_target=log_target, eps=eps)
    if reduction == "none":
        return loss.to(log_pred.dtype)
    counts = {"batchmean": loss.shape[0], "mean": loss.numel(), "sum": 1}
    return loss.sum() / max(counts[reduction], 1)


def terms_of(log_pred: Tensor, target: Tensor, *, log_target: bool, eps: float) -> Tensor:
    """Every class's term of the divergence, in at least float32."""
    x, y = upcast(log_pred), upcast(target.detach())
    if log_target:
        y, log_y = y.exp(), y
    else:
        log_y = y.clamp(min=eps).log()
    return (y * (log_y - x)).masked_fill(y == 0, 0.0)


@kl_div.checks
def _(log_pred: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float) -> None:
    checks.floating("kl_div", log_pred=log_pred, target=target)
    checks.ndim("kl_div", 2, 2, log_pred=log_pred)
    checks.shape("kl_div", "target", target, log_pred.shape, "log_pred's shape")
    checks.one_of("kl_div", REDUCTIONS, reduction=reduction)
    checks.flag("kl_div", log_target=log_target)
    checks.number("kl_div", least=0, eps=eps)
