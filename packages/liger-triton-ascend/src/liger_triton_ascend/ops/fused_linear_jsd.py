"""Jensen-Shannon divergence of two linear layers: rows in chunks, whose logits PyTorch's matmul computes.

When one chunk holds all rows, both logits are kept for backward, as an unfused model does. Otherwise a chunk's student
logits are overwritten with their gradient, which becomes the gradients of the arguments at once; backward has only to
scale those. The teacher's logits are no more than read, so they are computed for few rows of a chunk at a time: fewer
chunks, each of which reads and writes the accumulator of the weight's gradient, fit the same memory.

A vocabulary seldom fits the Unified Buffer, so each program takes one row after another, block by block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.contract import Needs, Once, Saved, implements
from liger_core.ops.fused_linear_cross_entropy import chunk_rows, temporary_memory
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_triton_ascend.ops._divergences import above_mixture, count_of, finite
from liger_triton_ascend.ops._exponentials import LANES, top_and_sum
from liger_triton_ascend.ops._long_rows import long_row_blocks
from liger_triton_ascend.ops._products import add_product, chunks, takes_memory
from liger_triton_ascend.ops._scale import scaled

# Tiles alive, by the estimate for float32: of the loops that add up exponentials, of the one that adds up divergences, and
# of the gradient.
SUM_TILES = 4.5
FORWARD_TILES = 10
BACKWARD_TILES = 9


@triton.jit
def _log_probability(row, column, inside, top, scale, log_sum):
    x = tl.load(row + column, inside, other=float("-inf")).to(tl.float32)
    return finite((x - top) * scale - log_sum)


@triton.jit
def _above(q, p, beta, rest, FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """What log-probabilities exceed those by that they are compared with, the student's and the teacher's."""
    if FORWARD or REVERSE:
        return q - p, p - q
    else:
        return above_mixture(q, p, beta, rest, HALF)


@triton.jit
def _rows(
    losses, statistics, student, teacher, labels, columns, first, count, rows, ignore_index, scale, beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr,
    SUM_BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        at = first + tl.cast(index, tl.int64)
        q_row = student + tl.cast(index, tl.int64) * columns
        p_row = teacher + tl.cast(index, tl.int64) * columns
        end = columns
        if labels is not None:
            end = tl.where(tl.load(labels + at) == ignore_index, 0, columns)  # a row that doesn't count is not read
        q_top, q_sum = top_and_sum(q_row, end, scale, SUM_BLOCK, LANES)
        p_top, p_sum = top_and_sum(p_row, end, scale, SUM_BLOCK, LANES)
        q_log_sum, p_log_sum = tl.log(q_sum), tl.log(p_sum)
        from_q = tl.zeros((BLOCK,), tl.float32)
        from_p = tl.zeros((BLOCK,), tl.float32)
        all_q = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, end, BLOCK):
            column = start + lane
            q = _log_probability(q_row, column, column < columns, q_top, scale, q_log_sum)
            p = _log_probability(p_row, column, column < columns, p_top, scale, p_log_sum)
            above_q, above_p = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
            if not FORWARD:
                probability = tl.exp(q)
                from_q += probability * above_q
                all_q += probability
            if not REVERSE:
                from_p += tl.exp(p) * above_p
        from_student, from_teacher = tl.sum(from_q, 0), tl.sum(from_p, 0)
        if FORWARD:
            loss = from_teacher
        elif REVERSE:
            loss = from_student
        else:
            loss = rest * from_student + beta * from_teacher
        tl.store(losses + at, loss)
        if statistics is not None:
            tl.store(statistics + at, q_top)
            tl.store(statistics + rows + at, q_log_sum)
            tl.store(statistics + 2 * rows + at, p_top)
            tl.store(statistics + 3 * rows + at, p_log_sum)
            # By the sum of the probabilities, which is 1 but for the rounding of its logarithm: that then cancels.
            tl.store(statistics + 4 * rows + at, from_student if FORWARD else from_student / tl.sum(all_q, 0))


@triton.jit
def _gradient(
    dstudent, statistics, student, teacher, labels, dloss, columns, first, count, rows, ignore_index, scale, beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    factor = tl.load(dloss) * scale
    if not (FORWARD or REVERSE):
        factor *= rest
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        at = first + tl.cast(index, tl.int64)
        q_row = student + tl.cast(index, tl.int64) * columns
        p_row = teacher + tl.cast(index, tl.int64) * columns
        dq_row = dstudent + tl.cast(index, tl.int64) * columns
        end = columns
        if labels is not None:
            end = tl.where(tl.load(labels + at) == ignore_index, 0, columns)
        q_top, q_log_sum = tl.load(statistics + at), tl.load(statistics + rows + at)
        p_top, p_log_sum = tl.load(statistics + 2 * rows + at), tl.load(statistics + 3 * rows + at)
        from_student = tl.load(statistics + 4 * rows + at)
        for start in range(0, end, BLOCK):
            column = start + lane
            inside = column < columns
            q = _log_probability(q_row, column, inside, q_top, scale, q_log_sum)
            p = _log_probability(p_row, column, inside, p_top, scale, p_log_sum)
            if FORWARD:
                gradient = tl.exp(q) - tl.exp(p)
            else:
                # Of a log-softmax: a class's part of the sum, without its probability's share of the whole sum.
                above_q, _ = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
                gradient = tl.exp(q) * (above_q - from_student)
            tl.store(dq_row + column, factor * gradient, inside)
        for start in range(end, columns, BLOCK):  # all of a row that doesn't count, or nothing
            tl.store(dq_row + start + lane, tl.zeros((BLOCK,), tl.float32), start + lane < columns)


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
        self.options = ignore_index, 1.0 / temperature, beta, 1.0 - beta
        self.kind = {"FORWARD": beta == 0, "REVERSE": beta == 1, "HALF": beta == 0.5}

    def run_rows(self, losses: Tensor, statistics: Tensor | None, student: Tensor, teacher: Tensor, first: int) -> None:
        """Write the losses of the rows from `first` on, and what their gradient needs."""
        count, columns = student.shape
        _, sum_block = long_row_blocks(student, count, columns, SUM_TILES)
        programs, block = long_row_blocks(student, count, columns, FORWARD_TILES)
        _rows[(programs,)](
            losses, statistics, student, teacher, self.labels, columns, first, count, losses.shape[0], *self.options,
            **self.kind, SUM_BLOCK=sum_block, LANES=min(sum_block, LANES), BLOCK=block,
        )  # fmt: skip

    def run_gradient(
        self,
        dstudent: Tensor,
        statistics: Tensor,
        student: Tensor,
        teacher: Tensor,
        dloss: Tensor,
        first: int = 0,
    ) -> None:
        """Write the gradient of the student's logits, which `dstudent` may be, for a gradient `dloss` of Σ losses."""
        count, columns = student.shape
        programs, block = long_row_blocks(student, count, columns, BACKWARD_TILES)
        _gradient[(programs,)](
            dstudent, statistics, student, teacher, self.labels, dloss, columns, first, count, statistics.shape[1],
            *self.options, **self.kind, BLOCK=block,
        )  # fmt: skip

    def run(
        self,
        rows: tuple[int, int],
        losses: Tensor | None,
        statistics: Tensor | None,
        gradients: "_Gradients | None",
        dloss: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write what isn't None, for all rows, so many of the student's and of the teacher's logits at a time.

        Args:
            dloss: gradient of Σ losses; None is 1.

        Returns:
            Both logits, when that is all rows and there are no `gradients`.
        """
        if dloss is None:
            dloss = torch.ones((), dtype=torch.float32, device=self.student_x.device)
        student = teacher = part = None
        for first, last in chunks(self.student_x.shape[0], rows[0]):
            student = teacher = part = None  # before the next chunk's are allocated
            student = self.student_x[first:last] @ self.student_weight.t()
            for start, end in chunks(last - first, rows[1]):
                teacher = None
                teacher = self.teacher_x[first + start : first + end] @ self.teacher_weight.t()
                part = student[start:end]
                if losses is not None:
                    self.run_rows(losses, statistics, part, teacher, first + start)
                if gradients is not None:
                    self.run_gradient(part, statistics, part, teacher, dloss, first + start)
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
            self.dweight = add_product(self.dweight, dlogits, self.call.student_x[first:last], self.dtype)


def _plan(
    call: _Call, accum_dtype: torch.dtype, memory_budget: int | None, needs: Needs
) -> tuple[tuple[int, int], bool, bool]:
    """How many rows of the student's and of the teacher's logits to take at a time; whether to keep logits, or gradients.

    A budget has room for the student's logits beside their gradient, which here take the same memory; and for the
    teacher's, half of which `add_product` may take instead.
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
    each = chunk
    if memory_budget is not None:
        each += chunk // 2 if needs[1] and takes_memory(call.student_x, accum_dtype) else chunk
    # The teacher's matmuls keep some hundred rows, for the cube units to have enough to do.
    return (each, min(chunk, max(256, chunk // 8))), False, room


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
    count = count_of(student_x, call.labels, ignore_index)
    gradients = _Gradients(needs, call, accum_dtype) if differentiable and room else None
    logits = call.run(rows, losses, statistics, gradients, None)
    loss = losses.sum() / count
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
    dloss = dloss / count
    if whole:
        gradients = _Gradients(needs, call, dtype)
        dstudent = torch.empty_like(kept[0])
        call.run_gradient(dstudent, statistics, *kept, dloss)
        gradients.add(0, n, dstudent)
        return gradients.dx, gradients.dweight
    if not room:
        gradients = _Gradients(needs, call, accum_dtype)
        call.run(rows, None, statistics, gradients, dloss)
        return gradients.dx, None if gradients.dweight is None else gradients.dweight.to(dtype)
    own = isinstance(kept[0], Once)
    if own:
        kept = kept[0].take()
        if kept is None:  # a backward before this one has taken them
            gradients = _Gradients(needs, call, accum_dtype)
            call.run(rows, None, statistics, gradients, None)
            kept = gradients.dx, gradients.dweight
    dx, dweight = kept
    return scaled(dx, call.student_x.dtype, dloss, own), scaled(dweight, dtype, dloss, own)
