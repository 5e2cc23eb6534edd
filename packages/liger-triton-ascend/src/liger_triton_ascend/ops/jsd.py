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
from liger_triton_ascend.ops._divergences import above_mixture, count_of, counted_rows, finite, place
from liger_triton_ascend.ops._linear import LINEAR
from liger_triton_ascend.ops._rows import as_rows, element_tiles

TILES = 10
"""Float32 tiles alive, by the estimate, for a beta of one half. Other betas have as many or fewer."""


@triton.jit
def _symmetric(q, p):
    """The divergence for a beta of one half, and its gradient to q, divided by that beta.

    The divergence is the larger probability times s = (1 + e) log(2 / (1 + e)) / 2 − e d / 2, with d = abs(q − p) and
    e = exp(−d). As d goes to 0, s goes to d² / 8, and the difference has no correct digit left. So s is approximated by
    t² A(t) + t e d B(t), t = 1 − e. The error is at most 5e-9, and 1e-5 of s for small d.
    """
    difference = q - p
    distance = tl.minimum(tl.abs(difference), 1e30)  # 1e30 for −inf and −inf as well, whose difference is NaN
    e = tl.exp(-distance)
    t = 1.0 - e
    a = t * 0.003217114834114909 + 0.021360766142606735
    a = t * a - 0.4649123251438141
    a = t * a + 1.705484390258789
    a = t * a - 2.65738582611084
    a = t * a + 1.7388094663619995
    b = t * 0.18248121440410614 - 0.9816567301750183
    b = t * b + 1.9129992723464966
    b = t * b - 1.6138099431991577
    s = t * (t * a + e * distance * b)
    largest = tl.exp(tl.maximum(q, p, propagate_nan=tl.PropagateNan.ALL))
    # log(2 / (1 + e)) is the distance of log M from the larger of q and p.
    above = (e * distance + 2.0 * s) / (1.0 + e)
    less = difference < 0.0
    return largest * s, tl.where(less, largest * e, largest) * tl.where(less, above - distance, above)


@triton.jit
def _divergence(q, p, beta, rest, FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """A term of the divergence, and its gradient to q. The gradient is divided by `rest`, unless that is 0 or 1."""
    if FORWARD:
        probability = tl.exp(p)
        return tl.where(probability == 0.0, 0.0, probability * (p - q)), -probability
    elif REVERSE:
        probability = tl.exp(q)
        divergence = tl.where(probability == 0.0, 0.0, probability * (q - p))
        return divergence, divergence + probability
    elif HALF:
        return _symmetric(q, p)
    else:
        q, p = finite(q), finite(p)
        above_q, above_p = above_mixture(q - p, beta, rest, False)
        gradient = tl.exp(q) * above_q
        return beta * (tl.exp(p) * above_p) + rest * gradient, gradient


@triton.jit
def _run(
    sums, dstudent, scale, student, teacher, labels, rows, columns, student_stride, teacher_stride, ignore_index,
    beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    if dstudent is not None:
        factor = tl.load(scale)
        if not (FORWARD or REVERSE):
            factor *= rest
    lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
        q = tl.load(student + row * student_stride + column, inside, other=float("-inf")).to(tl.float32)
        p = tl.load(teacher + row * teacher_stride + column, inside, other=float("-inf")).to(tl.float32)
        if labels is not None:
            counted = counted_rows(labels, tile, rows, blocks, ignore_index, ROWS)
            q, p = tl.where(counted, q, float("-inf")), tl.where(counted, p, float("-inf"))
        divergence, gradient = _divergence(q, p, beta, rest, FORWARD, REVERSE, HALF)
        lanes += divergence
        if dstudent is not None:
            tl.store(dstudent + row * columns + column, factor * gradient, inside)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(lanes, 1), 0))


def _launch(
    student: Tensor, teacher: Tensor, labels: Tensor | None, scale: Tensor | None, beta: float, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """The sum of all rows' divergences. With a `scale`, its gradient times `scale` as well."""
    dstudent = None if scale is None else torch.empty_like(student, memory_format=torch.contiguous_format)
    flat = labels is None and student.is_contiguous() and teacher.is_contiguous()
    rows, columns = (1, student.numel()) if flat else student.shape
    programs, tile_rows, block = element_tiles(student, rows, columns, TILES)
    sums = torch.empty(programs, dtype=torch.float32, device=student.device)
    (student, student_stride), (teacher, teacher_stride) = as_rows(student), as_rows(teacher)
    _run[(programs,)](
        sums, dstudent, scale, student, teacher, labels, rows, columns, student_stride, teacher_stride, ignore_index,
        beta, 1.0 - beta, FORWARD=beta == 0, REVERSE=beta == 1, HALF=beta == 0.5, ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return sums.sum(), dstudent


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
    count = count_of(student_logprobs, labels, ignore_index)
    arguments = student_logprobs, teacher_logprobs, labels
    now = needs[0] and student_logprobs.dtype is not torch.float16 and not compiling()
    total, dstudent = _launch(*arguments, 1.0 / count if now else None, beta, ignore_index)
    if not needs[0]:
        return total / count, ()
    return total / count, (*arguments, count, SavedOnce(dstudent)) if now else (*arguments, count)


def backward(needs: Needs, saved: Saved, dloss: Tensor, *, beta: float, ignore_index: int) -> tuple[Tensor | None, ...]:
    student, teacher, labels, count, *rest = saved
    arguments = student, teacher, labels
    if not rest:
        return (_launch(*arguments, dloss / count, beta, ignore_index)[1],)
    gradients = rest[0].take()
    # If an earlier backward has taken the gradient, it is made again, with the same bits.
    dstudent = _launch(*arguments, 1.0 / count, beta, ignore_index)[1] if gradients is None else gradients[0]
    return (LINEAR.scaled(dstudent, student.dtype, dloss, None, own=True),)
