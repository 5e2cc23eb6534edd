"""Cross-entropy of rows of logits, for `cross_entropy` and `fused_linear_cross_entropy`: the host code, without kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.rows import Logits


class CrossEntropyKernelOptions(NamedTuple):
    """A call's options. Those of a row's loss that are off are None: a kernel is then compiled without them."""

    ignore_index: int
    label_smoothing: float | None
    lse_square_scale: float | None
    softcap: float | None
    reduction: str
    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool
    token_scaling: bool = False

    def adds_z_loss(self) -> bool:
        """Whether a row's loss includes its z-loss. Otherwise the two are summed apart first."""
        return self.reduction == "none" and self.lse_square_scale is not None


class CrossEntropyInputs(NamedTuple):
    """The inputs of the rows' losses, except their logits.

    Attributes:
        target: int64 ``[N]``, contiguous.
        weight: ``[V]``, contiguous, or None.
        weight_sum: the sum of `weight`, which label smoothing needs; float32, a scalar.
        bias: ``[V]``, contiguous, to add to the logits; or None.
        vocabulary: V.
        options: the options.
    """

    target: Tensor
    weight: Tensor | None
    weight_sum: Tensor | None
    bias: Tensor | None
    vocabulary: int
    options: CrossEntropyKernelOptions


class CrossEntropyResults(NamedTuple):
    """The results per row that `CrossEntropyKernels.rows` writes; None for those that aren't wanted.

    Attributes:
        losses: float32 ``[N]``; with reduction ``"none"`` they include the z-loss.
        z_losses: float32 ``[N]``.
        hits: float32 ``[N]``; 1 if the largest logit is the label's.
        predicted: int64 ``[N]``.
        statistics: float32 ``[S, N]``, which `CrossEntropyKernels.gradient` needs.
    """

    losses: Tensor
    z_losses: Tensor | None
    hits: Tensor | None
    predicted: Tensor | None
    statistics: Tensor | None


class CrossEntropyKernels:
    """A language's kernels of cross-entropy."""

    def statistics(self, options: CrossEntropyKernelOptions) -> int:
        """How many numbers per row `gradient` needs.

        Two are a row's maximum and the sum of its exponentials relative to that. With token scaling, the third is its label's
        probability.
        """
        return 3 if options.token_scaling else 2

    def rows(self, results: CrossEntropyResults, logits: Logits, inputs: CrossEntropyInputs, first: int) -> None:
        """Write the results of the rows from `first` on, as many as `logits` has. They may have any strides."""
        raise NotImplementedError

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        inputs: CrossEntropyInputs,
        statistics: Tensor,
        incoming: Any,
        first: int,
        first_column: int,
    ) -> None:
        """Write the gradient of the logits of the rows from `first` on, and of the columns from `first_column` on.

        Args:
            dlogits: to be written; `memory` is contiguous. It may be float32 for logits of another dtype.
            logits: None if `dlogits` holds them.
            labels: as `rows` got them.
            statistics: those of `rows`.
            incoming: what `incoming` returned.
            first: the first row.
            first_column: the first column.
        """
        raise NotImplementedError

    def incoming(self, dloss: Tensor | None, totals: Tensor | None, target: Tensor) -> Any:
        """The factors of `gradient`: here the gradient of the loss, and its divisor; None is 1.

        Args:
            dloss: a scalar or one number per row. None is 1, or in a mean the number of rows that count: the mean's own gradient
                underflows in float16.
            totals: what `totals` returned, or None if the loss is no mean.
            target: the labels.
        """
        return totals[0] if dloss is None and totals is not None else dloss, totals

    def sums(
        self,
        loss: Tensor | None,
        z_loss: Tensor | None,
        accuracy: Tensor | None,
        totals: Tensor | None,
        results: CrossEntropyResults | None,
        inputs: CrossEntropyInputs,
    ) -> None:
        """Write the sums, or means, of rows' results, and `totals`; those that are None are not wanted.

        If no row counts, both totals are 1.
        """
        raise NotImplementedError

    def totals(self, inputs: CrossEntropyInputs) -> Tensor:
        """The divisors of ``"mean"``: the number of rows that count, and the sum of their labels' weights; float32 ``[2]``."""
        totals = torch.empty(2, dtype=torch.float32, device=inputs.target.device)
        self.sums(None, None, None, totals, None, inputs)
        return totals

    def reduce(
        self,
        results: CrossEntropyResults,
        inputs: CrossEntropyInputs,
        totals: Tensor | None,
        return_z_loss: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The loss, z-loss and accuracy of all rows; and `totals`, if backward needs them."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=inputs.target.device)

        if totals is None and differentiable and inputs.options.reduction == "mean":
            totals = empty(2)
        loss = empty()
        z_loss = empty() if return_z_loss else None
        accuracy = None if results.hits is None else empty()
        self.sums(loss, z_loss, accuracy, totals, results, inputs)
        return loss, z_loss, accuracy, totals


def options_of(
    *, label_smoothing: float, lse_square_scale: float, softcap: float | None, **others: Any
) -> CrossEntropyKernelOptions:
    """A call's options, from those of the contract."""
    return CrossEntropyKernelOptions(
        label_smoothing=float(label_smoothing) or None,
        lse_square_scale=float(lse_square_scale) or None,
        softcap=None if softcap is None else float(softcap),
        **others,
    )


def inputs_of(
    target: Tensor, weight: Tensor | None, bias: Tensor | None, vocabulary: int, options: CrossEntropyKernelOptions
) -> CrossEntropyInputs:
    """The labels, from tensors with any strides."""
    weight = None if weight is None else weight.contiguous()
    smooth = weight is not None and options.label_smoothing is not None
    return CrossEntropyInputs(
        target.contiguous(),
        weight,
        weight.sum(dtype=torch.float32) if smooth and weight is not None else None,
        None if bias is None else bias.contiguous(),
        vocabulary,
        options,
    )


def new_results(kernels: CrossEntropyKernels, inputs: CrossEntropyInputs, differentiable: bool) -> CrossEntropyResults:
    """Memory for the results of all rows."""
    target, options = inputs.target, inputs.options
    n = target.shape[0]
    z_loss = options.return_z_loss or (options.lse_square_scale is not None and options.reduction != "none")

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=target.device)

    return CrossEntropyResults(
        empty(n),
        empty(n) if z_loss else None,
        empty(n) if options.return_token_accuracy else None,
        torch.empty_like(target) if options.return_predicted_tokens else None,
        empty(kernels.statistics(options), n) if differentiable else None,
    )


def result_of(
    kernels: CrossEntropyKernels,
    results: CrossEntropyResults,
    inputs: CrossEntropyInputs,
    totals: Tensor | None,
    differentiable: bool,
) -> tuple[Tensor | tuple[Tensor | None, ...], Tensor | None]:
    """The op's result, from the rows' results; and the totals, which are given, or made if backward needs them."""
    options = inputs.options
    loss, z_loss, accuracy = results.losses, results.z_losses, results.hits
    if options.reduction != "none":
        loss, z_loss, accuracy, totals = kernels.reduce(results, inputs, totals, options.return_z_loss, differentiable)
    if options.return_z_loss or options.return_token_accuracy or options.return_predicted_tokens:
        return (loss, z_loss, accuracy, results.predicted), totals
    return loss, totals


class CrossEntropy:
    """`cross_entropy` by a language's kernels: forward and backward read the logits once each, and never copy them."""

    def __init__(self, kernels: CrossEntropyKernels) -> None:
        self.kernels = kernels

    def forward(
        self, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Saved]:
        """The contract's forward."""
        (differentiable,) = needs
        inputs = inputs_of(target, weight, None, logits.shape[1], options_of(**options))
        results = new_results(self.kernels, inputs, differentiable)
        self.kernels.rows(results, Logits.of(logits), inputs, 0)
        result, totals = result_of(self.kernels, results, inputs, None, differentiable)
        if not differentiable:
            return result, ()
        return result, (logits, inputs.target, inputs.weight, inputs.weight_sum, results.statistics, totals)

    def backward(self, needs: Needs, saved: Saved, dloss: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        """The contract's backward."""
        logits, target, weight, weight_sum, statistics, totals = saved
        inputs = CrossEntropyInputs(target, weight, weight_sum, None, logits.shape[1], options_of(**options))
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        incoming = self.kernels.incoming(dloss, totals, target)
        self.kernels.gradient(Logits.of(dlogits), Logits.of(logits), inputs, statistics, incoming, 0, 0)
        return (dlogits,)
