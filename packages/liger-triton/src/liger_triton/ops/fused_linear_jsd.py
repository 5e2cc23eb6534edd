"""Jensen-Shannon divergence of two linear layers: PyTorch's matmul computes chunks of logits, and kernels work on those."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.fused_linear_jsd import DivergenceInputs, DivergenceKernels, FusedLinearJSD
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_triton.ops._divergences import above_mixture, count_of, finite, total
from liger_triton.ops._launch import kernel
from liger_triton.ops._linear import LINEAR
from liger_triton.ops._rows import in_vectors

# Bytes of each tensor's block in `_rows`. A block takes 16 warps, and two programs fit a multiprocessor.
BLOCK_BYTES = 16384
STAGES = 3

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _lanes(ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The columns of a block, in groups. A thread holds whole groups, so what a loop adds up per group stays in the thread.

    If a thread can load a group at once, its columns are neighbours. Otherwise neighbouring threads load neighbouring columns.
    """
    if ALIGNED:
        return tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        return tl.arange(0, GROUPS)[:, None] + tl.arange(0, GROUP)[None, :] * GROUPS


@triton.jit
def _load(logits, column, columns, width, PADDED: tl.constexpr):
    """Logits; -inf outside the row."""
    x = tl.load(logits + column, column < width, other=-float("inf")).to(tl.float32)
    return tl.where(column < columns, x, -float("inf")) if PADDED else x


@triton.jit
def _top_and_log_sum(
    logits, scale, columns, width,
    PADDED: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest logit of a row, and log2 of the sum of 2^(scale · (logit − largest))."""
    lanes = _lanes(ALIGNED, GROUPS, GROUP)
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    maximum = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    for start in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = start + lanes
        x = _load(logits, column, columns, width, PADDED)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        sums = tl.sum(tl.exp2((x - higher[:, None]) * scale), axis=1)
        total = total * tl.exp2((maximum - higher) * scale) + sums
        maximum = higher
    top = tl.max(maximum)
    return top, libdevice.log2(tl.sum(total * tl.exp2((maximum - top) * scale)))


@triton.jit
def _log2_probability(logits, column, columns, width, top, scale, log_sum, PADDED: tl.constexpr):
    x = _load(logits, column, columns, width, PADDED)
    return finite((x - top) * scale - log_sum)


@triton.jit
def _above(q, p, beta, rest, FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """How far the log2 probabilities of student and teacher are above those that each is compared with."""
    if FORWARD or REVERSE:
        return q - p, p - q
    else:
        return above_mixture(q - p, beta, rest, HALF, LOG2_E)


@kernel(do_not_specialize=["first", "rows"])
def _rows(
    losses, statistics, student, teacher, labels, student_stride, teacher_stride, columns, width, first, rows,
    ignore_index, temperature, beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
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

    student += local * student_stride
    teacher += local * teacher_stride
    scale = 1.4426950408889634 / temperature
    q_top, q_log_sum = _top_and_log_sum(student, scale, columns, width, PADDED, ALIGNED, GROUPS, GROUP, STAGES)
    p_top, p_log_sum = _top_and_log_sum(teacher, scale, columns, width, PADDED, ALIGNED, GROUPS, GROUP, STAGES)

    lanes = _lanes(ALIGNED, GROUPS, GROUP)
    from_q = tl.zeros([GROUPS], tl.float32)
    from_p = tl.zeros([GROUPS], tl.float32)
    # Backwards: what was read last is still in the cache.
    for back in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = (columns - 1) // (GROUPS * GROUP) * (GROUPS * GROUP) - back + lanes
        q = _log2_probability(student, column, columns, width, q_top, scale, q_log_sum, PADDED)
        p = _log2_probability(teacher, column, columns, width, p_top, scale, p_log_sum, PADDED)
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
    dstudent, statistics, student, teacher, labels, dloss, count, gradient_stride, student_stride, teacher_stride, width,
    first, rows, ignore_index, temperature, beta, rest,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    temperature = tl.cast(temperature, tl.float32)
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    blocks = tl.cdiv(width, BLOCK)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    row = first + local
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dstudent += local * gradient_stride
    if labels is not None:
        ignored = tl.load(labels + row) == ignore_index
        if ignored:
            tl.store(dstudent + column, tl.zeros([BLOCK], tl.float32), inside)
            return

    scale = 1.4426950408889634 / temperature
    q_top, q_log_sum = tl.load(statistics + row), tl.load(statistics + rows + row)
    p_top, p_log_sum = tl.load(statistics + 2 * rows + row), tl.load(statistics + 3 * rows + row)
    q = _log2_probability(student + local * student_stride, column, width, width, q_top, scale, q_log_sum, False)
    p = _log2_probability(teacher + local * teacher_stride, column, width, width, p_top, scale, p_log_sum, False)
    factor = 1.0 / temperature
    if dloss is not None:
        factor *= tl.load(dloss) / tl.load(count)
    if FORWARD:
        gradient = tl.exp2(q) - tl.exp2(p)
    else:
        # The gradient of a log-softmax: a class's part of the sum, minus its probability's share of the whole sum.
        factor *= LN_2 if REVERSE else rest * LN_2
        above_q = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)[0]
        gradient = tl.exp2(q) * (above_q - tl.load(statistics + 4 * rows + row))
    tl.store(dstudent + column, factor * gradient, inside)


def _options(inputs: DivergenceInputs) -> tuple[tuple[int, float, float, float], dict[str, bool]]:
    """Runtime arguments and constants of both kernels."""
    beta = inputs.beta
    kind = {"FORWARD": beta == 0, "REVERSE": beta == 1, "HALF": beta == 0.5}
    return (inputs.ignore_index, inputs.temperature, beta, 1.0 - beta), kind


@opaque(writes=("losses", "statistics"))
def _launch_rows(
    losses: Tensor, statistics: Tensor | None, student: Logits, teacher: Logits, inputs: DivergenceInputs, first: int
) -> None:
    students, teachers, columns = student.memory, teacher.memory, student.columns
    n, width = students.shape
    strides = students.stride(0), teachers.stride(0)
    size = max(students.element_size(), teachers.element_size())
    group = 16 // size  # what a thread loads at once
    block = group
    while block < columns and block < BLOCK_BYTES // size:
        block *= 2
    options, kind = _options(inputs)
    _rows[(n,)](
        losses, statistics, students, teachers, inputs.labels, *strides, columns, width, first, losses.shape[0], *options,
        **kind, PADDED=width != columns, ALIGNED=in_vectors(width, *strides), GROUPS=block // group, GROUP=group,
        STAGES=STAGES, num_warps=max(block * size // 1024, 1),
    )  # fmt: skip


@opaque(writes=("dstudent",))
def _launch_gradient(
    dstudent: Logits,
    student: Logits | None,
    teacher: Logits,
    inputs: DivergenceInputs,
    statistics: Tensor,
    dloss: Tensor | None,
    count: Tensor,
    first: int,
) -> None:
    written, students, teachers = dstudent.memory, (student or dstudent).memory, teacher.memory
    n, width = written.shape
    strides = written.stride(0), students.stride(0), teachers.stride(0)
    block = 16
    while block < width and block < 2048:
        block *= 2
    options, kind = _options(inputs)
    _gradient[(n * ((width + block - 1) // block),)](
        written, statistics, students, teachers, inputs.labels, dloss, count, *strides, width, first, statistics.shape[1],
        *options, **kind, BLOCK=block, num_warps=max(block // 512, 1),
    )  # fmt: skip


class TritonDivergence(DivergenceKernels):
    def rows(
        self,
        losses: Tensor,
        statistics: Tensor | None,
        student: Logits,
        teacher: Logits,
        inputs: DivergenceInputs,
        first: int,
    ) -> None:
        _launch_rows(losses, statistics, student, teacher, inputs, first)

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: DivergenceInputs,
        statistics: Tensor,
        incoming: Any,
        first: int,
    ) -> None:
        _launch_gradient(dstudent, student, teacher, inputs, statistics, *incoming, first)

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return x.new_full((), x.shape[0], dtype=torch.float32) if labels is None else count_of(labels, ignore_index)

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        return total(losses, count, 1)


_host = FusedLinearJSD(TritonDivergence(), LINEAR)
forward = implements(fused_linear_jsd)(_host.forward)
backward = _host.backward
