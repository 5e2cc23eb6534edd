"""Divergences of rows of logits from a teacher's, and the cross-entropy of labels beside them.

One program per row reads both rows twice: first for their softmaxes, then for the losses. Besides the logits, the gradient needs
six numbers per row: the largest logits, the logarithms of the sums, and the sum that the divergence's gradient is relative to.

Log-probabilities of student and teacher are compared by the difference of their logits, of the rows' largest logits and of the
sums. The log-probabilities themselves are near -10: if they are nearly equal, the difference of two rounded ones has few correct
digits or the wrong sign.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_core.custom_op import opaque
from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernelOptions,
    DistillationKernels,
    DistillationResults,
    step_of,
)
from liger_core.host.rows import Logits
from liger_triton.ops._divergences import above_mixture, count_of, finite, total
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import biased, cap, exp, expm1, expm1_near
from liger_triton.ops._rows import as_rows, in_vectors

# Bytes of each tensor's block in `_rows`, of which a thread has 64: with 32, jsd of 8192 x 128256 in bf16 takes a quarter longer.
BLOCK_BYTES = 16384
STAGES = 3

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

KINDS = {"forward": 0, "reverse": 1, "mixture": 2, "tvd": 3, "cosine": 4, "given": 5, "log": 6}
FORWARD, REVERSE, TVD, COSINE, GIVEN, LOG = (
    tl.constexpr(KINDS[name]) for name in ("forward", "reverse", "tvd", "cosine", "given", "log")
)


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
def _load(logits, bias, softcap, column, columns, width, PADDED: tl.constexpr):
    """Logits with bias and softcap; -inf outside the row."""
    inside = column < columns
    x = tl.load(logits + column, column < width, other=-float("inf")).to(tl.float32)
    if PADDED:
        x = tl.where(inside, x, -float("inf"))
    x = biased(x, bias, column, inside)
    if softcap is not None:
        x = tl.where(inside, cap(x, softcap, logits)[0], -float("inf"))
    return x


@triton.jit
def _top_and_sums(
    logits, bias, softcap, scale, columns, width,
    TWO: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The largest logit of a row, and the sum of 2^(scale · (logit − largest)); with TWO, that of e^(logit − largest) too."""
    lanes = _lanes(ALIGNED, GROUPS, GROUP)
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    maximum = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([GROUPS], tl.float32)
    untempered = tl.zeros([GROUPS], tl.float32)
    for start in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = start + lanes
        x = _load(logits, bias, softcap, column, columns, width, PADDED)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        added = tl.sum(tl.exp2((x - higher[:, None]) * scale), axis=1)
        sums = sums * tl.exp2((maximum - higher) * scale) + added
        if TWO:
            added = tl.sum(tl.exp2((x - higher[:, None]) * LOG2_E), axis=1)
            untempered = untempered * tl.exp2((maximum - higher) * LOG2_E) + added
        maximum = higher
    top = tl.max(maximum)
    total = tl.sum(sums * tl.exp2((maximum - top) * scale))
    if TWO:
        return top, total, tl.sum(untempered * tl.exp2((maximum - top) * LOG2_E))
    else:
        return top, total, total


@triton.jit
def _above(difference, beta, rest, KIND: tl.constexpr, HALF: tl.constexpr):
    """How far the log2 probabilities of student and teacher are above those that each is compared with."""
    if KIND <= REVERSE:
        return difference, -difference
    else:
        return above_mixture(difference, beta, rest, HALF, LOG2_E)


@triton.jit
def _log2_ratio(q_sum, p_sum):
    """log2(q_sum / p_sum). It is NaN if a sum is 0, as for a row that is all -inf."""
    positive = (q_sum > 0.0) & (p_sum > 0.0)
    return libdevice.log2(tl.where(positive, tl.math.div_rn(q_sum, p_sum), float("nan")))


@triton.jit
def _difference(x, y, tops, scale, ratio):
    """log2 q − log2 p for logits x and y. It is finite, and 0 if both are -inf."""
    difference = ((finite(x) - finite(y)) - tops) * scale - ratio
    return finite(tl.minimum(difference, 1e30, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _order(difference):
    """The sign of the difference: 1, -1 or 0."""
    return tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, difference))


@triton.jit
def _apart(q, p, difference):
    """abs(q − p). If the two are nearly equal, it is computed from the difference of their logarithms."""
    t = difference * LN_2
    return tl.abs(tl.where(tl.abs(t) < 0.25, p * expm1_near(t), q - p))


@triton.jit
def _given(target, column, inside, eps, KIND: tl.constexpr):
    """Given probabilities, which replace the teacher's logits, and their logarithms; 0 outside the row."""
    t = tl.load(target + column, inside, other=-float("inf") if KIND == LOG else 0.0).to(tl.float32)
    if KIND == LOG:
        return exp(t, False), t
    else:
        return t, tl.log(tl.maximum(t, eps))


@kernel(do_not_specialize=["first", "rows"])
def _rows(
    soft, hard, statistics, student, teacher, student_bias, teacher_bias, labels, student_stride, teacher_stride, columns,
    width, first, rows, ignore_index, temperature, beta, rest, student_softcap, teacher_softcap,
    KIND: tl.constexpr, HALF: tl.constexpr, HARD: tl.constexpr, TEMPERED: tl.constexpr, PADDED: tl.constexpr,
    ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    temperature = tl.cast(temperature, tl.float32)
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    local = tl.program_id(0).to(tl.int64)
    row = first + local
    if labels is not None:
        label = tl.load(labels + row)
        if label == ignore_index:
            tl.store(soft + row, 0.0)
            if HARD:
                tl.store(hard + row, 0.0)
            return

    student += local * student_stride
    teacher += local * teacher_stride
    scale = LOG2_E / temperature
    lanes = _lanes(ALIGNED, GROUPS, GROUP)
    if KIND != COSINE or HARD:
        q_top, q_sum, hard_sum = _top_and_sums(
            student, student_bias, student_softcap, scale, columns, width, HARD and TEMPERED, PADDED, ALIGNED, GROUPS,
            GROUP, STAGES,
        )  # fmt: skip
        q_log_sum, hard_log_sum = libdevice.log2(q_sum), libdevice.log2(hard_sum)
    if KIND < COSINE:
        p_top, p_sum, _ = _top_and_sums(
            teacher, teacher_bias, teacher_softcap, scale, columns, width, False, PADDED, ALIGNED, GROUPS, GROUP, STAGES
        )
        p_log_sum = libdevice.log2(p_sum)
        tops, ratio = q_top - p_top, _log2_ratio(q_sum, p_sum)
        # A logarithm near 10 is off by up to 5e-7, and so would all probabilities of its row be, in the same direction.
        # It cancels in other divergences, where backward's probabilities are off alike.
        q_inverse, p_inverse = tl.math.div_rn(1.0, q_sum), tl.math.div_rn(1.0, p_sum)

    from_q = tl.zeros([GROUPS], tl.float32)
    from_p = tl.zeros([GROUPS], tl.float32)
    products = tl.zeros([GROUPS], tl.float32)
    # 1 is taken off what is close before that is added up: sums near 1 are rounded twice as coarsely above it as below.
    close = tl.full([GROUPS], -1.0 / GROUPS, tl.float32)
    # Backwards: what was read last is still in the cache.
    for back in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = (columns - 1) // (GROUPS * GROUP) * (GROUPS * GROUP) - back + lanes
        inside = column < columns
        x = _load(student, student_bias, student_softcap, column, columns, width, PADDED)
        if KIND <= COSINE:
            y = _load(teacher, teacher_bias, teacher_softcap, column, columns, width, PADDED)
        if KIND >= GIVEN:
            p, log_p = _given(teacher, column, inside, beta, KIND)
            log_q = ((x - q_top) * scale - q_log_sum) * LN_2
            from_q += tl.sum(p, axis=1)
            above = log_p - log_q
            from_p += tl.sum(tl.where(p == 0.0, 0.0, p * above), axis=1)
            # A term is how far q exceeds p where they are close, else q. A GPU's exponential is off by 1e-7, for equal classes
            # alike.
            near = tl.abs(above) < 1.0
            if KIND == GIVEN:
                near &= p >= beta
            products += tl.sum(tl.where(near, p * expm1(-above), exp(log_q, False)), axis=1)
            close += tl.sum(tl.where(near, p, 0.0), axis=1)
        elif KIND == COSINE:
            x, y = tl.where(inside, x, 0.0), tl.where(inside, y, 0.0)
            from_q += tl.sum(x * x, axis=1)
            from_p += tl.sum(y * y, axis=1)
            products += tl.sum(x * y, axis=1)
        else:
            if KIND == TVD:
                q, p = tl.exp2((x - q_top) * scale) * q_inverse, tl.exp2((y - p_top) * scale) * p_inverse
            else:
                q = tl.exp2(finite((x - q_top) * scale - q_log_sum))
                p = tl.exp2(finite((y - p_top) * scale - p_log_sum))
            difference = _difference(x, y, tops, scale, ratio)
            if KIND == TVD:
                from_q += tl.sum(q * _order(difference), axis=1)
                from_p += tl.sum(_apart(q, p, difference), axis=1)
            else:
                above_q, above_p = _above(difference, beta, rest, KIND, HALF)
                from_q += tl.sum(q * above_q, axis=1)
                from_p += tl.sum(p * above_p, axis=1)
    of_student, of_teacher = tl.sum(from_q), tl.sum(from_p)
    if KIND == COSINE:
        product = tl.sum(products)
        norms = tl.sqrt_rn(of_student) * tl.sqrt_rn(of_teacher)
        zero = (of_student == 0.0) | (of_teacher == 0.0)
        by_teacher = tl.where(zero, 0.0, tl.math.div_rn(1.0, norms))
        cosine = product * by_teacher
        loss = 1.0 - cosine
        by_student = tl.where(zero, 0.0, tl.math.div_rn(cosine, of_student))
    elif KIND >= GIVEN:
        # With the logarithm of the student's sum, 1 but for rounding: of close distributions the loss is as small.
        excess = tl.sum(products) + tl.sum(close)
        loss = of_teacher + of_student * (excess * (1.0 - 0.5 * excess))
    elif KIND == TVD:
        loss = 0.5 * of_teacher
    elif KIND == FORWARD:
        loss = of_teacher * LN_2
    elif KIND == REVERSE:
        loss = of_student * LN_2
    else:
        loss = (rest * of_student + beta * of_teacher) * LN_2
    tl.store(soft + row, loss)
    if HARD:
        known = (label >= 0) & (label < columns)
        z = biased(tl.load(student + label, known, other=0.0).to(tl.float32), student_bias, label, known)
        if student_softcap is not None:
            z = cap(z, student_softcap, student)[0]
        hard_log_sum = tl.where(known, hard_log_sum, float("nan"))
        tl.store(hard + row, (q_top - z) + hard_log_sum * LN_2)
    if KIND != COSINE or HARD:
        tl.store(statistics + row, q_top)
        tl.store(statistics + rows + row, q_log_sum)
        tl.store(statistics + 5 * rows + row, hard_log_sum)
    if KIND == COSINE:
        tl.store(statistics + 2 * rows + row, by_teacher)
        tl.store(statistics + 3 * rows + row, by_student)
    elif KIND >= GIVEN:
        tl.store(statistics + 4 * rows + row, of_student)
    elif KIND != FORWARD:
        tl.store(statistics + 2 * rows + row, tops)
        tl.store(statistics + 3 * rows + row, ratio)
        tl.store(statistics + 4 * rows + row, of_student)
    else:
        tl.store(statistics + 2 * rows + row, p_top)
        tl.store(statistics + 3 * rows + row, p_log_sum)


@kernel(do_not_specialize=["first", "rows", "first_column"])
def _gradient(
    dstudent, statistics, student, teacher, student_bias, teacher_bias, labels, by_soft, by_hard,
    gradient_stride, student_stride, teacher_stride, columns, width, first, first_column, rows, ignore_index,
    temperature, beta, rest, student_softcap, teacher_softcap,
    KIND: tl.constexpr, HALF: tl.constexpr, TEMPERED: tl.constexpr,
    SOFT_STEP: tl.constexpr, HARD_STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    temperature = tl.cast(temperature, tl.float32)
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    blocks = tl.cdiv(columns, BLOCK)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    row = first + local
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dstudent += local * gradient_stride
    if labels is not None:
        label = tl.load(labels + row)
        if label == ignore_index:
            tl.store(dstudent + column, tl.zeros([BLOCK], tl.float32), column < width)
            return

    scale = LOG2_E / temperature
    x = tl.load(student + local * student_stride + column, column < width, other=-float("inf")).to(tl.float32)
    x, derivative = cap(biased(x, student_bias, first_column + column, inside), student_softcap, student)
    if KIND != COSINE or by_hard is not None:
        q_top, q_log_sum = tl.load(statistics + row), tl.load(statistics + rows + row)
    gradient = tl.zeros([BLOCK], tl.float32)
    if KIND >= GIVEN:
        p, _ = _given(teacher + local * teacher_stride, column, inside, beta, KIND)
        q = tl.exp2((x - q_top) * scale - q_log_sum)
        gradient = tl.load(by_soft + row * SOFT_STEP) / temperature * (q * tl.load(statistics + 4 * rows + row) - p)
    elif by_soft is not None:
        y = tl.load(teacher + local * teacher_stride + column, column < width, other=-float("inf")).to(tl.float32)
        y = cap(biased(y, teacher_bias, first_column + column, inside), teacher_softcap, teacher)[0]
        factor = tl.load(by_soft + row * SOFT_STEP)
        if KIND == COSINE:
            by_teacher, by_student = tl.load(statistics + 2 * rows + row), tl.load(statistics + 3 * rows + row)
            gradient = factor * (x * by_student - y * by_teacher)
        else:
            factor /= temperature
            q = tl.exp2(finite((x - q_top) * scale - q_log_sum))
            of_tops, of_sums = tl.load(statistics + 2 * rows + row), tl.load(statistics + 3 * rows + row)
            if KIND == FORWARD:
                gradient = factor * (q - tl.exp2(finite((y - of_tops) * scale - of_sums)))
            else:
                difference = _difference(x, y, of_tops, scale, of_sums)
                # The gradient of a log-softmax: a class's part of the sum, minus its probability's share of the whole sum.
                if KIND == TVD:
                    factor *= 0.5
                    part = _order(difference)
                else:
                    factor *= LN_2 if KIND == REVERSE else rest * LN_2
                    part = _above(difference, beta, rest, KIND, HALF)[0]
                gradient = factor * (q * (part - tl.load(statistics + 4 * rows + row)))
    if by_hard is not None:
        hard_log_sum = tl.load(statistics + 5 * rows + row)
        probability = tl.exp2(finite((x - q_top) * LOG2_E - hard_log_sum))
        probability -= tl.where(first_column + column == label, 1.0, 0.0)
        gradient += tl.load(by_hard + row * HARD_STEP) * probability
    tl.store(dstudent + column, gradient * derivative, column < width)


def _options(options: DistillationKernelOptions) -> tuple[tuple[float | None, ...], dict[str, int]]:
    """Runtime arguments and constants of both kernels."""
    beta = options.beta
    values = options.ignore_index, options.temperature, beta, 1.0 - beta, *options[3:5]
    kind = {"KIND": KINDS[options.divergence], "HALF": beta == 0.5, "TEMPERED": options.temperature != 1.0}
    return values, kind


@opaque(writes=("results",))
def _launch_rows(
    results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
) -> None:
    students, student_stride = as_rows(student.memory)
    teachers, teacher_stride = as_rows(teacher.memory)
    (n, width), columns = students.shape, student.columns
    size = max(students.element_size(), teachers.element_size())
    group = 16 // size  # what a thread loads at once
    block = group
    while 2 * block < columns and block < BLOCK_BYTES // size:  # at least two blocks, one of them on its way
        block *= 2
    options, kind = _options(inputs.options)
    _rows[(n,)](
        *results, students, teachers, inputs.student_bias, inputs.teacher_bias, inputs.labels, student_stride, teacher_stride,
        columns, width, first, results.soft.shape[0], *options, **kind, HARD=inputs.options.hard,
        PADDED=width != columns, ALIGNED=in_vectors(width, student_stride, teacher_stride),
        GROUPS=block // group, GROUP=group, STAGES=STAGES, num_warps=max(block * size // 2048, 1),
    )  # fmt: skip


@opaque(writes=("dstudent",))
def _launch_gradient(
    dstudent: Logits,
    student: Logits | None,
    teacher: Logits,
    inputs: DistillationInputs,
    statistics: Tensor,
    incoming: DistillationFactors,
    first: int,
    first_column: int,
) -> None:
    students, student_stride = as_rows((student or dstudent).memory)
    teachers, teacher_stride = as_rows(teacher.memory)
    (n, width), columns = students.shape, dstudent.columns
    block = 16
    while block < columns and block < 2048:
        block *= 2
    by_soft, by_hard = incoming
    options, kind = _options(inputs.options)
    _gradient[(n * ((columns + block - 1) // block),)](
        dstudent.memory, statistics, students, teachers, inputs.student_bias, inputs.teacher_bias, inputs.labels, by_soft,
        by_hard, dstudent.memory.stride(0), student_stride, teacher_stride, columns, width, first, first_column,
        statistics.shape[1], *options, **kind, SOFT_STEP=step_of(by_soft), HARD_STEP=step_of(by_hard),
        BLOCK=block, num_warps=max(block // 512, 1),
    )  # fmt: skip


class TritonDistillation(DistillationKernels):
    def rows(
        self, results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
    ) -> None:
        _launch_rows(results, student, teacher, inputs, first)

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: DistillationInputs,
        statistics: Tensor,
        incoming: DistillationFactors,
        first: int,
        first_column: int,
    ) -> None:
        _launch_gradient(dstudent, student, teacher, inputs, statistics, incoming, first, first_column)

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return x.new_full((), x.shape[0], dtype=torch.float32) if labels is None else count_of(labels, ignore_index)

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        return total(losses, divisor, 1)


KERNELS = TritonDistillation()
