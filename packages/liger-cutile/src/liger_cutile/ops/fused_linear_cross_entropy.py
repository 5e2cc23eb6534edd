"""Cross-entropy of a linear layer: rows in chunks, whose logits PyTorch's matmul computes into memory used again for each.

When one chunk holds all rows, its logits are kept for backward, as an unfused model does. Otherwise a chunk's logits
are overwritten with their gradient, which becomes the gradients of the arguments at once; backward has only to scale
those. They can't be made before the loss's own gradient is known when that differs from row to row: backward then
computes the logits again. So it does for the gradient of linear_weight where a memory budget has no room for an
accumulator: from all rows of x, for some rows of linear_weight after others.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core.contract import Needs, Once, Saved, implements
from liger_core.opaque import opaque
from liger_core.ops.fused_linear_cross_entropy import (
    chunk_columns,
    chunk_rows,
    fused_linear_cross_entropy,
    temporary_memory,
)
from liger_cutile.ops._cross_entropy import (
    Options,
    new_rows,
    new_totals,
    options_of,
    reduce,
    run_gradient,
    run_rows,
    run_totals,
    weight_sum_of,
)
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_one_row, blocks
from liger_cutile.ops._tiles import load

# Elements of a tile of what is scaled.
TILE = 4096


@ct.kernel(occupancy=4)
def _scale(y, x, dloss, totals, BLOCK: ConstInt):
    factor = ct.load(dloss, (0,), ())
    if given(totals):
        factor = factor / ct.load(totals, (0,), ())
    across = ct.num_tiles(y, axis=1, shape=(1, BLOCK))
    place = ct.bid(0) // across, ct.bid(0) % across
    ct.store(y, place, ct.astype(load(x if given(x) else y, place, 1, BLOCK) * factor, y.dtype))


@opaque(writes=("y",))
def _launch_scale(y: Tensor, x: Tensor | None, dloss: Tensor, totals: Tensor | None) -> None:
    (y,) = as_one_row(y)
    x = None if x is None else x.view_as(y)
    rows, columns = y.shape
    launch(_scale, (rows * blocks(columns, TILE),), y, x, dloss.view(1), totals, TILE)


def _scaled(x: Tensor | None, dtype: torch.dtype, dloss: Tensor, totals: Tensor | None, own: bool) -> Tensor | None:
    """x · dloss, divided by the rows that count when there are `totals`; in `dtype`. Written to x if it is `own`."""
    if x is None:
        return None
    y = x if own and x.dtype is dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_scale(y, None if y is x else x, dloss, totals)
    return y


def _chunks(size: int, most: int) -> list[tuple[int, int]]:
    """The ends of chunks of rows or columns, all about as large. A dynamic size stays dynamic in a trace.

    Matmuls of odd sizes can be several times slower: 32768 rows of 4096 and 128256 columns took an H200 683 ms with
    columns in chunks of 8551, and 221 in chunks of 8576.
    """
    if size <= most:
        return [(0, size)]
    step = 128 if most >= 128 else 1
    most = most // step * step
    count = 1
    while count * most < size:
        count += 1
    each = ((size + count - 1) // count + step - 1) // step * step  # at most `most`, so that no chunk is empty
    return [(i * each, min(i * each + each, size)) for i in range(count)]


# A matmul of half-precision operands added to a float32 tensor: since pytorch#167931; in a trace since pytorch#179634.
_FLOAT32_ADDMM = torch.__version__ >= (2, 10)
_FLOAT32_ADDMM_TRACED = torch.__version__ >= (2, 12)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Total + aᵀ b, in `dtype`; written to total."""
    a = a.t()
    if dtype is torch.float32 and a.dtype is not torch.float32:
        if not a.is_cuda:
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


class _Call:
    """The arguments of a call, with what its losses and gradients have in common."""

    def __init__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        weight_sum: Tensor | None,
        options: Options,
    ) -> None:
        self.x, self.linear_weight, self.bias, self.target = x, linear_weight, bias, target
        self.class_weight, self.weight_sum, self.options = class_weight, weight_sum, options

    def logits(self, first: int, last: int) -> Tensor:
        """Of some rows of x, without the bias, which is added where they are read."""
        return self.x[first:last] @ self.linear_weight.t()

    def run_gradient(
        self,
        dlogits: Tensor,
        logits: Tensor | None,
        statistics: Tensor,
        dloss: Tensor | None,
        totals: Tensor | None,
        first: int = 0,
        first_column: int = 0,
    ) -> None:
        run_gradient(
            dlogits, logits, self.target, self.class_weight, self.weight_sum, statistics, dloss, totals, self.options,
            first, first_column, self.linear_weight.shape[0], self.bias,
        )  # fmt: skip


class _Gradients:
    """The gradients of x, linear_weight and bias, added up over chunks of rows from that of the logits.

    Args:
        dtype: in which linear_weight's is summed.
    """

    def __init__(self, needs: Needs, call: _Call, dtype: torch.dtype) -> None:
        self.needs_x, self.needs_weight, self.needs_bias = needs
        self.call, self.dtype = call, dtype
        self.dx = torch.empty_like(call.x, memory_format=torch.contiguous_format) if self.needs_x else None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def add(self, first: int, last: int, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.mm(dlogits, self.call.linear_weight, out=self.dx[first:last])
        if self.needs_weight:
            self.dweight = _add_product(self.dweight, dlogits, self.call.x[first:last], self.dtype)
        if self.needs_bias:
            dbias = dlogits.sum(0, dtype=torch.float32)
            self.dbias = dbias if self.dbias is None else self.dbias.add_(dbias)

    def add_all(
        self, chunk: int, statistics: Tensor, dloss: Tensor | None, totals: Tensor | None, kept: Tensor | None = None
    ) -> None:
        """Add all rows, a chunk after another, whose logits are computed again unless they were `kept`."""
        rows = self.call.x.shape[0]
        for first, last in _chunks(rows, chunk if kept is None else rows):
            dlogits = self.call.logits(first, last) if kept is None else torch.empty_like(kept)
            self.call.run_gradient(dlogits, kept, statistics, dloss, totals, first)
            self.add(first, last, dlogits)
            del dlogits


def _by_columns(
    needs: Needs, call: _Call, columns: int, statistics: Tensor, dloss: Tensor, totals: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of linear_weight and bias, `columns` of the logits at a time: each a sum that one matmul makes."""
    dweight = torch.empty_like(call.linear_weight, memory_format=torch.contiguous_format)
    dbias = torch.empty_like(call.bias, memory_format=torch.contiguous_format) if needs[2] else None
    for first, last in _chunks(dweight.shape[0], columns):
        logits = call.x @ call.linear_weight[first:last].t()
        call.run_gradient(logits, None, statistics, dloss, totals, first_column=first)
        torch.mm(logits.t(), call.x, out=dweight[first:last])
        if dbias is not None:
            dbias[first:last] = logits.sum(0, dtype=torch.float32)
        del logits
    return dweight, dbias


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
    chunk, by_columns = _plan(x, linear_weight, accum_dtype, memory_budget, needs)
    differentiable, whole = any(needs), chunk >= n and by_columns is None
    made = needs if by_columns is None else (needs[0], False, False)
    at_once = any(made) and not whole and reduction != "none"
    traced = torch.compiler.is_compiling()
    if at_once and traced and memory_budget is not None:
        # What is kept stands beside what is returned.
        room = temporary_memory(chunk, x, linear_weight, accum_dtype=accum_dtype, weight_grad=made[1])
        at_once = _kept_memory(made, x, linear_weight, accum_dtype) <= room

    options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling)
    target = target.contiguous()
    class_weight = None if class_weight is None else class_weight.contiguous()
    weight_sum = weight_sum_of(class_weight, options)
    call = _Call(
        x, linear_weight, None if bias is None else bias.contiguous(), target, class_weight, weight_sum, options
    )
    wanted = {
        "reduction": reduction,
        "return_z_loss": return_z_loss,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }
    rows = new_rows(target, options, differentiable=differentiable, **wanted)
    totals = new_totals(target) if differentiable and reduction == "mean" else None
    gradients = None
    if at_once:
        gradients = _Gradients(made, call, accum_dtype)
        if totals is not None:
            run_totals(totals, target, class_weight, columns, options)

    logits = None
    for first, last in _chunks(n, n if whole else 2 * chunk):
        logits = None  # before the next chunk's are allocated
        logits = call.logits(first, last)
        run_rows(rows, logits, target, class_weight, weight_sum, options, reduction, first, call.bias)
        if gradients is not None:
            call.run_gradient(logits, None, rows.statistics, _counted(totals), totals, first)
            gradients.add(first, last, logits)
    result = reduce(rows, target, class_weight, totals, columns, options, **wanted)
    if not differentiable:
        return result, ()
    saved = x, linear_weight, bias, target, class_weight, weight_sum, rows.statistics, totals, logits if whole else None
    if gradients is None:
        return result, saved
    kept = gradients.dx, gradients.dweight, gradients.dbias
    return result, (*saved, *kept) if traced else (*saved, Once(*kept))


def _plan(
    x: Tensor, linear_weight: Tensor, accum_dtype: torch.dtype, memory_budget: int | None, needs: Needs
) -> tuple[int, int | None]:
    """How many rows of logits to take at a time, half of it where they are kept beside their gradient; how many columns."""
    columns = chunk_columns(memory_budget, x, linear_weight, accum_dtype=accum_dtype, weight_grad=needs[1])
    weight_grad = needs[1] and columns is None
    rows = chunk_rows(memory_budget, x, linear_weight, accum_dtype=accum_dtype, weight_grad=weight_grad)
    return rows, None if columns is None else 2 * columns


def _counted(totals: Tensor | None) -> Tensor | None:
    """A gradient made before the loss's is known is the mean's times the rows that count: the mean's underflows in float16."""
    return None if totals is None else totals[0]


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
    x, linear_weight, bias, target, class_weight, weight_sum, statistics, totals, logits, *kept = saved
    options = options_of(ignore_index, label_smoothing, lse_square_scale, softcap, token_scaling)
    call = _Call(
        x, linear_weight, None if bias is None else bias.contiguous(), target, class_weight, weight_sum, options
    )
    chunk, by_columns = _plan(x, linear_weight, accum_dtype, memory_budget, needs)
    made = needs if by_columns is None else (needs[0], False, False)
    dtype = accum_dtype if logits is None else linear_weight.dtype
    if kept:
        own = isinstance(kept[0], Once)
        if own:
            kept = kept[0].take()
            if kept is None:  # a backward before this one has taken them
                gradients = _Gradients(made, call, dtype)
                gradients.add_all(2 * chunk, statistics, _counted(totals), totals)
                kept = gradients.dx, gradients.dweight, gradients.dbias
        dx, dweight, dbias = kept
        dx = _scaled(dx, x.dtype, dloss, totals, own)
        dweight = _scaled(dweight, linear_weight.dtype, dloss, totals, own)
        dbias = None if dbias is None else _scaled(dbias, bias.dtype, dloss, totals, own)
    else:
        gradients = _Gradients(made, call, dtype)
        if any(made):
            gradients.add_all(2 * chunk, statistics, dloss, totals, logits)
        dx, dweight, dbias = gradients.dx, gradients.dweight, gradients.dbias
        dweight = None if dweight is None else dweight.to(linear_weight.dtype)
        dbias = None if dbias is None else dbias.to(bias.dtype)
    if by_columns is not None:
        dweight, dbias = _by_columns(needs, call, by_columns, statistics, dloss, totals)
    return dx, dweight, dbias
