"""Jensen-Shannon divergence: one pass over both tensors makes the loss and its gradient.

Forward makes the gradient, for a loss whose own gradient is 1. Backward touches it only if that is another number. In a trace,
and in float16, where the gradient could underflow before it is scaled, backward reads both tensors again and makes it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.contract import Needs, Saved, SavedOnce, compiling, implements
from liger_core.ops.jsd import jsd
from liger_triton.ops._divergences import (
    above_mixture,
    count_of,
    finite,
    leaves_first,
    new_sums,
    place,
    scale_,
    tiles_of,
    total,
    weight_of,
)
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import exp
from liger_triton.ops._rows import as_rows


@triton.jit
def _symmetric(q, p, EXACT: tl.constexpr):
    """The divergence for a beta of one half, and its gradient to q.

    The divergence is the larger probability times s = (1 + e) log(2 / (1 + e)) / 2 − e d / 2, with d = abs(q − p) and
    e = exp(−d). As d goes to 0, s goes to d² / 8, and the difference has no correct digit left. So s is approximated by
    t² A(t) + t e d B(t), t = 1 − e. The error is at most 5e-9, and 1e-5 of s for small d.
    """
    difference = q - p
    distance = tl.minimum(tl.abs(difference), 1e30)  # 1e30 for −inf and −inf as well, whose difference is NaN
    e = tl.exp2(distance * -1.4426950408889634)
    t = 1.0 - e
    a = tl.fma(t, 0.003217114834114909, 0.021360766142606735)
    a = tl.fma(t, a, -0.4649123251438141)
    a = tl.fma(t, a, 1.705484390258789)
    a = tl.fma(t, a, -2.65738582611084)
    a = tl.fma(t, a, 1.7388094663619995)
    b = tl.fma(t, 0.18248121440410614, -0.9816567301750183)
    b = tl.fma(t, b, 1.9129992723464966)
    b = tl.fma(t, b, -1.6138099431991577)
    s = t * tl.fma(t, a, e * distance * b)
    largest = exp(tl.maximum(q, p, propagate_nan=tl.PropagateNan.ALL), EXACT)
    # log(2 / (1 + e)) is the distance of log M from the larger of q and p. 1 / x takes four more instructions than rsqrt.
    r = tl.rsqrt(1.0 + e)
    above = tl.fma(e, distance, 2.0 * s) * r * r
    less = difference < 0.0
    return largest * s, tl.where(less, largest * e, largest) * tl.where(less, above - distance, above)


@triton.jit
def _divergence(
    q, p, beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A term of the divergence, and its gradient to q. The gradient is divided by `rest`, unless that is 0 or 1."""
    if FORWARD:
        probability = exp(p, EXACT)
        return tl.where(probability == 0.0, 0.0, probability * (p - q)), -probability
    elif REVERSE:
        probability = exp(q, EXACT)
        divergence = tl.where(probability == 0.0, 0.0, probability * (q - p))
        return divergence, divergence + probability
    elif HALF:
        return _symmetric(q, p, EXACT)
    else:
        q, p = finite(q), finite(p)
        above_q, above_p = above_mixture(q - p, beta, rest, False, 1.0)
        gradient = exp(q, EXACT) * above_q
        return beta * (exp(p, EXACT) * above_p) + rest * gradient, gradient


@kernel(do_not_specialize=["divisor", "apart"])
def _run(
    sums, dstudent, dloss, student, teacher, labels, count, rows, columns, blocks, student_stride, teacher_stride,
    ignore_index, beta, rest, divisor, apart,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, LEAVES_FIRST: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    policy: tl.constexpr = "evict_first" if LEAVES_FIRST else ""
    # torch.compile passes floats as float64.
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    if dstudent is not None:
        scale = weight_of(count, divisor)
        if not (FORWARD or REVERSE):
            scale *= rest
        if dloss is not None:
            scale *= tl.load(dloss)
    sum_lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
        counted = inside
        if labels is not None:
            counted &= tl.load(labels + row, row < rows, other=ignore_index) != ignore_index
        q = tl.load(student + row * student_stride + column, counted, other=-float("inf"), eviction_policy=policy)
        p = tl.load(teacher + row * teacher_stride + column, counted, other=-float("inf"), eviction_policy=policy)
        q, p = q.to(tl.float32), p.to(tl.float32)
        divergence, gradient = _divergence(q, p, beta, rest, FORWARD, REVERSE, HALF, EXACT)
        sum_lanes += divergence
        if dstudent is not None:
            at = row * columns + column
            if apart is not None:
                at += apart
            tl.store(dstudent + at, scale * gradient, inside)
    if sums is not None:
        tl.store(sums + tl.program_id(0), tl.sum(sum_lanes))


def _launch(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    count: Tensor | None,
    dloss: Tensor | None,
    beta: float,
    ignore_index: int,
    differentiable: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sums of the programs' terms. If `differentiable`, also their mean's gradient times `dloss`, which is 1 if None."""
    dstudent = torch.empty_like(student, memory_format=torch.contiguous_format) if differentiable else None
    flat = labels is None and student.is_contiguous() and teacher.is_contiguous()
    tiles = tiles_of(student, flat)
    sums = new_sums(tiles, student.device)
    divisor = student.shape[0] if count is None else 1
    # How many elements a thread stores at once decides which it loads, and so in which order terms are added up. Where it can't
    # load several at once, a 0 that no compiler knows of keeps it from storing several. Else a loss without a gradient would have
    # other bits.
    apart = None
    if flat:
        student_stride = teacher_stride = tiles.columns
    else:
        student, student_stride = as_rows(student)
        teacher, teacher_stride = as_rows(teacher)
    if dstudent is not None and not compiling():
        unaligned = student.data_ptr() % 16 or teacher.data_ptr() % 16 or student_stride % 16 or teacher_stride % 16
        apart = 0 if unaligned else None
    _run[(sums.shape[0],)](
        sums, dstudent, dloss, student, teacher, labels, count, tiles.rows, tiles.columns, tiles.blocks,
        student_stride, teacher_stride, ignore_index, beta, 1.0 - beta, divisor, apart,
        FORWARD=beta == 0, REVERSE=beta == 1, HALF=beta == 0.5, EXACT=student.dtype is torch.float32,
        LEAVES_FIRST=leaves_first(student, differentiable), WHOLE=tiles.whole, ROWS=tiles.height, BLOCK=tiles.width,
        num_warps=4,
    )  # fmt: skip
    return sums, dstudent


@implements(jsd)
def forward(
    needs: Needs,
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> tuple[Tensor, Saved]:
    labels = None if labels is None else labels.contiguous()
    count = None if labels is None else count_of(labels, ignore_index)
    arguments = student_logprobs, teacher_logprobs, labels, count
    now = needs[0] and student_logprobs.dtype is not torch.float16 and not compiling()
    sums, dstudent = _launch(*arguments, None, beta, ignore_index, now)
    loss = total(sums, count, student_logprobs.shape[0] if count is None else 1)
    if not needs[0]:
        return loss, ()
    return loss, (*arguments, SavedOnce(dstudent)) if now else arguments


def backward(needs: Needs, saved: Saved, dloss: Tensor, *, beta: float, ignore_index: int) -> tuple[Tensor | None, ...]:
    *arguments, last = saved
    if not isinstance(last, SavedOnce):
        return (_launch(*saved, dloss, beta, ignore_index, True)[1],)
    gradients = last.take()
    # If an earlier backward has taken the gradient, it is made again, with the same bits.
    dstudent = _launch(*arguments, None, beta, ignore_index, True)[1] if gradients is None else gradients[0]
    return (scale_(dstudent, dloss),)
