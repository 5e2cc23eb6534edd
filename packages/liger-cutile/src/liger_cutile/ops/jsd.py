"""Jensen-Shannon divergence: one pass over both tensors makes the loss and its gradient.

Forward makes the gradient, for a loss whose own gradient is 1. Backward touches it only if that is another number. In a trace,
and in float16, where the gradient could underflow before it is scaled, backward reads both tensors again and makes it.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import jsd
from liger_core.contract import Needs, Saved, SavedOnce, compiling, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._divergences import (
    OCCUPANCY,
    TILE_BYTES,
    above_mixture,
    any_of,
    finite,
    launch_count,
    launch_scale,
    launch_total,
    load,
    load_counted,
    persistent,
    place,
    store_beside_labels,
    tile_count,
    tile_of,
)
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import exp
from liger_cutile.ops._rows import as_one_row, as_rows


@ct.function
def _symmetric(q, p, EXACT):
    """The divergence for a beta of one half, and its gradient to q.

    The divergence is the larger probability times s = (1 + e) log(2 / (1 + e)) / 2 − e d / 2, with d = abs(q − p) and
    e = exp(−d). As d goes to 0, s goes to d² / 8, and the difference has no correct digit left. So s is approximated by
    t² A(t) + t e d B(t), t = 1 − e. The error is at most 5e-9, and 1e-5 of s for small d.
    """
    difference = q - p
    distance = ct.minimum(ct.abs(difference), 1e30)  # 1e30 for −inf and −inf as well, whose difference is NaN
    e = ct.exp2(distance * -1.4426950408889634, flush_to_zero=True)
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
    largest = exp(ct.maximum(q, p, propagate_nan=True), EXACT)
    # log(2 / (1 + e)) is the distance of log M from the larger of q and p. 1 / x takes more instructions than rsqrt.
    r = ct.rsqrt(1.0 + e, flush_to_zero=True)
    above = (e * distance + 2.0 * s) * r * r
    less = difference < 0.0
    return largest * s, ct.where(less, largest * e, largest) * ct.where(less, above - distance, above)


@ct.function
def _divergence(q, p, beta, rest, FORWARD, REVERSE, HALF, EXACT):
    """A term of the divergence, and its gradient to q. The gradient is divided by `rest`, unless that is 0 or 1."""
    if FORWARD:
        probability = exp(p, EXACT)
        divergence = ct.where(probability == 0.0, 0.0, probability * (p - q))
        gradient = -probability
    elif REVERSE:
        probability = exp(q, EXACT)
        divergence = ct.where(probability == 0.0, 0.0, probability * (q - p))
        gradient = divergence + probability
    elif HALF:
        divergence, gradient = _symmetric(q, p, EXACT)
    else:
        q = finite(q)
        p = finite(p)
        above_q, above_p = above_mixture(q - p, beta, rest, False, 1.0)
        gradient = exp(q, EXACT) * above_q
        divergence = beta * (exp(p, EXACT) * above_p) + rest * gradient
    return divergence, gradient


@ct.function
def _load_both(student, teacher, labels, at, ignore_index, ROWS, BLOCK):
    """Log-probabilities; -inf in rows that don't count. A tile is only read if it has a row that counts."""
    if given(labels):
        counted = load_counted(labels, at[0], ignore_index, ROWS)
        q = ct.full((ROWS, BLOCK), -float("inf"), ct.float32)
        p = q
        if any_of(counted):
            q = ct.where(counted, load(student, at, ROWS, BLOCK), q)
            p = ct.where(counted, load(teacher, at, ROWS, BLOCK), p)
    else:
        q, p = load(student, at, ROWS, BLOCK), load(teacher, at, ROWS, BLOCK)
    return q, p


@ct.kernel(occupancy=OCCUPANCY)
def _divergences(
    sums, dstudent, dloss, student, teacher, labels, count, ignore_index: ct.ScalarInt64, beta, rest, scale,
    FORWARD: ConstBool, REVERSE: ConstBool, HALF: ConstBool, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    if given(count):
        scale = scale / ct.load(count, (0,), ())
    if given(dloss):
        scale = scale * ct.load(dloss, (0,), ())
    lanes = ct.zeros((ROWS, BLOCK), ct.float32)
    for tile in range(ct.bid(0), tile_count(student, ROWS, BLOCK), ct.num_blocks(0)):
        at = place(student, tile, ROWS, BLOCK)
        q, p = _load_both(student, teacher, labels, at, ignore_index, ROWS, BLOCK)
        divergence, gradient = _divergence(q, p, beta, rest, FORWARD, REVERSE, HALF, EXACT)
        if given(sums):
            lanes += divergence
        if given(dstudent):
            store_beside_labels(dstudent, at, scale * gradient, labels, ROWS)
    if given(sums):
        ct.store(sums, (ct.bid(0),), ct.sum(lanes))


@opaque(writes=("loss", "dstudent", "count"))
def _launch_forward(
    loss: Tensor,
    dstudent: Tensor | None,
    count: Tensor | None,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    beta: float,
    ignore_index: int,
) -> None:
    if count is not None:
        launch_count(count, labels, ignore_index)
    sums = _run(True, dstudent, None, student, teacher, labels, count, beta, ignore_index)
    launch_total(loss.view(1), sums, count, student.shape[0] if count is None else 1)


@opaque(writes=("dstudent",))
def _launch_backward(
    dstudent: Tensor,
    dloss: Tensor | None,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    count: Tensor | None,
    beta: float,
    ignore_index: int,
) -> None:
    if dloss is not None:
        dloss = dloss.view(1)
    _run(False, dstudent, dloss, student, teacher, labels, count, beta, ignore_index)


def _run(
    summed: bool,
    dstudent: Tensor | None,
    dloss: Tensor | None,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    count: Tensor | None,
    beta: float,
    ignore_index: int,
) -> Tensor | None:
    """Write the gradient of the mean times `dloss`, which is 1 if None. If `summed`, return the sums of the blocks' terms."""
    beta = float(beta)
    scale = 1.0 if beta in (0.0, 1.0) else 1.0 - beta
    if count is None:
        scale /= student.shape[0]
        student, teacher = as_one_row(student, teacher)
    else:
        student, teacher, labels = as_rows(student), as_rows(teacher), labels.contiguous()
    if dstudent is not None:
        dstudent = as_rows(dstudent.view_as(student))
    # If rows may not count, tiles have half the size: larger ones spill (tileiras 13.4, sm_90).
    rows, block = tile_of(student, TILE_BYTES if labels is None else TILE_BYTES // 2)
    grid = persistent(student, rows, block)
    sums = torch.empty(grid, dtype=torch.float32, device=student.device) if summed else None
    launch(
        _divergences, (grid,), sums, dstudent, dloss, student, teacher, labels, count, ignore_index, beta, 1.0 - beta,
        scale, beta == 0.0, beta == 1.0, beta == 0.5, student.dtype is torch.float32, rows, block,
    )  # fmt: skip
    return sums


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
    loss = torch.empty((), dtype=torch.float32, device=student_logprobs.device)
    count = None if labels is None else torch.empty(1, dtype=torch.float32, device=student_logprobs.device)
    now = needs[0] and student_logprobs.dtype is not torch.float16 and not compiling()
    dstudent = torch.empty_like(student_logprobs, memory_format=torch.contiguous_format) if now else None
    _launch_forward(loss, dstudent, count, student_logprobs, teacher_logprobs, labels, beta, ignore_index)
    if not needs[0]:
        return loss, ()
    arguments = student_logprobs, teacher_logprobs, labels, count
    return loss, (*arguments, SavedOnce(dstudent)) if now else arguments


def backward(needs: Needs, saved: Saved, dloss: Tensor, *, beta: float, ignore_index: int) -> tuple[Tensor | None, ...]:
    student, teacher, labels, count, *last = saved
    gradients = last[0].take() if last else None
    if gradients is not None:
        (dstudent,) = gradients
    else:
        dstudent = torch.empty_like(student, memory_format=torch.contiguous_format)
        # An earlier backward has taken the gradient: it is made again, with the same bits.
        _launch_backward(dstudent, None if last else dloss, student, teacher, labels, count, beta, ignore_index)
    if last:
        launch_scale(dstudent, dloss)
    return (dstudent,)
