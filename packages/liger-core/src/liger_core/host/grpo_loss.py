"""`grpo_loss`'s host code: a language adds its kernels.

Forward and backward read the logits once each. Between them there are a few numbers per token, the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.policy import PolicyOptions


class PolicyInputs(NamedTuple):
    """Inputs of a loss beside its logits, with any strides.

    Attributes:
        ids: int64 ``[B, L]``.
        mask: ``[B, L]``, 0 at masked tokens; or None.
        old_logps: ``[B, L]``, or None.
        ref_logps: ``[B, L]``; None if beta is 0.
        advantages: ``[B]``.
        importances: ``[B]``, ``[B, 1]`` or ``[B, L]``; or None.
        items, item_count: num_items_in_batch, if it is a tensor and if it is a number. None where it is no divisor of the mean.
    """

    ids: Tensor
    mask: Tensor | None
    old_logps: Tensor | None
    ref_logps: Tensor | None
    advantages: Tensor
    importances: Tensor | None
    items: Tensor | None
    item_count: float | None

    def contiguous(self) -> PolicyInputs:
        """The inputs, with copies of those that aren't contiguous."""
        fields: list[Any] = [field.contiguous() if isinstance(field, Tensor) else field for field in self]
        return PolicyInputs(*fields)

    def weighs_tokens(self) -> bool:
        """Whether each token has an importance of its own, and not each row."""
        return self.importances is not None and self.importances.dim() == 2 and self.importances.shape[1] != 1

    def divisor(self, options: PolicyOptions) -> float | None:
        """The divisor of the mean. None if it is `items`, or the number of unmasked tokens."""
        rows, length = self.ids.shape
        if options.means_rows() or options.loss_type == "luspo":
            return rows
        if options.loss_type == "dr_grpo":
            return rows * (options.max_completion_length or length)
        return self.item_count


class GRPOResults(NamedTuple):
    """Results of forward.

    Attributes:
        loss, kl, clip: the fields of `GRPOOutput`.
        weights: float32, the weight of each row's tokens in the mean, or one of all; None without a mean or without a gradient.
    """

    loss: Tensor
    kl: Tensor | None
    clip: Tensor
    weights: Tensor | None

    @classmethod
    def empty(cls, state: Tensor, options: PolicyOptions, by_row: bool) -> GRPOResults:
        """Memory for results, with a weight for each row or one for all."""
        mean = options.reduction == "mean"
        shape = () if mean else state.shape[1:]
        weights = None
        if mean and state.shape[0] > 2:
            weights = state.new_empty(state.shape[1] if by_row else 1)
        return cls(
            state.new_empty(shape),
            None if options.beta == 0 else state.new_empty(shape),
            state.new_empty(shape),
            weights,
        )


class GRPOLossKernels:
    """The kernels that a language launches."""

    def forward(
        self, state: Tensor, logits: Tensor, inputs: PolicyInputs, temperature: float, options: PolicyOptions
    ) -> GRPOResults:
        """Write the state, and make the results.

        Args:
            state: float32 ``[2, B, L]``, contiguous. For each token: how far its logit lies below the largest, over the
                temperature; and the sum of exponentials relative to the largest. For a gradient ``[4, B, L]``: also the largest
                logit, and the loss's derivative by the log-probability. If a ratio belongs to a whole row ``[5, B, L]``: also
                the derivative by that ratio.
            logits: ``[B, L + 1, V]``, with any strides.
            inputs: the other inputs.
            temperature, options: the op's.
        """
        raise NotImplementedError

    def backward(
        self,
        dlogits: Tensor,
        dloss: Tensor,
        logits: Tensor,
        ids: Tensor,
        mask: Tensor | None,
        state: Tensor,
        weights: Tensor | None,
        temperature: float,
        options: PolicyOptions,
    ) -> None:
        """Write the gradient of the logits.

        Args:
            dlogits: contiguous, of the logits' shape.
            dloss: a scalar, or ``[B, L]`` with any strides.
            logits, ids, mask, temperature, options: as in `forward`. The mask is None unless a ratio belongs to a whole row.
            state, weights: those of `forward`.
        """
        raise NotImplementedError


def temperatures(temperature: float) -> tuple[float | None, float | None]:
    """The temperature and its inverse; None if kernels are compiled without it."""
    return (None, None) if temperature == 1.0 else (float(temperature), 1.0 / temperature)


class GRPOLoss:
    """The op in a language."""

    def __init__(self, kernels: GRPOLossKernels) -> None:
        self.kernels = kernels

    def forward(
        self,
        needs: Needs,
        logits: Tensor,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
        completion_ids: Tensor,
        advantages: Tensor,
        completion_mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
        beta: float = 0.04,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        delta: float | None = None,
        log_ratio_clip: float | None = None,
        loss_type: str = "grpo",
        importance_sampling_level: str = "token",
        max_completion_length: int | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        use_bias_correction_kl: bool = False,
        importance_sampling_ratio: Tensor | None = None,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        reduction: str = "mean",
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor], Saved]:
        (differentiable,) = needs
        options = PolicyOptions(
            beta, eps_low, eps_high, delta, log_ratio_clip, loss_type, importance_sampling_level, max_completion_length,
            use_bias_correction_kl, sapo_temperature_pos, sapo_temperature_neg, reduction,
        )  # fmt: skip
        items = item_count = None
        if loss_type in ("dapo", "cispo"):
            if isinstance(num_items_in_batch, Tensor):
                items = num_items_in_batch
            else:
                item_count = num_items_in_batch
        reference = None if beta == 0 else ref_logps
        inputs = PolicyInputs(
            completion_ids,
            completion_mask,
            old_logps,
            reference,
            advantages,
            importance_sampling_ratio,
            items,
            item_count,
        )
        vectors = (5 if options.by_sequence() else 4) if differentiable else 2
        state = torch.empty((vectors, *completion_ids.shape), dtype=torch.float32, device=logits.device)
        loss, kl, clip, weights = self.kernels.forward(state, logits, inputs, temperature, options)
        if not differentiable:
            return (loss, kl, clip), ()
        mask = completion_mask if options.by_sequence() else None
        return (loss, kl, clip), (logits, completion_ids, mask, state, weights)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor,
        *,
        temperature: float,
        num_items_in_batch: int | float | Tensor | None,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        logits, ids, mask, state, weights = saved
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        self.kernels.backward(dlogits, dloss, logits, ids, mask, state, weights, temperature, PolicyOptions(**others))
        return (dlogits,)
