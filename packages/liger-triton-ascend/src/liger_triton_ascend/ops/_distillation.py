"""Divergences of rows of logits from a teacher's, and the cross-entropy of labels beside them.

A vocabulary seldom fits the Unified Buffer, so each program takes one row after another, block by block: first for the
softmaxes, then for the losses. Besides the logits, the gradient needs six numbers per row.

Log-probabilities of student and teacher are compared by the difference of their logits, of the rows' largest logits and of the
sums. The log-probabilities themselves are near -10: if they are nearly equal, the difference of two rounded ones has few correct
digits or the wrong sign.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernelOptions,
    DistillationKernels,
    DistillationResults,
    step_of,
)
from liger_core.host.rows import Logits
from liger_triton_ascend.ops._divergences import above_mixture, count_of, finite
from liger_triton_ascend.ops._logit_statistics import load_biased
from liger_triton_ascend.ops._math import LANES, add_exponentials, cap, expm1_near, no_exponentials
from liger_triton_ascend.ops._rows import as_rows, long_row_blocks

# Float32 tiles alive, by the estimate: in the loops that add up exponentials, in the one that adds up losses, and in the
# gradient.
SUM_TILES = 9
FORWARD_TILES = 16
BACKWARD_TILES = 16

KINDS = {"forward": 0, "reverse": 1, "mixture": 2, "tvd": 3, "cosine": 4, "given": 5, "log": 6}
FORWARD, REVERSE, TVD, COSINE, GIVEN, LOG = (
    tl.constexpr(KINDS[name]) for name in ("forward", "reverse", "tvd", "cosine", "given", "log")
)


@triton.jit
def _load(row, bias, softcap, column, inside):
    """Logits with bias and softcap; -inf outside the row."""
    x = load_biased(row, bias, column, inside, float("-inf"))
    return x if softcap is None else tl.where(inside, cap(x, softcap)[0], float("-inf"))


@triton.jit
def _top_and_sum(row, bias, softcap, columns, scale, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The largest logit of a row, and Σ exp(scale · (logit − largest)). A `scale` of None is 1."""
    lane = tl.arange(0, BLOCK)
    maximum, total = no_exponentials(LANES)
    for start in range(0, columns, BLOCK):
        xs = _load(row, bias, softcap, start + lane, start + lane < columns)
        maximum, total = add_exponentials(maximum, total, tl.reshape(xs, (BLOCK // LANES, LANES)), scale)
    top = tl.max(maximum, 0)
    fall = maximum - top
    if scale is not None:
        fall *= scale
    return top, tl.sum(total * tl.exp(fall), 0)


@triton.jit
def _above(difference, beta, rest, KIND: tl.constexpr, HALF: tl.constexpr):
    """How far the log-probabilities of student and teacher are above those that each is compared with."""
    if KIND <= REVERSE:
        return difference, -difference
    else:
        return above_mixture(difference, beta, rest, HALF)


@triton.jit
def _log_ratio(q_sum, p_sum):
    """log(q_sum / p_sum). It is NaN if a sum is 0, as for a row that is all -inf."""
    return tl.log(tl.where((q_sum > 0.0) & (p_sum > 0.0), q_sum / p_sum, float("nan")))


@triton.jit
def _difference(x, y, tops, scale, ratio):
    """log q − log p for logits x and y. It is finite, and 0 if both are -inf."""
    difference = ((finite(x) - finite(y)) - tops) * scale - ratio
    return finite(tl.minimum(difference, 1e30, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _order(difference):
    """The sign of the difference: 1, -1 or 0."""
    return tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, difference))


@triton.jit
def _apart(q, p, t):
    """abs(q − p). If the two are nearly equal, it is computed from t, the difference of their logarithms."""
    return tl.abs(tl.where(tl.abs(t) < 0.25, p * expm1_near(t), q - p))


@triton.jit
def _given(target, column, inside, eps, KIND: tl.constexpr):
    """Given probabilities, which replace the teacher's logits, and their logarithms; 0 outside the row."""
    t = tl.load(target + column, inside, other=float("-inf") if KIND == LOG else 0.0).to(tl.float32)
    if KIND == LOG:
        return tl.exp(t), t
    else:
        return t, tl.log(tl.maximum(t, eps))


@triton.jit
def _rows(
    soft, hard, statistics, student, teacher, student_bias, teacher_bias, labels, student_stride, teacher_stride, columns,
    first, count, rows, ignore_index, scale, beta, rest, student_softcap, teacher_softcap,
    KIND: tl.constexpr, HALF: tl.constexpr, HARD: tl.constexpr, TEMPERED: tl.constexpr,
    SUM_BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        at = first + tl.cast(index, tl.int64)
        q_row = student + tl.cast(index, tl.int64) * student_stride
        p_row = teacher + tl.cast(index, tl.int64) * teacher_stride
        end = columns
        if labels is not None:
            label = tl.load(labels + at)
            end = tl.where(label == ignore_index, 0, columns)  # a row that doesn't count is not read
        q_top, q_log_sum, hard_log_sum, of_tops, of_sums = 0.0, 0.0, 0.0, 0.0, 0.0
        if KIND != COSINE or HARD:
            q_top, q_sum = _top_and_sum(q_row, student_bias, student_softcap, end, scale, SUM_BLOCK, LANES)
            q_log_sum = tl.log(q_sum)
            hard_log_sum = q_log_sum
            if HARD and TEMPERED:
                _, hard_sum = _top_and_sum(q_row, student_bias, student_softcap, end, None, SUM_BLOCK, LANES)
                hard_log_sum = tl.log(hard_sum)
        if KIND < COSINE:
            p_top, p_sum = _top_and_sum(p_row, teacher_bias, teacher_softcap, end, scale, SUM_BLOCK, LANES)
            p_log_sum = tl.log(p_sum)
            tops, ratio = q_top - p_top, _log_ratio(q_sum, p_sum)
            # A logarithm near 10 is off by up to 5e-7, and so would all probabilities of its row be, in the same direction.
            q_inverse, p_inverse = 1.0 / q_sum, 1.0 / p_sum
            if KIND == FORWARD:
                of_tops, of_sums = p_top, p_log_sum
            else:
                of_tops, of_sums = tops, ratio
        from_q = tl.zeros((BLOCK,), tl.float32)
        from_p = tl.zeros((BLOCK,), tl.float32)
        # 1 is taken off the probabilities before they are added up: sums near 1 are rounded twice as coarsely above it as below.
        others = tl.full((BLOCK,), -1.0 / BLOCK if KIND >= GIVEN else 0.0, tl.float32)
        for start in range(0, end, BLOCK):
            column = start + lane
            inside = column < columns
            x = _load(q_row, student_bias, student_softcap, column, inside)
            if KIND <= COSINE:
                y = _load(p_row, teacher_bias, teacher_softcap, column, inside)
            if KIND >= GIVEN:
                p, log_p = _given(p_row, column, inside, beta, KIND)
                log_q = (x - q_top) * scale - q_log_sum
                from_q += p
                from_p += tl.where(p == 0.0, 0.0, p * (log_p - log_q))
                others += tl.exp(log_q)
            elif KIND == COSINE:
                x, y = tl.where(inside, x, 0.0), tl.where(inside, y, 0.0)
                from_q += x * x
                from_p += y * y
                others += x * y
            else:
                q, p = tl.exp((x - q_top) * scale) * q_inverse, tl.exp((y - p_top) * scale) * p_inverse
                difference = _difference(x, y, tops, scale, ratio)
                if KIND == TVD:
                    from_q += q * _order(difference)
                    from_p += _apart(q, p, difference)
                else:
                    above_q, above_p = _above(difference, beta, rest, KIND, HALF)
                    from_q += q * above_q
                    from_p += p * above_p
        of_student, of_teacher, of_others = tl.sum(from_q, 0), tl.sum(from_p, 0), tl.sum(others, 0)
        if KIND == COSINE:
            zero = (of_student == 0.0) | (of_teacher == 0.0)
            by_teacher = tl.where(zero, 0.0, 1.0 / (tl.sqrt(of_student) * tl.sqrt(of_teacher)))
            cosine = of_others * by_teacher
            loss = tl.where(end > 0, 1.0 - cosine, 0.0)
            of_tops, of_sums = by_teacher, tl.where(zero, 0.0, cosine / of_student)
        elif KIND >= GIVEN:
            # With the logarithm of the student's sum, 1 but for rounding: of close distributions the loss is as small.
            loss = tl.where(end > 0, of_teacher + of_student * (of_others * (1.0 - 0.5 * of_others)), 0.0)
            # Backward's probabilities have the same rounding in them, which then cancels.
            of_student /= 1.0 + of_others
        elif KIND == TVD:
            loss = 0.5 * of_teacher
        elif KIND == FORWARD:
            loss = of_teacher
        elif KIND == REVERSE:
            loss = of_student
        else:
            loss = rest * of_student + beta * of_teacher
        tl.store(soft + at, loss)
        if HARD:
            known = (label >= 0) & (label < columns)
            place = tl.minimum(tl.maximum(label, 0), columns - 1)
            z = tl.load(q_row + place).to(tl.float32)
            if student_bias is not None:
                z += tl.load(student_bias + place).to(tl.float32)
            z = cap(z, student_softcap)[0]
            hard_log_sum = tl.where(known, hard_log_sum, float("nan"))
            tl.store(hard + at, tl.where(end > 0, (q_top - z) + hard_log_sum, 0.0))
        tl.store(statistics + at, q_top)
        tl.store(statistics + rows + at, q_log_sum)
        tl.store(statistics + 2 * rows + at, of_tops)
        tl.store(statistics + 3 * rows + at, of_sums)
        tl.store(statistics + 4 * rows + at, of_student)
        tl.store(statistics + 5 * rows + at, hard_log_sum)


@triton.jit
def _gradient(
    dstudent, statistics, student, teacher, student_bias, teacher_bias, labels, by_soft, by_hard,
    student_stride, teacher_stride, columns, first, first_column, count, rows, ignore_index, scale, beta, rest,
    student_softcap, teacher_softcap,
    KIND: tl.constexpr, HALF: tl.constexpr, SOFT_STEP: tl.constexpr, HARD_STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    if student_bias is not None:
        student_bias += first_column
    if teacher_bias is not None:
        teacher_bias += first_column
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        at = first + tl.cast(index, tl.int64)
        q_row = student + tl.cast(index, tl.int64) * student_stride
        p_row = teacher + tl.cast(index, tl.int64) * teacher_stride
        dq_row = dstudent + tl.cast(index, tl.int64) * columns
        end = columns
        if labels is not None:
            label = tl.load(labels + at)
            end = tl.where(label == ignore_index, 0, columns)
        q_top, q_log_sum = tl.load(statistics + at), tl.load(statistics + rows + at)
        of_teacher, of_student = tl.load(statistics + 2 * rows + at), tl.load(statistics + 3 * rows + at)
        whole_sum, hard_log_sum = tl.load(statistics + 4 * rows + at), tl.load(statistics + 5 * rows + at)
        for start in range(0, end, BLOCK):
            column = start + lane
            inside = column < columns
            x, derivative = cap(load_biased(q_row, student_bias, column, inside, float("-inf")), student_softcap)
            gradient = tl.zeros((BLOCK,), tl.float32)
            if KIND >= GIVEN:
                p, _ = _given(p_row, column, inside, beta, KIND)
                q = tl.exp((x - q_top) * scale - q_log_sum)
                # `whole_sum` is the target's sum divided by the student's, which is 1 but for rounding.
                gradient = tl.load(by_soft + at * SOFT_STEP) * scale * (q * whole_sum - p)
            elif by_soft is not None:
                by = tl.load(by_soft + at * SOFT_STEP)
                y = cap(load_biased(p_row, teacher_bias, column, inside, float("-inf")), teacher_softcap)[0]
                if KIND == COSINE:
                    gradient = by * (x * of_student - y * of_teacher)
                else:
                    by *= scale
                    q = tl.exp(finite((x - q_top) * scale - q_log_sum))
                    if KIND == FORWARD:
                        gradient = by * (q - tl.exp(finite((y - of_teacher) * scale - of_student)))
                    else:
                        difference = _difference(x, y, of_teacher, scale, of_student)
                        # The gradient of a log-softmax: a class's part of the sum, minus its share of the whole sum.
                        if KIND == TVD:
                            by *= 0.5
                            part = _order(difference)
                        else:
                            if KIND != REVERSE:
                                by *= rest
                            part = _above(difference, beta, rest, KIND, HALF)[0]
                        gradient = by * (q * (part - whole_sum))
            if by_hard is not None:
                probability = tl.exp(finite((x - q_top) - hard_log_sum))
                place = label - first_column - start
                here = (place >= 0) & (place < BLOCK)
                probability -= tl.where(lane == tl.where(here, place, -1).to(tl.int32), 1.0, 0.0)
                gradient += tl.load(by_hard + at * HARD_STEP) * probability
            tl.store(dq_row + column, gradient * derivative, inside)
        for start in range(end, columns, BLOCK):  # the whole row if it doesn't count, otherwise nothing
            tl.store(dq_row + start + lane, tl.zeros((BLOCK,), tl.float32), start + lane < columns)


def _options(options: DistillationKernelOptions) -> tuple[tuple[float | None, ...], dict[str, int]]:
    """Runtime arguments and constants of both kernels."""
    beta = options.beta
    values = options.ignore_index, 1.0 / options.temperature, beta, 1.0 - beta, *options[3:5]
    return values, {"KIND": KINDS[options.divergence], "HALF": beta == 0.5}


class AscendDistillation(DistillationKernels):
    def rows(
        self, results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
    ) -> None:
        students, student_stride = as_rows(student.memory)
        teachers, teacher_stride = as_rows(teacher.memory)
        count, columns = students.shape
        _, sum_block = long_row_blocks(students, count, columns, SUM_TILES)
        programs, block = long_row_blocks(students, count, columns, FORWARD_TILES)
        options, kind = _options(inputs.options)
        _rows[(programs,)](
            *results, students, teachers, inputs.student_bias, inputs.teacher_bias, inputs.labels, student_stride, teacher_stride,
            columns, first, count, results.soft.shape[0], *options, **kind, HARD=inputs.options.hard,
            TEMPERED=inputs.options.temperature != 1.0, SUM_BLOCK=sum_block, LANES=min(sum_block, LANES), BLOCK=block,
        )  # fmt: skip

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
        students, student_stride = as_rows((student or dstudent).memory)
        teachers, teacher_stride = as_rows(teacher.memory)
        count, columns = students.shape
        programs, block = long_row_blocks(dstudent.memory, count, columns, BACKWARD_TILES)
        options, kind = _options(inputs.options)
        _gradient[(programs,)](
            dstudent.memory, statistics, students, teachers, inputs.student_bias, inputs.teacher_bias, inputs.labels, *incoming,
            student_stride, teacher_stride, columns, first, first_column, count, statistics.shape[1], *options, **kind,
            SOFT_STEP=step_of(incoming.soft), HARD_STEP=step_of(incoming.hard), BLOCK=block,
        )  # fmt: skip

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return count_of(x, labels, ignore_index)

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        return losses.sum() if divisor is None else losses.sum() / divisor.view(())


KERNELS = AscendDistillation()
