"""Jensen-Shannon divergence of two linear layers: rows in chunks, whose logits PyTorch's matmul computes.

When one chunk holds all rows, both logits are kept for backward, as an unfused model does. Otherwise a chunk's student
logits are overwritten with their gradient, which becomes the gradients of the arguments at once; backward has only to
scale those. The teacher's logits are no more than read, so they are computed for few rows of a chunk at a time: fewer
chunks, each of which reads and writes the accumulator of the weight's gradient, fit the same memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_core.contract import Needs, Once, Saved, implements
from liger_core.ops.fused_linear_cross_entropy import chunk_rows, temporary_memory
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_triton.ops._divergences import above_mixture, count_of, finite, total
from liger_triton.ops._launch import kernel
from liger_triton.ops.fused_linear_cross_entropy import _add_product, _chunks, _scaled

# Of each tensor's block in `_rows`: 16 warps, of which two programs fit a multiprocessor.
BLOCK_BYTES = 16384
STAGES = 3

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _lanes(ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Columns of a block, in groups that a thread holds whole, so that what a loop adds up per group stays in the thread.

    They are neighbours where a thread can load them at once, else neighbouring threads load neighbours.
    """
    if ALIGNED:
        return tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        return tl.arange(0, GROUPS)[:, None] + tl.arange(0, GROUP)[None, :] * GROUPS


@triton.jit
def _top_and_log_sum(
    logits, scale, columns, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The largest logit of a row, and log2 of the sum of 2^(scale · (logit − largest))."""
    lanes = _lanes(ALIGNED, GROUPS, GROUP)
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    maximum = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    for start in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = start + lanes
        x = tl.load(logits + column, column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        sums = tl.sum(tl.exp2((x - higher[:, None]) * scale), axis=1)
        total = total * tl.exp2((maximum - higher) * scale) + sums
        maximum = higher
    top = tl.max(maximum)
    return top, libdevice.log2(tl.sum(total * tl.exp2((maximum - top) * scale)))


@triton.jit
def _log2_probability(logits, at, inside, top, scale, log_sum):
    x = tl.load(logits + at, inside, other=-float("inf")).to(tl.float32)
    return finite((x - top) * scale - log_sum)


@triton.jit
def _above(q, p, beta, rest, FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """What log2 probabilities exceed those by that they are compared with, the student's and the teacher's."""
    if FORWARD or REVERSE:
        return q - p, p - q
    else:
        return above_mixture(q, p, beta, rest, HALF, LOG2_E)


@kernel(do_not_specialize=["first", "rows"])
def _rows(
    losses, statistics, student, teacher, labels, columns, first, rows, ignore_index, temperature,
    beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    temperature = tl.cast(temperature, tl.float32)
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    local = tl.program_id(0).to(tl.int64)
    row = first + local
    if labels is not None:
        ignored = tl.load(labels + row) == ignore_index
        if ignored:
            tl.store(losses + row, 0.0)
            return

    student += local * columns
    teacher += local * columns
    scale = 1.4426950408889634 / temperature
    q_top, q_log_sum = _top_and_log_sum(student, scale, columns, ALIGNED, GROUPS, GROUP, STAGES)
    p_top, p_log_sum = _top_and_log_sum(teacher, scale, columns, ALIGNED, GROUPS, GROUP, STAGES)

    lanes = _lanes(ALIGNED, GROUPS, GROUP)
    from_q = tl.zeros([GROUPS], tl.float32)
    from_p = tl.zeros([GROUPS], tl.float32)
    # Backwards: what was read last is in the cache still.
    for back in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = (columns - 1) // (GROUPS * GROUP) * (GROUPS * GROUP) - back + lanes
        q = _log2_probability(student, column, column < columns, q_top, scale, q_log_sum)
        p = _log2_probability(teacher, column, column < columns, p_top, scale, p_log_sum)
        above_q, above_p = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
        from_q += tl.sum(tl.exp2(q) * above_q, axis=1)
        from_p += tl.sum(tl.exp2(p) * above_p, axis=1)
    from_student, from_teacher = tl.sum(from_q), tl.sum(from_p)
    if FORWARD:
        loss = from_teacher
    elif REVERSE:
        loss = from_student
    else:
        loss = rest * from_student + beta * from_teacher
    tl.store(losses + row, loss * LN_2)
    if statistics is not None:
        tl.store(statistics + row, q_top)
        tl.store(statistics + rows + row, q_log_sum)
        tl.store(statistics + 2 * rows + row, p_top)
        tl.store(statistics + 3 * rows + row, p_log_sum)
        tl.store(statistics + 4 * rows + row, from_student)


@kernel(do_not_specialize=["first", "rows"])
def _gradient(
    dstudent, statistics, student, teacher, labels, dloss, count, columns, first, rows, ignore_index,
    temperature, beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    temperature = tl.cast(temperature, tl.float32)
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    blocks = tl.cdiv(columns, BLOCK)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    row = first + local
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = local * columns + column
    if labels is not None:
        ignored = tl.load(labels + row) == ignore_index
        if ignored:
            tl.store(dstudent + at, tl.zeros([BLOCK], tl.float32), inside)
            return

    scale = 1.4426950408889634 / temperature
    q_top, q_log_sum = tl.load(statistics + row), tl.load(statistics + rows + row)
    p_top, p_log_sum = tl.load(statistics + 2 * rows + row), tl.load(statistics + 3 * rows + row)
    q = _log2_probability(student, at, inside, q_top, scale, q_log_sum)
    p = _log2_probability(teacher, at, inside, p_top, scale, p_log_sum)
    factor = 1.0 / temperature
    if dloss is not None:
        factor *= tl.load(dloss) / tl.load(count)
    if FORWARD:
        gradient = tl.exp2(q) - tl.exp2(p)
    else:
        # Of a log-softmax: a class's part of the sum, without its probability's share of the whole sum.
        factor *= LN_2 if REVERSE else rest * LN_2
        above_q = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)[0]
        gradient = tl.exp2(q) * (above_q - tl.load(statistics + 4 * rows + row))
    tl.store(dstudent + at, factor * gradient, inside)


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
        self.options = ignore_index, temperature, beta, 1.0 - beta
        self.kind = {"FORWARD": beta == 0, "REVERSE": beta == 1, "HALF": beta == 0.5}

    def run_rows(self, losses: Tensor, statistics: Tensor | None, student: Tensor, teacher: Tensor, first: int) -> None:
        """Write the losses of the rows from `first` on, and what their gradient needs."""
        n, columns = student.shape
        size = max(student.element_size(), teacher.element_size())
        group = 16 // size  # what a thread loads at once
        block = group
        while block < columns and block < BLOCK_BYTES // size:
            block *= 2
        _rows[(n,)](
            losses, statistics, student, teacher, self.labels, columns, first, losses.shape[0], *self.options,
            **self.kind, ALIGNED=columns % 16 == 0, GROUPS=block // group, GROUP=group, STAGES=STAGES,
            num_warps=max(block * size // 1024, 1),
        )  # fmt: skip

    def run_gradient(
        self,
        dstudent: Tensor,
        statistics: Tensor,
        student: Tensor,
        teacher: Tensor,
        dloss: Tensor | None,
        count: Tensor,
        first: int = 0,
    ) -> None:
        """Write the gradient of the student's logits, which `dstudent` may be; of Σ losses for no `dloss`."""
        n, columns = student.shape
        block = 16
        while block < columns and block < 2048:
            block *= 2
        _gradient[(n * ((columns + block - 1) // block),)](
            dstudent, statistics, student, teacher, self.labels, dloss, count, columns, first, statistics.shape[1],
            *self.options, **self.kind, BLOCK=block, num_warps=max(block // 512, 1),
        )  # fmt: skip

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
                    self.run_gradient(part, statistics, part, teacher, dloss, count, first + start)
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
    count = losses.new_full((), n) if labels is None else count_of(call.labels, ignore_index)
    gradients = _Gradients(needs, call, accum_dtype) if differentiable and room else None
    logits = call.run(rows, losses, statistics, gradients, None, count)
    loss = total(losses, count, 1)
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
        call.run_gradient(dstudent, statistics, *kept, dloss, count)
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
