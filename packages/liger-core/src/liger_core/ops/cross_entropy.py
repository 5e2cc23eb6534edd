"""Cross-entropy of logits and class labels."""

from typing import Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_core import checks
from liger_core.contract import op
from liger_core.ops.logit_statistics import LogitStatistics, statistics_of_logits

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """The result of a cross-entropy if more than the loss was requested. A field that wasn't requested is None.

    Attributes:
        loss: float32; a scalar, or ``[N]`` if `reduction` is ``"none"``. The only field with a gradient.
        z_loss: the part of `loss` that `lse_square_scale` adds, of the same dtype and shape.
        token_accuracy: float32; the share of the rows that count whose largest logit is the label's; 0 if none counts.
            If `reduction` is ``"none"``, ``[N]`` of 0 and 1.
        predicted_tokens: int64 ``[N]``; the position of the row's largest logit, the first one if several are equal. -1 for an
            ignored row.
    """

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None


class CrossEntropyOptions(TypedDict, total=False):
    """The options of `cross_entropy` that don't decide what it returns."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None
    reduction: str


class CrossEntropyCall:
    """How `cross_entropy` is called, for type checkers: the flags decide what it returns."""

    @overload
    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        return_z_loss: Literal[False] = False,
        return_token_accuracy: Literal[False] = False,
        return_predicted_tokens: Literal[False] = False,
        **options: Unpack[CrossEntropyOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        return_z_loss: Literal[True],
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[CrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        return_token_accuracy: Literal[True],
        return_z_loss: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[CrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        return_predicted_tokens: Literal[True],
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        **options: Unpack[CrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[CrossEntropyOptions],
    ) -> Tensor | CrossEntropyOutput: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Exists for type checkers only: there are no instances."""
        raise NotImplementedError


@op(
    differentiable=("logits",),
    result=CrossEntropyOutput,
    grad_results=("loss",),
    overloads=CrossEntropyCall,
    dimensions="logits: n V, target: n, weight: V -> n, n, n, n",
)
def cross_entropy(
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
) -> Tensor | CrossEntropyOutput:
    """Cross-entropy of each row's label under softmax(logits), in float32.

    With x = logits, or softcap · tanh(logits / softcap), lse = log Σ exp x, s = label_smoothing, w = weight (or ones)
    and y = target, a row's loss is w_y (lse − x_y)(1 − s) + (s / V)(lse Σw − Σ w·x) + lse_square_scale · lse².

    A row whose label is `ignore_index` has loss 0 and gradient 0, whatever its logits. A row whose label is neither
    that nor in [0, V) has loss NaN and gradient NaN.

    Args:
        logits: ``[N, V]``; float32, bfloat16 or float16.
        target: int64 ``[N]``, the labels.
        weight: ``[V]``, a weight per class, or None. An infinite weight makes everything that it enters infinite or NaN.
        ignore_index: the label of rows that don't count.
        label_smoothing: probability given to the uniform distribution; 0 to 1.
        lse_square_scale: coefficient of the z-loss, lse². It is not weighted by class.
        softcap: bound of the logits' magnitude, or None.
        reduction: ``"mean"`` divides by the number of rows that count or, if `weight` is given, by the sum of their labels'
            weights. The z-loss is always divided by the number of rows. If no row counts, the mean is 0. ``"sum"`` adds up.
            ``"none"`` gives a loss per row.
        return_z_loss: also return the z-loss.
        return_token_accuracy: also return the accuracy.
        return_predicted_tokens: also return the argmax of `logits`.

    Returns:
        The loss, or a `CrossEntropyOutput` if any `return_*` flag is set.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, or tensors on different devices.
        IndexError: a label out of range, on the CPU.

    Source:
        torch.nn.functional.cross_entropy. z-loss: Chowdhery et al., PaLM, arXiv 2204.02311. softcap: Gemma 2,
        arXiv 2408.00118.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([1, -100]))
    tensor(0.6931)
    """
    return loss_of_logits(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        reduction=reduction,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        token_scaling=False,
    )


def loss_of_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    token_scaling: bool,
) -> Tensor | CrossEntropyOutput:
    """The reference of `cross_entropy` and, with `token_scaling`, of `fused_linear_cross_entropy`."""
    statistics = statistics_of_logits(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        softcap=softcap,
        return_total=bool(label_smoothing),
        return_best=True,
    )
    return loss_of_statistics(
        statistics,
        target,
        weight,
        vocabulary=logits.shape[-1],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        reduction=reduction,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        token_scaling=token_scaling,
    )


def loss_of_statistics(
    statistics: LogitStatistics,
    target: Tensor,
    weight: Tensor | None,
    *,
    vocabulary: int,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    token_scaling: bool,
) -> Tensor | CrossEntropyOutput:
    """A cross-entropy from the statistics of its rows, which may have been joined from shards of the vocabulary.

    Args:
        statistics: those of the whole vocabulary; with `total` if `label_smoothing` isn't 0, with `best_index` if the
            accuracy or the predicted tokens are requested.
        target: int64 ``[N]``, the labels.
        weight: ``[V]``, a weight per class of the whole vocabulary, or None.
        vocabulary: V.
        ignore_index, label_smoothing, lse_square_scale, reduction: as in `cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as in `cross_entropy`.
        token_scaling: as in `fused_linear_cross_entropy`.
    """
    counted = target != ignore_index
    in_range = (target >= 0) & (target < vocabulary)
    rows = counted.sum()
    lse = statistics.lse * torch.ones_like(statistics.lse).masked_fill(counted & ~in_range, torch.nan)
    nll = lse - statistics.picked

    class_weight = lse.new_ones(vocabulary) if weight is None else weight.detach().to(lse.dtype)
    label_weight = class_weight[target.clamp(0, vocabulary - 1)].masked_fill(~(counted & in_range), 0.0)
    divisor = rows.clamp(min=1) if weight is None else torch.where(rows > 0, label_weight.sum(), 1.0)
    loss = (1 - label_smoothing) * label_weight * nll
    if statistics.total is not None:
        loss = loss + label_smoothing / vocabulary * (lse * class_weight.sum() - statistics.total)
    z_loss = lse_square_scale * lse.square()
    if token_scaling:
        probability = torch.exp(-nll.detach())
        loss, z_loss = loss * probability, z_loss * probability

    loss, z_loss = loss.masked_fill(~counted, 0.0), z_loss.masked_fill(~counted, 0.0)
    accuracy = None
    if return_token_accuracy:
        accuracy = (counted & (statistics.best_index == target)).to(loss.dtype)
        if reduction != "none":
            accuracy = accuracy.sum() / rows.clamp(min=1)
    if reduction == "mean":
        loss, z_loss = loss.sum() / divisor, z_loss.sum() / rows.clamp(min=1)
    elif reduction == "sum":
        loss, z_loss = loss.sum(), z_loss.sum()
    loss = loss + z_loss
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss
    return CrossEntropyOutput(
        loss,
        z_loss.detach() if return_z_loss else None,
        accuracy,
        statistics.best_index if return_predicted_tokens else None,
    )


@cross_entropy.checks
def _(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> None:
    checks.floating("cross_entropy", logits=logits, weight=weight)
    checks.ndim("cross_entropy", 2, 2, logits=logits)
    check_labels("cross_entropy", target, logits.shape[0], "a label per row of logits")
    checks.shape("cross_entropy", "weight", weight, logits.shape[1:], "a weight per column of logits")
    if logits.shape[1] == 0:
        raise ValueError(f"cross_entropy: logits has shape {tuple(logits.shape)}; it takes at least one column")
    check_options("cross_entropy", **options)


def check_labels(op: str, labels: Tensor | None, rows: int, because: str, name: str = "target") -> None:
    """Labels, if given, are int64 ``[rows]``."""
    checks.dtypes(op, (torch.int64,), **{name: labels})
    checks.shape(op, name, labels, (rows,), because)


def check_options(
    op: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
) -> None:
    """The options of a cross-entropy are of their types and in their ranges."""
    checks.label(op, ignore_index=ignore_index)
    checks.number(op, least=0, label_smoothing=label_smoothing)
    if label_smoothing > 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing!r}; it takes a number from 0 to 1")
    checks.number(op, lse_square_scale=lse_square_scale)
    if softcap is not None:
        checks.number(op, above=0, softcap=softcap)
    checks.one_of(op, REDUCTIONS, reduction=reduction)
    checks.flag(
        op,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )


@cross_entropy.checks_values
def _(logits: Tensor, target: Tensor, ignore_index: int, **others: Any) -> None:
    checks.indices_below("cross_entropy", "target", target, logits.shape[1], ignore_index)
