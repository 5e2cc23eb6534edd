"""Jensen-Shannon divergence of two linear layers: rows in chunks, whose logits PyTorch's matmul computes.

When one chunk holds all rows, both logits are kept for backward, as an unfused model does. Otherwise a chunk's student
logits are overwritten with their gradient, which becomes the gradients of the arguments at once; backward has only to
scale those. The teacher's logits are no more than read, so they are computed for few rows of a chunk at a time: fewer
chunks, each of which reads and writes the accumulator of the weight's gradient, fit the same memory.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import fused_linear_jsd
from liger_core.contract import Needs, Once, Saved, implements
from liger_core.opaque import opaque
from liger_core.ops.fused_linear_cross_entropy import chunk_rows, temporary_memory
from liger_cutile.ops._divergences import above_mixture, finite, launch_count, launch_total
from liger_cutile.ops._launch import MOST_BLOCKS, ConstBool, ConstInt, given, launch
from liger_cutile.ops._rows import blocks, power_of_2
from liger_cutile.ops.fused_linear_cross_entropy import _add_product, _chunks, _scaled

# Of a tile of logits, and blocks on a multiprocessor, whose loads go into registers: the rows of fewer blocks are in the
# cache still when they are read again.
ROW_BYTES, ROW_OCCUPANCY = 8192, 4
GRADIENT_BYTES, GRADIENT_OCCUPANCY = 4096, 8
# What a thread loads at once: what a loop adds up of it stays in the thread.
GROUP_BYTES = 16

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Stands for -inf where differences are taken: that of two is 0.
LEAST = -3.4028234663852886e38


@ct.function
def _load(logits, row, tile, BLOCK, GROUP):
    """A row's tile in float32, ``[BLOCK / GROUP, GROUP]``; -inf outside."""
    x = ct.load(logits, (row, tile), (1, BLOCK), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
    return ct.astype(ct.reshape(x, (BLOCK // GROUP, GROUP)), ct.float32)


@ct.function
def _exp2(x):
    return ct.exp2(x, flush_to_zero=True)


@ct.function
def _top_and_log_sum(logits, row, scale, BLOCK, GROUP):
    """The largest logit of a row, and log2 of the sum of 2^(scale · (logit − largest))."""
    maximum = ct.full((BLOCK // GROUP, 1), LEAST, ct.float32)
    total = ct.zeros((BLOCK // GROUP, 1), ct.float32)
    for tile in range(ct.num_tiles(logits, axis=1, shape=(1, BLOCK))):
        x = _load(logits, row, tile, BLOCK, GROUP)
        higher = ct.maximum(maximum, ct.max(x, axis=1, keepdims=True))
        sums = ct.sum(_exp2((x - higher) * scale), axis=1, keepdims=True)
        total = total * _exp2((maximum - higher) * scale) + sums
        maximum = higher
    top = ct.max(maximum)
    return top, ct.log2(ct.sum(total * _exp2((maximum - top) * scale)))


@ct.function
def _log2_probability(x, top, scale, log_sum):
    return finite((x - top) * scale - log_sum)


@ct.function
def _above(q, p, beta, rest, FORWARD, REVERSE, HALF):
    """What log2 probabilities exceed those by that they are compared with, the student's and the teacher's."""
    if FORWARD or REVERSE:
        return q - p, p - q
    else:
        return above_mixture(q, p, beta, rest, HALF, LOG2_E)


@ct.function
def _ignored(labels, row, ignore_index):
    if given(labels):
        return ct.load(labels, (row,), ()) == ignore_index
    else:
        return False


@ct.kernel(occupancy=ROW_OCCUPANCY)
def _rows(
    losses, statistics, student, teacher, labels, first, ignore_index: ct.ScalarInt64, scale, beta, rest,
    FORWARD: ConstBool, REVERSE: ConstBool, HALF: ConstBool, BLOCK: ConstInt, GROUP: ConstInt,
):  # fmt: skip
    for local in range(ct.bid(0), student.shape[0], ct.num_blocks(0)):
        row = first + local
        if _ignored(labels, row, ignore_index):
            ct.store(losses, (row,), 0.0)
        else:
            q_top, q_log_sum = _top_and_log_sum(student, local, scale, BLOCK, GROUP)
            p_top, p_log_sum = _top_and_log_sum(teacher, local, scale, BLOCK, GROUP)
            from_q = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            from_p = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            # Backwards: what was read last is in the cache still.
            tiles = ct.num_tiles(student, axis=1, shape=(1, BLOCK))
            for back in range(tiles):
                tile = tiles - 1 - back
                q = _log2_probability(_load(student, local, tile, BLOCK, GROUP), q_top, scale, q_log_sum)
                p = _log2_probability(_load(teacher, local, tile, BLOCK, GROUP), p_top, scale, p_log_sum)
                above_q, above_p = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
                from_q += ct.sum(_exp2(q) * above_q, axis=1, keepdims=True)
                from_p += ct.sum(_exp2(p) * above_p, axis=1, keepdims=True)
            from_student, from_teacher = ct.sum(from_q), ct.sum(from_p)
            if FORWARD:
                loss = from_teacher
            elif REVERSE:
                loss = from_student
            else:
                loss = rest * from_student + beta * from_teacher
            ct.store(losses, (row,), loss * LN_2)
            if given(statistics):
                ct.store(statistics, (0, row), q_top)
                ct.store(statistics, (1, row), q_log_sum)
                ct.store(statistics, (2, row), p_top)
                ct.store(statistics, (3, row), p_log_sum)
                ct.store(statistics, (4, row), from_student)


@ct.kernel(occupancy=GRADIENT_OCCUPANCY)
def _gradient(
    dstudent, student, teacher, statistics, labels, dloss, count, first, ignore_index: ct.ScalarInt64,
    scale, factor, beta, rest,
    FORWARD: ConstBool, REVERSE: ConstBool, HALF: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    across = ct.num_tiles(dstudent, axis=1, shape=(1, BLOCK))
    for index in range(ct.bid(0), dstudent.shape[0] * across, ct.num_blocks(0)):
        local, tile = index // across, index % across
        row = first + local
        if _ignored(labels, row, ignore_index):
            ct.store(dstudent, (local, tile), ct.zeros((1, BLOCK), dstudent.dtype), allow_tma=False)
        else:
            q_top, q_log_sum = ct.load(statistics, (0, row), ()), ct.load(statistics, (1, row), ())
            p_top, p_log_sum = ct.load(statistics, (2, row), ()), ct.load(statistics, (3, row), ())
            x = _load(student if given(student) else dstudent, local, tile, BLOCK, BLOCK)
            q = _log2_probability(x, q_top, scale, q_log_sum)
            p = _log2_probability(_load(teacher, local, tile, BLOCK, BLOCK), p_top, scale, p_log_sum)
            if FORWARD:
                gradient = _exp2(q) - _exp2(p)
            else:
                # Of a log-softmax: a class's part of the sum, without its probability's share of the whole sum.
                above_q, _ = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
                gradient = _exp2(q) * (above_q - ct.load(statistics, (4, row), ()))
            by = factor
            if given(dloss):
                by = factor * (ct.load(dloss, (0,), ()) / ct.load(count, (0,), ()))
            ct.store(dstudent, (local, tile), ct.astype(by * gradient, dstudent.dtype), allow_tma=False)


@opaque(writes=("losses", "statistics"))
def _launch_rows(
    losses: Tensor,
    statistics: Tensor | None,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    first: int,
    ignore_index: int,
    temperature: float,
    beta: float,
) -> None:
    rows, size = student.shape[0], max(student.element_size(), teacher.element_size())
    launch(
        _rows, (min(rows, MOST_BLOCKS),), losses, statistics, student, teacher, labels, first, ignore_index,
        LOG2_E / temperature, float(beta), 1.0 - beta, *_kind(beta), ROW_BYTES // size, GROUP_BYTES // size,
    )  # fmt: skip


@opaque(writes=("dstudent",))
def _launch_gradient(
    dstudent: Tensor,
    student: Tensor | None,
    teacher: Tensor,
    statistics: Tensor,
    labels: Tensor | None,
    dloss: Tensor | None,
    count: Tensor,
    first: int,
    ignore_index: int,
    temperature: float,
    beta: float,
) -> None:
    rows, columns = dstudent.shape
    block = min(power_of_2(columns), GRADIENT_BYTES // max(dstudent.element_size(), teacher.element_size()))
    factor = {0: 1.0, 1: LN_2}.get(beta, (1.0 - beta) * LN_2) / temperature
    launch(
        _gradient, (min(rows * blocks(columns, block), MOST_BLOCKS),), dstudent, student, teacher, statistics, labels,
        None if dloss is None else dloss.view(1), count, first, ignore_index,
        LOG2_E / temperature, factor, float(beta), 1.0 - beta, *_kind(beta), block,
    )  # fmt: skip


@opaque(writes=("count",))
def _launch_count(count: Tensor, labels: Tensor, ignore_index: int) -> None:
    launch_count(count, labels, ignore_index)


@opaque(writes=("loss",))
def _launch_loss(loss: Tensor, losses: Tensor, count: Tensor) -> None:
    launch_total(loss.view(1), losses, count, 1.0)


def _kind(beta: float) -> tuple[bool, bool, bool]:
    return beta == 0, beta == 1, beta == 0.5


class _Call:
    """The arguments of a call, and the kernels launched with them."""

    def __init__(
        self,
        student_x: Tensor,
        student_weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        labels: Tensor | None,
        beta: float,
        ignore_index: int,
        temperature: float,
    ) -> None:
        self.student_x, self.student_weight = student_x, student_weight
        self.teacher_x, self.teacher_weight = teacher_x, teacher_weight
        self.labels = None if labels is None else labels.contiguous()
        self.options = ignore_index, temperature, beta

    def run_rows(self, losses: Tensor, statistics: Tensor | None, student: Tensor, teacher: Tensor, first: int) -> None:
        """Write the losses of the rows from `first` on, and what their gradient needs."""
        _launch_rows(losses, statistics, student, teacher, self.labels, first, *self.options)

    def run_gradient(
        self,
        dstudent: Tensor,
        student: Tensor | None,
        teacher: Tensor,
        statistics: Tensor,
        dloss: Tensor | None,
        count: Tensor,
        first: int = 0,
    ) -> None:
        """Write the gradient of the student's logits, which for no `student` are in `dstudent`; of Σ losses for no `dloss`."""
        _launch_gradient(dstudent, student, teacher, statistics, self.labels, dloss, count, first, *self.options)

    def run(
        self,
        rows: tuple[int, int],
        losses: Tensor | None,
        statistics: Tensor | None,
        gradients: "_Gradients | None",
        dloss: Tensor | None,
        count: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write what isn't None, for all rows, so many of the student's and of the teacher's logits at a time.

        Returns:
            Both logits, when that is all rows and there are no `gradients`.
        """
        student = teacher = part = None
        for first, last in _chunks(self.student_x.shape[0], rows[0]):
            student = teacher = part = None  # before the next chunk's are allocated
            student = self.student_x[first:last] @ self.student_weight.t()
            for start, end in _chunks(last - first, rows[1]):
                teacher = None
                teacher = self.teacher_x[first + start : first + end] @ self.teacher_weight.t()
                part = student[start:end]
                if losses is not None:
                    self.run_rows(losses, statistics, part, teacher, first + start)
                if gradients is not None:
                    self.run_gradient(part, None, teacher, statistics, dloss, count, first + start)
            if gradients is not None:
                teacher = None
                gradients.add(first, last, student)
        return student, teacher


class _Gradients:
    """The gradients of student_x and student_weight, added up over chunks of rows from that of the logits.

    Args:
        dtype: in which student_weight's is summed.
    """

    def __init__(self, needs: Needs, call: _Call, dtype: torch.dtype) -> None:
        self.needs_weight = needs[1]
        self.call, self.dtype = call, dtype
        self.dx = torch.empty_like(call.student_x, memory_format=torch.contiguous_format) if needs[0] else None
        self.dweight: Tensor | None = None

    def add(self, first: int, last: int, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.mm(dlogits, self.call.student_weight, out=self.dx[first:last])
        if self.needs_weight:
            self.dweight = _add_product(self.dweight, dlogits, self.call.student_x[first:last], self.dtype)


def _plan(
    call: _Call, accum_dtype: torch.dtype, memory_budget: int | None, needs: Needs
) -> tuple[tuple[int, int], bool, bool]:
    """How many rows of the student's and of the teacher's logits to take at a time; whether to keep logits, or gradients.

    A budget has room for the student's logits beside their gradient, which here take the same memory.
    """
    given = call.student_x, call.student_weight
    budgeted = {"accum_dtype": accum_dtype, "weight_grad": needs[1], "teacher_x": call.teacher_x}
    chunk = chunk_rows(memory_budget, *given, **budgeted)
    rows = call.student_x.shape[0]
    if chunk >= rows:
        return (rows, rows), True, False
    room = True
    if memory_budget is not None and torch.compiler.is_compiling():
        kept = call.student_x.numel() * call.student_x.dtype.itemsize if needs[0] else 0
        kept += call.student_weight.numel() * accum_dtype.itemsize if needs[1] else 0
        room = kept <= temporary_memory(chunk, *given, **budgeted)  # they stand beside those that are returned
    # cuBLAS needs a few hundred rows for its full speed.
    return (chunk if memory_budget is None else 2 * chunk, min(chunk, max(256, chunk // 8))), False, room


@implements(fused_linear_jsd)
def forward(
    needs: Needs,
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> tuple[Tensor, Saved]:
    call = _Call(student_x, student_weight, teacher_x, teacher_weight, labels, beta, ignore_index, temperature)
    n, differentiable = student_x.shape[0], any(needs)
    rows, whole, room = _plan(call, accum_dtype, memory_budget, needs)
    losses = torch.empty(n, dtype=torch.float32, device=student_x.device)
    statistics = losses.new_empty((5, n)) if differentiable else None
    count = losses.new_full((1,), n) if labels is None else losses.new_empty(1)
    if labels is not None:
        _launch_count(count, call.labels, ignore_index)
    gradients = _Gradients(needs, call, accum_dtype) if differentiable and room else None
    logits = call.run(rows, losses, statistics, gradients, None, count)
    loss = losses.new_empty(())
    _launch_loss(loss, losses, count)
    if not differentiable:
        return loss, ()
    saved = student_x, student_weight, teacher_x, teacher_weight, call.labels, statistics, count
    if gradients is None:
        return loss, (*saved, *logits) if whole else saved
    kept = gradients.dx, gradients.dweight
    return loss, (*saved, *kept) if torch.compiler.is_compiling() else (*saved, Once(*kept))


def backward(
    needs: Needs,
    saved: Saved,
    dloss: Tensor,
    *,
    beta: float,
    ignore_index: int,
    temperature: float,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
) -> tuple[Tensor | None, ...]:
    *given, statistics, count = saved[:7]
    kept = saved[7:]
    call = _Call(*given, beta, ignore_index, temperature)
    rows, whole, room = _plan(call, accum_dtype, memory_budget, needs)
    n, dtype = call.student_x.shape[0], call.student_weight.dtype
    if whole:
        gradients = _Gradients(needs, call, dtype)
        dstudent = torch.empty_like(kept[0])
        call.run_gradient(dstudent, *kept, statistics, dloss, count)
        gradients.add(0, n, dstudent)
        return gradients.dx, gradients.dweight
    if not room:
        gradients = _Gradients(needs, call, accum_dtype)
        call.run(rows, None, statistics, gradients, dloss, count)
        return gradients.dx, None if gradients.dweight is None else gradients.dweight.to(dtype)
    own = isinstance(kept[0], Once)
    if own:
        kept = kept[0].take()
        if kept is None:  # a backward before this one has taken them
            gradients = _Gradients(needs, call, accum_dtype)
            call.run(rows, None, statistics, gradients, None, count)
            kept = gradients.dx, gradients.dweight
    dx, dweight = kept
    return _scaled(dx, call.student_x.dtype, dloss, count, own), _scaled(dweight, dtype, dloss, count, own)
