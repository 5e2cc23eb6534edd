"""Cross-entropy of a linear layer: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.cross_entropy import (
    CrossEntropyInputs,
    CrossEntropyKernels,
    CrossEntropyResults,
    inputs_of,
    new_results,
    options_of,
    result_of,
)
from liger_core.host.linear import LinearLoss, LinearLossPass, layer_of
from liger_core.host.rows import Logits


class FusedLinearCrossEntropy(LinearLoss):
    """`fused_linear_cross_entropy` by a language's kernels: logits are made in chunks, which share one memory."""

    kernels: CrossEntropyKernels
    inputs, results = CrossEntropyInputs, CrossEntropyResults

    def write(self, inputs: CrossEntropyInputs, results: CrossEntropyResults, first: int, *logits: Logits) -> None:
        self.kernels.rows(results, logits[0], inputs, first)

    def incoming(
        self, inputs: CrossEntropyInputs, dloss: Tensor | None, divisor: Tensor | None, device: torch.device
    ) -> Any:
        return self.kernels.incoming(dloss, divisor, inputs.target)

    def gradient(
        self,
        inputs: CrossEntropyInputs,
        dlogits: Logits,
        logits: tuple[Logits | None, ...],
        statistics: Tensor,
        incoming: Any,
        first: int,
        first_column: int,
    ) -> None:
        self.kernels.gradient(dlogits, logits[0], inputs, statistics, incoming, first, first_column)

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        class_weight: Tensor | None = None,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        **options: Any,
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Saved]:
        """The contract's forward."""
        differentiable = any(needs)
        inputs = inputs_of(target, class_weight, bias, linear_weight.shape[0], options_of(**options))
        results, reduction = new_results(self.kernels, inputs, differentiable), inputs.options.reduction
        layer = layer_of(needs, x, linear_weight, bias, accum_dtype, memory_budget, reduced=reduction != "none")
        call = LinearLossPass(self, layer, inputs, results)
        if layer.plan.at_once and reduction == "mean":
            call.divisor = self.kernels.totals(inputs)
        logits_or_grads = call.forward()
        result, totals = result_of(self.kernels, results, inputs, call.divisor, differentiable)
        if not differentiable:
            return result, ()
        saved = x, linear_weight, bias, inputs.target, inputs.weight, inputs.weight_sum
        return result, (*saved, results.statistics, totals, *logits_or_grads)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor,
        *,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward."""
        x, linear_weight, bias, target, class_weight, weight_sum, statistics, totals, *logits_or_grads = saved
        added = None if bias is None else bias.contiguous()
        inputs = CrossEntropyInputs(
            target, class_weight, weight_sum, added, linear_weight.shape[0], options_of(**options)
        )
        reduced = inputs.options.reduction != "none"
        layer = layer_of(needs, x, linear_weight, bias, accum_dtype, memory_budget, reduced=reduced)
        call = LinearLossPass(self, layer, inputs, statistics=statistics, divisor=totals)
        return call.backward(tuple(logits_or_grads), dloss)
