"""Cross-entropy of a linear layer: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.custom_op import opaque
from liger_core.host.cross_entropy import (
    CrossEntropyKernels,
    Labels,
    Rows,
    labels_of,
    new_rows,
    options_of,
    result_of,
)
from liger_core.host.linear import Layer, Linear, LinearLoss, Made, plan_of
from liger_core.host.rows import Logits


class _Loss(LinearLoss):
    """A call. Only forward writes `results`."""

    def __init__(
        self,
        host: FusedLinearCrossEntropy,
        layer: Layer,
        labels: Labels,
        results: Rows | None,
        statistics: Tensor | None,
    ) -> None:
        super().__init__(host.linear, layer)
        self.host, self.kernels, self.labels = host, host.kernels, labels
        self.results, self.statistics = results, statistics

    def as_one(self, made: Made, results: bool, dloss: Tensor | None, by_columns: bool) -> None:
        written, statistics = (self.results, None) if results else (None, self.statistics)
        self.host.go(made, written, self.layer, self.labels, statistics, self.divisor, dloss, by_columns)

    def write(self, first: int, *logits: Logits) -> None:
        assert self.results is not None
        self.kernels.rows(self.results, logits[0], self.labels, first)

    def incoming(self, dloss: Tensor | None) -> Any:
        return self.kernels.incoming(dloss, self.divisor, self.labels.target)

    def gradient(
        self, dlogits: Logits, kept: tuple[Logits | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        assert self.statistics is not None
        self.kernels.gradient(dlogits, kept[0], self.labels, self.statistics, incoming, first, first_column)


class FusedLinearCrossEntropy:
    """`fused_linear_cross_entropy` by a language's kernels: logits are made in chunks, which share one memory."""

    def __init__(self, kernels: CrossEntropyKernels, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear
        self.go = opaque(writes=("made", "results"), within=type(kernels).__module__)(self._go)

    def _go(
        self,
        made: Made,
        results: Rows | None,
        layer: Layer,
        labels: Labels,
        statistics: Tensor | None,
        divisor: Tensor | None,
        dloss: Tensor | None,
        by_columns: bool,
    ) -> None:
        """`LinearLoss.go`. `statistics` are those that forward wrote; in forward they are among the results."""
        loss = _Loss(self, layer, labels, results, statistics if results is None else results.statistics)
        loss.divisor = divisor
        loss.go(made, results is not None, dloss, by_columns)

    def _loss(
        self,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Labels,
        results: Rows | None,
        statistics: Tensor | None,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
    ) -> _Loss:
        reduced = labels.options.reduction != "none"
        plan = plan_of(needs, x, weight, accum_dtype=accum_dtype, memory_budget=memory_budget, reduced=reduced)
        return _Loss(self, Layer(x, weight, bias, needs, accum_dtype, plan), labels, results, statistics)

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        token_scaling: bool = False,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Saved]:
        """The contract's forward, for a kernel file."""
        differentiable = any(needs)
        options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling, reduction)
        labels = labels_of(target, class_weight, bias, linear_weight.shape[0], options)
        wanted = {
            "return_z_loss": return_z_loss,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
            "differentiable": differentiable,
        }
        rows = new_rows(self.kernels, labels, **wanted)
        layer = needs, x, linear_weight, bias
        loss = self._loss(*layer, labels, rows, rows.statistics, accum_dtype, memory_budget)
        if loss.plan.at_once and reduction == "mean":
            loss.divisor = self.kernels.totals(labels)
        kept = loss.forward()
        result, totals = result_of(self.kernels, rows, labels, loss.divisor, **wanted)
        if not differentiable:
            return result, ()
        given = x, linear_weight, bias, labels.target, labels.weight, labels.weight_sum
        return result, (*given, rows.statistics, totals, *kept)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor,
        *,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        softcap: float | None,
        reduction: str,
        token_scaling: bool,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        **returned: bool,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        x, linear_weight, bias, target, class_weight, weight_sum, statistics, totals, *kept = saved
        options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling, reduction)
        added = None if bias is None else bias.contiguous()
        labels = Labels(target, class_weight, weight_sum, added, linear_weight.shape[0], options)
        layer = needs, x, linear_weight, bias
        loss = self._loss(*layer, labels, None, statistics, accum_dtype, memory_budget)
        loss.divisor = totals
        return loss.backward(tuple(kept), dloss)
