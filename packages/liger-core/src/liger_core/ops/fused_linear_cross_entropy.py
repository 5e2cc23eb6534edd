"""Cross-entropy of a linear layer's logits, made a chunk of rows at a time."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_core import checks
from liger_core.budget import check_accum_dtype, check_memory_budget
from liger_core.contract import op
from liger_core.ops.cross_entropy import (
    CrossEntropyOptions,
    CrossEntropyOutput,
    check_labels,
    check_options,
    loss_of_logits,
)


class FusedLinearCrossEntropyOptions(CrossEntropyOptions, total=False):
    """The options of `fused_linear_cross_entropy` that don't decide what it returns."""

    class_weight: Tensor | None
    token_scaling: bool
    accum_dtype: torch.dtype
    memory_budget: int | None


class FusedLinearCrossEntropyCall:
    """How `fused_linear_cross_entropy` is called, for type checkers: the flags decide what it returns."""

    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_z_loss: Literal[False] = False,
        return_token_accuracy: Literal[False] = False,
        return_predicted_tokens: Literal[False] = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_z_loss: Literal[True],
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_token_accuracy: Literal[True],
        return_z_loss: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_predicted_tokens: Literal[True],
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> Tensor | CrossEntropyOutput: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Exists for type checkers only: there are no instances."""
        raise NotImplementedError


@op(
    differentiable=("x", "linear_weight", "bias"),
    result=CrossEntropyOutput,
    grad_results=("loss",),
    autocast=("x", "linear_weight", "bias"),
    overloads=FusedLinearCrossEntropyCall,
    dimensions="x: n H, linear_weight: V H, target: n, bias: V, class_weight: V -> n, n, n, n",
)
def fused_linear_cross_entropy(
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
) -> Tensor | CrossEntropyOutput:
    """`cross_entropy` of x @ linear_weightᵀ + bias. A kernel makes the N × V logits a chunk of rows at a time.

    Logits are computed in x's dtype, the rest in float32. The gradients of linear_weight and bias are summed over rows
    in `accum_dtype` and rounded once.

    Args:
        x: ``[N, H]``; float32, bfloat16 or float16.
        linear_weight: ``[V, H]``, in x's dtype.
        target: int64 ``[N]``, the labels.
        bias: ``[V]``, or None.
        class_weight: ``[V]``, `cross_entropy`'s weight, or None.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction: as in `cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as in `cross_entropy`.
        token_scaling: multiply each row's loss, z-loss and gradient by the probability of its label (after softcap),
            taken as a constant. The divisor of ``"mean"`` stays as it is.
        accum_dtype: the dtype in which gradients are summed over chunks of rows: float32, bfloat16 or float16.
        memory_budget: bytes that a kernel may allocate beyond its inputs and gradients, accumulators included; the error
            names the least. None takes max(H, 1024) rows at a time: logits of as many bytes as linear_weight. Less memory
            costs time, never accuracy. The reference ignores it and holds all logits.

    Returns:
        The loss, or a `CrossEntropyOutput` if any `return_*` flag is set.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.
        IndexError: a label out of range, on the CPU.

    Source:
        `cross_entropy`; chunks of rows: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> fused_linear_cross_entropy(torch.ones(1, 2), torch.zeros(2, 2), torch.tensor([1]))
    tensor(0.6931)
    """
    logits = x @ linear_weight.T
    if bias is not None:
        logits = logits + bias
    return loss_of_logits(
        logits,
        target,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        reduction=reduction,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        token_scaling=token_scaling,
    )


@fused_linear_cross_entropy.checks
def _(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_scaling: bool,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    **options: Any,
) -> None:
    name = "fused_linear_cross_entropy"
    checks.floating(name, x=x, linear_weight=linear_weight, bias=bias, class_weight=class_weight)
    checks.ndim(name, 2, 2, x=x, linear_weight=linear_weight)
    checks.same_dtype(name, x=x, linear_weight=linear_weight)
    vocabulary = linear_weight.shape[0]
    if vocabulary == 0:
        raise ValueError(f"{name}: linear_weight has shape {tuple(linear_weight.shape)}; it takes at least one row")
    checks.shape(name, "linear_weight", linear_weight, (vocabulary, x.shape[1]), "x's last dimension")
    check_labels(name, target, x.shape[0], "a label per row of x")
    checks.shape(name, "bias", bias, (vocabulary,), "linear_weight's first dimension")
    checks.shape(name, "class_weight", class_weight, (vocabulary,), "linear_weight's first dimension")
    check_options(name, **options)
    checks.flag(name, token_scaling=token_scaling)
    check_accum_dtype(name, accum_dtype)
    check_memory_budget(name, memory_budget, x, linear_weight, accum_dtype)


@fused_linear_cross_entropy.checks_values
def _(linear_weight: Tensor, target: Tensor, ignore_index: int, **others: Any) -> None:
    checks.indices_below("fused_linear_cross_entropy", "target", target, linear_weight.shape[0], ignore_index)
