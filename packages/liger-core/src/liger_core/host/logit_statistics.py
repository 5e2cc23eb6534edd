"""Statistics of rows of logits, for `logit_statistics` and `fused_linear_logit_statistics`: the host code, without kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.linear import chunks
from liger_core.host.rows import Logits
from liger_core.ops.logit_statistics import LogitStatistics


class StatisticsKernelOptions(NamedTuple):
    """The options of a row's statistics. An option that is off is None: a kernel is then compiled without it.

    `inverse` is that of the temperature. Differences of logits are multiplied by it, instead of dividing the logits: the
    rounding is then relative to the difference.
    """

    first: int
    ignore_index: int
    softcap: float | None
    temperature: float | None
    inverse: float | None
    return_entropy: bool
    return_total: bool
    return_log_sum_squares: bool
    return_best: bool


class StatisticsInputs(NamedTuple):
    """The inputs of the rows' statistics, except their logits.

    Attributes:
        target: int64 ``[N, K]``, with any strides.
        weight: ``[V]``, contiguous, for `total`; or None.
        bias: ``[V]``, contiguous, to add to the logits; or None.
        options: the options.
    """

    target: Tensor
    weight: Tensor | None
    bias: Tensor | None
    options: StatisticsKernelOptions


class StatisticsResults(NamedTuple):
    """The results per row that `StatisticsKernels.rows` writes; None for those that aren't wanted.

    Attributes:
        lse, entropy, total, log_sum_squares, best, best_index: as in `LogitStatistics`, contiguous.
        picked: float32 ``[N, K]``, contiguous.
        kept: float32 ``[2, N]``, or ``[3, N]`` with an entropy; `StatisticsKernels.gradient` needs it. It has a row's largest
            logit, after the softcap and before the temperature; the sum of exponentials relative to it, or -1 in an ignored
            row; and the entropy.
    """

    lse: Tensor
    picked: Tensor
    entropy: Tensor | None
    total: Tensor | None
    log_sum_squares: Tensor | None
    best: Tensor | None
    best_index: Tensor | None
    kept: Tensor | None


class StatisticsGrads(NamedTuple):
    """The gradients of the statistics, contiguous; None for a statistic without one.

    Attributes:
        lse, entropy, total: float32 ``[N]``.
        picked: float32 ``[N, K]``.
    """

    lse: Tensor | None
    picked: Tensor | None
    entropy: Tensor | None
    total: Tensor | None


def terms_columns(columns: int) -> int:
    """Columns of the terms of `StatisticsKernels.product`: rows that start at addresses of 32 bytes are written in few steps."""
    return (columns + 15) // 16 * 16


class StatisticsKernels:
    """A language's kernels of statistics."""

    def rows(self, results: StatisticsResults, logits: Logits, inputs: StatisticsInputs, first_row: int) -> None:
        """Write the results of the rows from `first_row` on, as many as `logits` has. They may have any strides."""
        raise NotImplementedError

    def rows_of_product(self, x: Tensor, weight: Tensor, inputs: StatisticsInputs, most: int) -> int:
        """How many rows of x `product` takes at a time, if `most` rows of float32 logits fit into memory; 0: none.

        Then PyTorch makes the logits.
        """
        return 0

    def rows_of_terms(self, x: Tensor, weight: Tensor, memory: int) -> int:
        """How many rows' terms, and what `product` returns with them, fit into `memory` bytes. `product` takes x and weight."""
        raise NotImplementedError

    def product(
        self,
        results: StatisticsResults,
        x: Tensor,
        weight: Tensor,
        inputs: StatisticsInputs,
        first_row: int,
        terms: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Any:
        """Write the results of the rows from `first_row` on, as many as x has; their logits are x · weightᵀ.

        Args:
            results, labels: as `rows` gets them.
            x, weight: the linear layer's, as `rows_of_product` took them.
            first_row: the first row.
            terms: in x's dtype and contiguous, one row for each of x, which then has one target. It gets what `normalise`
                takes. It has as many columns as `terms_columns` says. Or None.
            scales: float32 and contiguous, a number for each of all rows; or None. It gets what `terms` need to be multiplied
                by, instead of `normalise`: then they are the gradient of lse with respect to the logits, except for 0 at the
                target. In ignored rows both are 0.

        Returns:
            What else `normalise` takes: a tensor.
        """
        raise NotImplementedError

    def normalise(
        self, terms: Tensor, beside: Any, inputs: StatisticsInputs, kept: Tensor, dlse: Tensor | None, first_row: int
    ) -> None:
        """Turn terms into the gradient of lse with respect to the logits, times `dlse`.

        Args:
            terms, beside: of `product`.
            labels: as `product` got them.
            kept: what `product` kept.
            dlse: the gradient of lse, of all rows, or None for 1.
            first_row: the first row.
        """
        raise NotImplementedError

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        inputs: StatisticsInputs,
        kept: Tensor,
        incoming: StatisticsGrads,
        first_row: int,
        first_column: int,
    ) -> None:
        """Write the gradient of the logits of the rows from `first_row` on, and of the columns from `first_column` on.

        Args:
            dlogits: to be written; `memory` is contiguous, of any dtype no wider than the logits'.
            logits: None if `dlogits` holds them.
            labels: as `rows` got them.
            kept: what `rows` kept.
            incoming: gradients of the statistics, at least one of them.
            first_row: the first row.
            first_column: the first column.
        """
        raise NotImplementedError

    def frozen(
        self, dx: Tensor, m: Tensor, by_m: Tensor | None, weight: Tensor, column: Tensor, by_weight: Tensor, most: int
    ) -> None:
        """Write m · by_m + weight[column] · by_weight, of each row, in float32 and rounded once.

        Args:
            dx: ``[N, H]``, contiguous, to be written.
            m: ``[N, H]``, contiguous.
            by_m: float32 ``[N]``, or None for 0.
            weight: ``[V, H]``, with any strides.
            column: int64 ``[N]``, rows of the weight.
            by_weight: float32 ``[N]``.
            most: how many rows there is room for in float32. A kernel needs none.
        """
        for first, last in chunks(dx.shape[0], most, 1):
            chunk = slice(first, last)
            part = weight.index_select(0, column[chunk]) * by_weight[chunk, None]
            if by_m is not None:
                part.addcmul_(m[chunk], by_m[chunk, None])
            dx[chunk] = part


def options_of(*, softcap: float | None, temperature: float, **others: Any) -> StatisticsKernelOptions:
    """A call's options, from those of the contract."""
    return StatisticsKernelOptions(
        softcap=None if softcap is None else float(softcap),
        temperature=None if temperature == 1 else float(temperature),
        inverse=None if temperature == 1 else 1.0 / temperature,
        **others,
    )


def inputs_of(
    target: Tensor, weight: Tensor | None, bias: Tensor | None, options: StatisticsKernelOptions
) -> StatisticsInputs:
    """The labels, from tensors with any strides."""
    return StatisticsInputs(
        target if target.dim() == 2 else target[:, None],
        weight.contiguous() if weight is not None and options.return_total else None,
        None if bias is None else bias.contiguous(),
        options,
    )


def grads_of(
    dlse: Tensor | None, dpicked: Tensor | None, dentropy: Tensor | None, dtotal: Tensor | None
) -> StatisticsGrads:
    """The gradients of the statistics, from tensors with any strides."""
    lse, picked, entropy, total = (None if d is None else d.contiguous() for d in (dlse, dpicked, dentropy, dtotal))
    return StatisticsGrads(lse, picked if picked is None or picked.dim() == 2 else picked[:, None], entropy, total)


def new_results(inputs: StatisticsInputs, differentiable: bool) -> StatisticsResults:
    """Memory for the results of all rows."""
    target, options = inputs.target, inputs.options
    n = target.shape[0]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=target.device)

    return StatisticsResults(
        empty(n),
        empty(*target.shape),
        empty(n) if options.return_entropy else None,
        empty(n) if options.return_total else None,
        empty(n) if options.return_log_sum_squares else None,
        empty(n) if options.return_best else None,
        torch.empty(n, dtype=torch.int64, device=target.device) if options.return_best else None,
        empty(3 if options.return_entropy else 2, n) if differentiable else None,
    )


def result_of(rows: StatisticsResults, target: Tensor) -> LogitStatistics:
    """The op's result, for a target of the given shape."""
    lse, picked, *others, _ = rows
    return LogitStatistics(lse, picked.view(target.shape), *others)


class Statistics:
    """`logit_statistics` by a language's kernels: forward and backward read the logits once each, and never copy them."""

    def __init__(self, kernels: StatisticsKernels) -> None:
        self.kernels = kernels

    def forward(
        self, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
    ) -> tuple[LogitStatistics, Saved]:
        """The contract's forward."""
        (differentiable,) = needs
        inputs = inputs_of(target, weight, None, options_of(**options))
        results = new_results(inputs, differentiable)
        self.kernels.rows(results, Logits.of(logits), inputs, 0)
        saved = (logits, target, inputs.weight, results.kept) if differentiable else ()
        return result_of(results, target), saved

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dlse: Tensor | None,
        dpicked: Tensor | None,
        dentropy: Tensor | None,
        dtotal: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward."""
        logits, target, weight, statistics = saved
        inputs = inputs_of(target, weight, None, options_of(**options))
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        incoming = grads_of(dlse, dpicked, dentropy, dtotal)
        self.kernels.gradient(Logits.of(dlogits), Logits.of(logits), inputs, statistics, incoming, 0, 0)
        return (dlogits,)
