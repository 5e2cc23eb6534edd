"""KL divergence of a linear layer from given probabilities, by a language's distillation kernels: the host code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.custom_op import opaque
from liger_core.host.distillation import (
    DistillationKernels,
    Given,
    Incoming,
    Options,
    Rows,
    divisor_of,
    given_of,
    incoming_of,
    new_rows,
)
from liger_core.host.linear import Layer, Linear, LinearLoss, Made, plan_of
from liger_core.host.rows import Logits


class _Loss(LinearLoss):
    """A call, in which rows of the target replace a teacher's logits.

    Only forward writes `results`. `factors` are those of rows' gradients in backward.
    """

    factors = Incoming(None, None)

    def __init__(
        self,
        host: FusedLinearKLDiv,
        layer: Layer,
        given: Given,
        target: Tensor,
        results: Rows | None,
        statistics: Tensor,
    ) -> None:
        super().__init__(host.linear, layer)
        self.host, self.kernels, self.given, self.target = host, host.kernels, given, target
        self.results, self.statistics = results, statistics

    def as_one(self, made: Made, results: bool, dloss: Tensor | None, by_columns: bool) -> None:
        written, statistics = (self.results, None) if results else (None, self.statistics)
        call = self.layer, self.given, self.target
        self.host.go(made, written, *call, statistics, self.factors, dloss, by_columns)

    def write(self, first: int, *logits: Logits) -> None:
        assert self.results is not None
        target = self.target[first : first + logits[0].memory.shape[0]]
        self.kernels.rows(self.results, logits[0], Logits.of(target), self.given, first)

    def incoming(self, dloss: Tensor | None) -> Incoming:
        if dloss is not None:
            return self.factors
        return Incoming(torch.ones(1, dtype=torch.float32, device=self.x.device), None)

    def gradient(
        self, dlogits: Logits, kept: tuple[Logits | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        rows, columns = dlogits.memory.shape[0], dlogits.columns
        target = Logits.of(self.target[first : first + rows, first_column : first_column + columns])
        self.kernels.gradient(dlogits, kept[0], target, self.given, self.statistics, incoming, first, first_column)


class FusedLinearKLDiv:
    """`fused_linear_kl_div` by a language's kernels: logits are made in chunks, which share one memory."""

    def __init__(self, kernels: DistillationKernels, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear
        self.go = opaque(writes=("made", "results"), within=type(kernels).__module__)(self._go)

    def _go(
        self,
        made: Made,
        results: Rows | None,
        layer: Layer,
        given: Given,
        target: Tensor,
        statistics: Tensor | None,
        factors: Incoming,
        dloss: Tensor | None,
        by_columns: bool,
    ) -> None:
        """`LinearLoss.go`. `statistics` are those that forward wrote; in forward they are among the results."""
        if results is not None:
            statistics = results.statistics
        assert statistics is not None
        loss = _Loss(self, layer, given, target, results, statistics)
        loss.factors = factors
        loss.go(made, results is not None, dloss, by_columns)

    def forward(
        self,
        needs: Needs,
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
    ) -> tuple[Tensor, Saved]:
        """The contract's forward, for a kernel file."""
        given = given_of(labels, bias, None, _options(log_target, temperature, softcap, eps, ignore_index))
        rows = new_rows(x, False)
        layer = needs, x, linear_weight, bias
        loss = self._loss(given, target, rows, rows.statistics, layer, reduction, accum_dtype, memory_budget)
        divided = reduction in ("batchmean", "mean")
        loss.divisor = divisor_of(self.kernels, x, given, "mean" if divided else reduction, None)
        if reduction == "mean" and loss.divisor is not None:
            loss.divisor = loss.divisor * linear_weight.shape[0]
        kept = loss.forward()
        result = rows.soft if reduction == "none" else self.kernels.total(rows.soft, loss.divisor)
        if not any(needs):
            return result, ()
        return result, (x, linear_weight, target, given.labels, bias, rows.statistics, loss.divisor, *kept)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor,
        *,
        log_target: bool,
        temperature: float,
        softcap: float | None,
        eps: float,
        reduction: str,
        ignore_index: int,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        x, linear_weight, target, labels, bias, statistics, divisor, *kept = saved
        given = given_of(labels, bias, None, _options(log_target, temperature, softcap, eps, ignore_index))
        layer = needs, x, linear_weight, bias
        loss = self._loss(given, target, None, statistics, layer, reduction, accum_dtype, memory_budget)
        loss.divisor = divisor
        # If gradients were made in forward, they are only scaled, and need no factors per row.
        if not loss.plan.at_once or loss.plan.columns is not None:
            loss.factors = incoming_of(None, dloss, None, divisor, 1.0, 0.0)
        return loss.backward(tuple(kept), dloss)

    def _loss(
        self,
        given: Given,
        target: Tensor,
        results: Rows | None,
        statistics: Tensor,
        layer: tuple[Needs, Tensor, Tensor, Tensor | None],
        reduction: str,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
    ) -> _Loss:
        needs, x, weight, bias = layer
        reduced = reduction != "none"
        plan = plan_of(needs, x, weight, accum_dtype=accum_dtype, memory_budget=memory_budget, reduced=reduced)
        return _Loss(self, Layer(x, weight, bias, needs, accum_dtype, plan), given, target, results, statistics)


def _options(log_target: bool, temperature: float, softcap: float | None, eps: float, ignore_index: int) -> Options:
    """The options of a distillation whose target is data."""
    softcap = None if softcap is None else float(softcap)
    return Options("log" if log_target else "given", float(eps), float(temperature), softcap, None, ignore_index, False)
