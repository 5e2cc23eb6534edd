"""Cross-entropy of a linear layer: rows in chunks, whose logits PyTorch's matmul computes into memory used again for each.

When one chunk holds all rows, its logits are kept for backward, as an unfused model does. Otherwise a chunk's logits
are overwritten with their gradient, which becomes the gradients of the arguments at once; backward has only to scale
those. They can't be made before the loss's own gradient is known when that differs from row to row, and they are not
when a memory budget has no room to keep them: backward then computes the logits again.
"""

import torch
import triton.language as tl
from torch import Tensor

from liger_core.contract import Needs, Saved, implements
from liger_core.ops.fused_linear_cross_entropy import chunk_rows, fused_linear_cross_entropy, temporary_memory
from liger_triton.ops._cross_entropy import (
    new_rows,
    new_totals,
    options_of,
    reduce,
    run_gradient,
    run_rows,
    run_totals,
    weight_sum_of,
)
from liger_triton.ops._launch import kernel


@kernel
def _scale(y, x, dloss, totals, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss)
    if totals is not None:
        factor /= tl.load(totals)
    tl.store(y + offset, tl.load(x + offset, offset < size).to(tl.float32) * factor, offset < size)


def _scaled(x: Tensor | None, like: Tensor | None, dloss: Tensor, totals: Tensor | None) -> Tensor | None:
    """x · dloss, divided by the rows that count when there are `totals`; in the dtype of `like`."""
    if x is None:
        return None
    y = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    _scale[((x.numel() + 4095) // 4096,)](y, x, dloss, totals, x.numel(), BLOCK=4096, num_warps=4)
    return y


def _chunks(rows: int, most: int) -> list[tuple[int, int]]:
    """The ends of chunks of rows, all about as large. A dynamic number of rows stays dynamic in a trace."""
    count = 1
    while count * most < rows:
        count += 1
    size = (rows + count - 1) // count
    return [(i * size, min(i * size + size, rows)) for i in range(count)]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() if bias is None else torch.addmm(bias.to(x.dtype), x, weight.t())


# A matmul of half-precision operands with a float32 result: on ROCm since pytorch#162600; added to a float32 tensor since
# pytorch#167931; that in a trace since pytorch#179634.
_FLOAT32_MM = torch.version.hip is None or torch.__version__ >= (2, 10)
_FLOAT32_ADDMM = torch.__version__ >= (2, 10)
_FLOAT32_ADDMM_TRACED = torch.__version__ >= (2, 12)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Total + aᵀ b, in `dtype`; written to total."""
    a = a.t()
    if dtype is torch.float32 and a.dtype is not torch.float32:
        if not (a.is_cuda and _FLOAT32_MM):
            a, b = a.float(), b.float()
        elif total is None:
            return torch.mm(a, b, out_dtype=dtype)
        elif _FLOAT32_ADDMM_TRACED if torch.compiler.is_compiling() else _FLOAT32_ADDMM:
            return torch.addmm(total, a, b, out_dtype=dtype, out=total)
        else:
            return total.add_(torch.mm(a, b, out_dtype=dtype))
    if total is None:
        return torch.mm(a, b).to(dtype)
    return total.addmm_(a, b) if a.dtype is dtype else total.add_(torch.mm(a, b))


class _Gradients:
    """The gradients of x, linear_weight and bias, added up over chunks from that of the logits.

    Args:
        dtype: in which linear_weight's is summed.
    """

    def __init__(self, needs: Needs, x: Tensor, linear_weight: Tensor, dtype: torch.dtype) -> None:
        self.needs_x, self.needs_weight, self.needs_bias = needs
        self.x, self.linear_weight, self.dtype = x, linear_weight, dtype
        self.dx = torch.empty_like(x, memory_format=torch.contiguous_format) if self.needs_x else None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def add(self, first: int, last: int, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.mm(dlogits, self.linear_weight, out=self.dx[first:last])
        if self.needs_weight:
            self.dweight = _add_product(self.dweight, dlogits, self.x[first:last], self.dtype)
        if self.needs_bias:
            dbias = dlogits.sum(0, dtype=torch.float32)
            self.dbias = dbias if self.dbias is None else self.dbias.add_(dbias)


@implements(fused_linear_cross_entropy)
def forward(
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
    n, columns = x.shape[0], linear_weight.shape[0]
    chunk = chunk_rows(memory_budget, x, linear_weight, accum_dtype=accum_dtype, weight_grad=needs[1])
    differentiable, whole = any(needs), chunk >= n
    at_once = differentiable and not whole and reduction != "none"
    if at_once and memory_budget is not None:
        room = temporary_memory(chunk, x, linear_weight, accum_dtype=accum_dtype, weight_grad=needs[1])
        at_once = _kept_memory(needs, x, linear_weight, accum_dtype) <= room

    options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling)
    target = target.contiguous()
    class_weight = None if class_weight is None else class_weight.contiguous()
    weight_sum = weight_sum_of(class_weight, options)
    wanted = {
        "reduction": reduction,
        "return_z_loss": return_z_loss,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }
    rows = new_rows(target, options, differentiable=differentiable, **wanted)
    totals = new_totals(target) if differentiable and reduction == "mean" else None
    gradients = counted = None
    if at_once:
        gradients = _Gradients(needs, x, linear_weight, accum_dtype)
        if totals is not None:
            run_totals(totals, target, class_weight, columns, options)
            counted = totals[0]

    logits = None
    for first, last in _chunks(n, n if whole else 2 * chunk):
        logits = None  # before the next chunk's are allocated
        logits = _linear(x[first:last], linear_weight, bias)
        run_rows(rows, logits, target, class_weight, weight_sum, options, reduction, first)
        if gradients is not None:
            # The mean's gradient times the rows that count: by itself it underflows in float16.
            run_gradient(
                logits, logits, target, class_weight, weight_sum, rows.statistics, counted, totals, options, first
            )
            gradients.add(first, last, logits)
    result = reduce(rows, target, class_weight, totals, columns, options, **wanted)
    if not differentiable:
        return result, ()
    if gradients is not None:
        # Of linear_weight and bias only the dtypes are needed.
        likes = linear_weight.new_empty(0), None if bias is None else bias.new_empty(0)
        return result, (totals, *likes, gradients.dx, gradients.dweight, gradients.dbias)
    inputs = x, target, class_weight, weight_sum, rows.statistics, logits if whole else None
    return result, (totals, linear_weight, bias, None, None, None, *inputs)


def _kept_memory(needs: Needs, x: Tensor, linear_weight: Tensor, dtype: torch.dtype) -> int:
    """Bytes of gradients that are kept from forward to backward, where they stand beside those that are returned."""
    needs_x, needs_weight, needs_bias = needs
    size = x.numel() * x.dtype.itemsize if needs_x else 0
    size += linear_weight.numel() * dtype.itemsize if needs_weight else 0
    return size + (4 * linear_weight.shape[0] if needs_bias else 0)


def backward(
    needs: Needs,
    saved: Saved,
    dloss: Tensor,
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
    accum_dtype: torch.dtype,
    memory_budget: int | None,
) -> tuple[Tensor | None, ...]:
    totals, linear_weight, bias, dx, dweight, dbias, *inputs = saved
    if not inputs:
        return (
            _scaled(dx, dx, dloss, totals),
            _scaled(dweight, linear_weight, dloss, totals),
            _scaled(dbias, bias, dloss, totals),
        )

    x, target, class_weight, weight_sum, statistics, kept = inputs
    options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling)
    n = x.shape[0]
    chunk = chunk_rows(memory_budget, x, linear_weight, accum_dtype=accum_dtype, weight_grad=needs[1])
    gradients = _Gradients(needs, x, linear_weight, linear_weight.dtype if kept is not None else accum_dtype)
    for first, last in _chunks(n, n if kept is not None else 2 * chunk):
        logits = _linear(x[first:last], linear_weight, bias) if kept is None else kept
        dlogits = logits if kept is None else torch.empty_like(kept)
        run_gradient(dlogits, logits, target, class_weight, weight_sum, statistics, dloss, totals, options, first)
        del logits
        gradients.add(first, last, dlogits)
        del dlogits
    return (
        gradients.dx,
        None if gradients.dweight is None else gradients.dweight.to(linear_weight.dtype),
        None if gradients.dbias is None else gradients.dbias.to(bias.dtype),
    )
