"""Total variation distance."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast
from liger_core.ops.cross_entropy import check_labels
from liger_core.ops.kl_div import REDUCTIONS


@op(differentiable=("p",), dimensions="p: n v, q: n v, labels: n -> n v")
def tvd(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    """Total variation distance of each row of p from q, in float32: ½ Σ abs(p − q). The gradient is 0 where p = q.

    Args:
        p: ``[N, V]``, probabilities; float32, bfloat16 or float16. The only tensor that gets a gradient.
        q: ``[N, V]``, probabilities; float32, bfloat16 or float16; p may have another dtype.
        labels: int64 ``[N]``, or None. A row whose label is `ignore_index` doesn't count, whatever its values are: its
            gradient is 0. Other labels have no effect.
        reduction: ``"batchmean"`` divides the sum by the number C of rows that count, ``"mean"`` by C V. ``"sum"`` adds
            up. ``"none"`` gives every ½ abs(p − q).
        ignore_index: the label of rows that don't count.

    Returns:
        float32 scalar, 0 if no row counts; for ``"none"`` ``[N, V]`` in p's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an unknown `reduction`, an `ignore_index` of more than 64 bits, or
            tensors on different devices.

    Source:
        Wen et al., f-Divergence Minimization for Sequence-Level Knowledge Distillation, arXiv 2307.15190.

    >>> tvd(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.5000)
    """
    counted = torch.ones(p.shape[0], dtype=torch.bool, device=p.device) if labels is None else labels != ignore_index
    loss = (0.5 * (upcast(p) - upcast(q.detach())).abs()).masked_fill(~counted[:, None], 0.0)
    if reduction == "none":
        return loss.to(p.dtype)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (counted.sum() * (p.shape[1] if reduction == "mean" else 1)).clamp(min=1)


@tvd.checks
def _(p: Tensor, q: Tensor, labels: Tensor | None, reduction: str, ignore_index: int) -> None:
    checks.floating("tvd", p=p, q=q)
    checks.ndim("tvd", 2, 2, p=p)
    checks.shape("tvd", "q", q, p.shape, "p's shape")
    check_labels("tvd", labels, p.shape[0], "a label per row of p", "labels")
    checks.one_of("tvd", REDUCTIONS, reduction=reduction)
    checks.label("tvd", ignore_index=ignore_index)
