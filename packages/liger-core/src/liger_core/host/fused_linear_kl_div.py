"""KL divergence of a linear layer from given probabilities, by a language's distillation kernels: the host code."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernelOptions,
    DistillationKernels,
    DistillationResults,
    divisor_of,
    factors_of,
    inputs_of,
    new_results,
)
from liger_core.host.linear import LinearLoss, LinearLossPass, layer_of
from liger_core.host.rows import Logits


class KLDivInputs(NamedTuple):
    """Inputs of each chunk of a call, except its logits.

    Attributes:
        rows: what the kernels take.
        target: ``[N, V]``, whose rows replace a teacher's logits.
        factors: those of the rows' gradients in backward.
    """

    rows: DistillationInputs
    target: Tensor
    factors: DistillationFactors = DistillationFactors(None, None)


class FusedLinearKLDiv(LinearLoss):
    """`fused_linear_kl_div` by a language's kernels: logits are made in chunks, which share one memory."""

    kernels: DistillationKernels
    inputs, results = KLDivInputs, DistillationResults

    def write(self, inputs: KLDivInputs, results: DistillationResults, first: int, *logits: Logits) -> None:
        target = inputs.target[first : first + logits[0].memory.shape[0]]
        self.kernels.rows(results, logits[0], Logits.of(target), inputs.rows, first)

    def incoming(
        self, inputs: KLDivInputs, dloss: Tensor | None, divisor: Tensor | None, device: torch.device
    ) -> DistillationFactors:
        if dloss is not None:
            return inputs.factors
        return DistillationFactors(torch.ones(1, dtype=torch.float32, device=device), None)

    def gradient(
        self,
        inputs: KLDivInputs,
        dlogits: Logits,
        logits: tuple[Logits | None, ...],
        statistics: Tensor,
        incoming: DistillationFactors,
        first: int,
        first_column: int,
    ) -> None:
        rows, columns = dlogits.memory.shape[0], dlogits.columns
        target = Logits.of(inputs.target[first : first + rows, first_column : first_column + columns])
        self.kernels.gradient(dlogits, logits[0], target, inputs.rows, statistics, incoming, first, first_column)

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        labels: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        reduction: str = "batchmean",
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, Saved]:
        """The contract's forward."""
        rows = inputs_of(labels, bias, None, _options_of(**options))
        results = new_results(x, False)
        layer = layer_of(needs, x, linear_weight, bias, accum_dtype, memory_budget, reduced=reduction != "none")
        divided = reduction in ("batchmean", "mean")
        divisor = divisor_of(self.kernels, x, rows, "mean" if divided else reduction, None)
        if reduction == "mean" and divisor is not None:
            divisor = divisor * linear_weight.shape[0]
        logits_or_grads = LinearLossPass(self, layer, KLDivInputs(rows, target), results, divisor=divisor).forward()
        result = results.soft if reduction == "none" else self.kernels.total(results.soft, divisor)
        if not any(needs):
            return result, ()
        return result, (x, linear_weight, target, rows.labels, bias, results.statistics, divisor, *logits_or_grads)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor,
        *,
        reduction: str,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward."""
        x, linear_weight, target, labels, bias, statistics, divisor, *logits_or_grads = saved
        inputs = KLDivInputs(inputs_of(labels, bias, None, _options_of(**options)), target)
        layer = layer_of(needs, x, linear_weight, bias, accum_dtype, memory_budget, reduced=reduction != "none")
        # If gradients were made in forward, they are only scaled, and need no factors per row.
        if not layer.plan.at_once or layer.plan.columns is not None:
            inputs = inputs._replace(factors=factors_of(None, dloss, None, divisor, 1.0, 0.0))
        call = LinearLossPass(self, layer, inputs, statistics=statistics, divisor=divisor)
        return call.backward(tuple(logits_or_grads), dloss)


def _options_of(
    *, log_target: bool, temperature: float, softcap: float | None, eps: float, ignore_index: int
) -> DistillationKernelOptions:
    """The options of a distillation whose target is data."""
    divergence, softcap = "log" if log_target else "given", None if softcap is None else float(softcap)
    return DistillationKernelOptions(divergence, float(eps), float(temperature), softcap, None, ignore_index, False)
