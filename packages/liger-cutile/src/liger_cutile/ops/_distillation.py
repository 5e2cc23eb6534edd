"""Divergences of rows of logits from a teacher's, and the cross-entropy of labels beside them.

One block per row reads both rows twice: first for their softmaxes, then for the losses. Besides the logits, the gradient needs
six numbers per row: the largest logits, the logarithms of the sums, and the sum that the divergence's gradient is relative to.

Log-probabilities of student and teacher are compared by the difference of their logits, of the rows' largest logits and of the
sums. The log-probabilities themselves are near -10: if they are nearly equal, the difference of two rounded ones has few correct
digits or the wrong sign.
"""

import functools
import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core.custom_op import opaque
from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernels,
    DistillationResults,
    step_of,
)
from liger_core.host.rows import Logits
from liger_cutile.ops._divergences import above_mixture, finite, launch_count, launch_total
from liger_cutile.ops._launch import MOST_BLOCKS, ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import LEAST, LN_2, LOG2_E, cap, exp, exp2, expm1, expm1_near
from liger_cutile.ops._rows import as_rows, blocks, load_vector, power_of_2

# Bytes of a tile of logits, and blocks per multiprocessor. Loads go into registers. On an H100, jsd of 8192 x 128256 in bfloat16
# takes 3.07 ms; with half as many blocks, of twice the tile, 3.64. Its gradient takes 2.20 ms, and 2.32 with half the tile.
ROW_BYTES, ROW_OCCUPANCY = 4096, 8
GRADIENT_BYTES, GRADIENT_OCCUPANCY = 8192, 8
# Bytes that a thread loads at once: what a loop adds up of them stays in the thread.
GROUP_BYTES = 16


@ct.function
def _load(logits, bias, softcap, row, tile, columns, PADDED, BLOCK, GROUP):
    """A row's float32 tile with bias and softcap, ``[BLOCK / GROUP, GROUP]``, -inf outside; and the softcap's derivative.

    Rows that are PADDED are loaded with what lies behind them: a bound that 16 divides lets a thread load its columns at once.
    """
    x = ct.load(logits, (row, tile), (1, BLOCK), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
    x = ct.astype(ct.reshape(x, (BLOCK // GROUP, GROUP)), ct.float32)
    if given(bias):
        x += ct.reshape(load_vector(bias, tile, BLOCK), (BLOCK // GROUP, GROUP))
    capped, derivative = cap(x, softcap)
    if given(softcap) or PADDED:
        column = tile * BLOCK + ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (BLOCK // GROUP, GROUP))
        capped = ct.where(column < columns, capped, -math.inf)
    return capped, derivative


@ct.function
def _top_and_sums(logits, bias, softcap, row, scale, columns, PADDED, TWO, BLOCK, GROUP):
    """The largest logit of a row, and the sum of 2^(scale · (logit − largest)); with TWO, that of e^(logit − largest) too."""
    maximum = ct.full((BLOCK // GROUP, 1), LEAST, ct.float32)
    sums = ct.zeros((BLOCK // GROUP, 1), ct.float32)
    untempered = ct.zeros((BLOCK // GROUP, 1), ct.float32)
    for tile in range(ct.num_tiles(logits, axis=1, shape=(1, BLOCK))):
        x = _load(logits, bias, softcap, row, tile, columns, PADDED, BLOCK, GROUP)[0]
        higher = ct.maximum(maximum, ct.max(x, axis=1, keepdims=True))
        added = ct.sum(exp2((x - higher) * scale), axis=1, keepdims=True)
        sums = sums * exp2((maximum - higher) * scale) + added
        if TWO:
            added = ct.sum(exp2((x - higher) * LOG2_E), axis=1, keepdims=True)
            untempered = untempered * exp2((maximum - higher) * LOG2_E) + added
        maximum = higher
    top = ct.max(maximum)
    total = ct.sum(sums * exp2((maximum - top) * scale))
    if TWO:
        return top, total, ct.sum(untempered * exp2((maximum - top) * LOG2_E))
    else:
        return top, total, total


@ct.function
def _above(difference, beta, rest, ONE_SIDED, HALF):
    """How far the log2 probabilities of student and teacher are above those that each is compared with."""
    if ONE_SIDED:
        return difference, -difference
    else:
        return above_mixture(difference, beta, rest, HALF, LOG2_E)


@ct.function
def _log2_ratio(q_sum, p_sum):
    """log2(q_sum / p_sum). It is NaN if a sum is 0, as for a row that is all -inf."""
    return ct.log2(ct.where((q_sum > 0.0) & (p_sum > 0.0), q_sum / p_sum, math.nan))


@ct.function
def _difference(x, y, tops, scale, ratio):
    """log2 q − log2 p for logits x and y. It is finite, and 0 if both are -inf."""
    difference = ((finite(x) - finite(y)) - tops) * scale - ratio
    return finite(ct.minimum(difference, 1e30, propagate_nan=True))


@ct.function
def _order(difference):
    """The sign of the difference: 1, -1 or 0."""
    return ct.where(difference > 0.0, 1.0, ct.where(difference < 0.0, -1.0, difference))


@ct.function
def _apart(q, p, difference):
    """abs(q − p). If the two are nearly equal, it is computed from the difference of their logarithms."""
    t = difference * LN_2
    return ct.abs(ct.where(ct.abs(t) < 0.25, p * expm1_near(t), q - p))


@ct.function
def _part(difference, beta, rest, TVD, REVERSE, HALF):
    """The factor of a class's probability in the sum that the gradient is relative to."""
    if TVD:
        return _order(difference)
    else:
        return _above(difference, beta, rest, REVERSE, HALF)[0]


@ct.function
def _given(target, row, tile, eps, LOG, BLOCK, GROUP):
    """Probabilities that are given, which replace the teacher's logits, and their logarithms; 0 outside the row."""
    if LOG:
        t = ct.load(target, (row, tile), (1, BLOCK), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
        t = ct.astype(ct.reshape(t, (BLOCK // GROUP, GROUP)), ct.float32)
        return exp(t, False), t
    else:
        t = ct.load(target, (row, tile), (1, BLOCK), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        t = ct.astype(ct.reshape(t, (BLOCK // GROUP, GROUP)), ct.float32)
        return t, ct.log(ct.maximum(t, eps, propagate_nan=True))


@ct.function
def _label_of(labels, row, ignore_index):
    """A row's label, and whether it doesn't count."""
    if given(labels):
        label = ct.load(labels, (row,), ())
        return label, label == ignore_index
    else:
        return 0, False


@ct.kernel(occupancy=ROW_OCCUPANCY)
def _rows(
    soft, hard, statistics, student, teacher, student_bias, teacher_bias, labels,
    columns, first, ignore_index: ct.ScalarInt64, scale, beta, rest, student_softcap, teacher_softcap,
    FORWARD: ConstBool, REVERSE: ConstBool, TVD: ConstBool, COSINE: ConstBool, GIVEN: ConstBool, LOG: ConstBool,
    HALF: ConstBool, TEMPERED: ConstBool, PADDED: ConstBool,
    BLOCK: ConstInt, GROUP: ConstInt,
):  # fmt: skip
    for local in range(ct.bid(0), student.shape[0], ct.num_blocks(0)):
        row = first + local
        label, ignored = _label_of(labels, row, ignore_index)
        if ignored:
            ct.store(soft, (row,), 0.0)
            if given(hard):
                ct.store(hard, (row,), 0.0)
        else:
            q_top, q_log_sum, hard_log_sum = 0.0, 0.0, 0.0
            p_top, p_log_sum = 0.0, 0.0
            tops, ratio = 0.0, 0.0
            q_sum, q_inverse, p_inverse = 0.0, 0.0, 0.0
            if given(hard) or not COSINE:
                of_row = _top_and_sums(
                    student, student_bias, student_softcap, local, scale, columns, PADDED, given(hard) and TEMPERED,
                    BLOCK, GROUP,
                )  # fmt: skip
                q_top, q_sum = of_row[0], of_row[1]
                q_log_sum, hard_log_sum = ct.log2(q_sum), ct.log2(of_row[2])
            if not COSINE and not GIVEN:
                of_row = _top_and_sums(
                    teacher, teacher_bias, teacher_softcap, local, scale, columns, PADDED, False, BLOCK, GROUP
                )
                p_top, p_log_sum = of_row[0], ct.log2(of_row[1])
                tops, ratio = q_top - p_top, _log2_ratio(q_sum, of_row[1])
                # A logarithm near 10 is off by up to 5e-7, and so would all probabilities of its row be, in the same direction.
                # It cancels in other divergences, where backward's probabilities are off alike.
                q_inverse, p_inverse = 1.0 / q_sum, 1.0 / of_row[1]
            from_q = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            from_p = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            products = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            # 1 is taken off what is close before that is added up: sums near 1 are rounded twice as coarsely above it as below.
            close = ct.full((BLOCK // GROUP, 1), -GROUP / BLOCK, ct.float32)
            # Backwards: what was read last is still in the cache.
            tiles = ct.num_tiles(student, axis=1, shape=(1, BLOCK))
            for back in range(tiles):
                tile = tiles - 1 - back
                x = _load(student, student_bias, student_softcap, local, tile, columns, PADDED, BLOCK, GROUP)[0]
                if GIVEN:
                    p, log_p = _given(teacher, local, tile, beta, LOG, BLOCK, GROUP)
                    log_q = ((x - q_top) * scale - q_log_sum) * LN_2
                    from_q += ct.sum(p, axis=1, keepdims=True)
                    above = log_p - log_q
                    from_p += ct.sum(ct.where(p == 0.0, 0.0, p * above), axis=1, keepdims=True)
                    # A term is how far q exceeds p where they are close, else q. A GPU's exponential is off by 1e-7, for equal
                    # classes the same way.
                    near = ct.abs(above) < 1.0
                    if not LOG:
                        near = near & (p >= beta)
                    products += ct.sum(ct.where(near, p * expm1(-above), exp(log_q, False)), axis=1, keepdims=True)
                    close += ct.sum(ct.where(near, p, 0.0), axis=1, keepdims=True)
                elif COSINE:
                    y = _load(teacher, teacher_bias, teacher_softcap, local, tile, columns, PADDED, BLOCK, GROUP)[0]
                    column = tile * BLOCK + ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (BLOCK // GROUP, GROUP))
                    inside = column < columns
                    x, y = ct.where(inside, x, 0.0), ct.where(inside, y, 0.0)
                    from_q += ct.sum(x * x, axis=1, keepdims=True)
                    from_p += ct.sum(y * y, axis=1, keepdims=True)
                    products += ct.sum(x * y, axis=1, keepdims=True)
                else:
                    y = _load(teacher, teacher_bias, teacher_softcap, local, tile, columns, PADDED, BLOCK, GROUP)[0]
                    if TVD:
                        q, p = exp2((x - q_top) * scale) * q_inverse, exp2((y - p_top) * scale) * p_inverse
                    else:
                        q = exp2(finite((x - q_top) * scale - q_log_sum))
                        p = exp2(finite((y - p_top) * scale - p_log_sum))
                    difference = _difference(x, y, tops, scale, ratio)
                    if TVD:
                        from_q += ct.sum(q * _order(difference), axis=1, keepdims=True)
                        from_p += ct.sum(_apart(q, p, difference), axis=1, keepdims=True)
                    else:
                        above_q, above_p = _above(difference, beta, rest, FORWARD or REVERSE, HALF)
                        from_q += ct.sum(q * above_q, axis=1, keepdims=True)
                        from_p += ct.sum(p * above_p, axis=1, keepdims=True)
            of_student, of_teacher = ct.sum(from_q), ct.sum(from_p)
            by_teacher, by_student = tops, ratio
            if FORWARD:
                by_teacher, by_student = p_top, p_log_sum
            if COSINE:
                zero = (of_student == 0.0) | (of_teacher == 0.0)
                by_teacher = ct.where(zero, 0.0, 1.0 / (ct.sqrt(of_student) * ct.sqrt(of_teacher)))
                cosine = ct.sum(products) * by_teacher
                loss = 1.0 - cosine
                by_student = ct.where(zero, 0.0, cosine / of_student)
            elif GIVEN:
                # With the logarithm of the student's sum, 1 but for rounding: of close distributions the loss is as small.
                excess = ct.sum(products) + ct.sum(close)
                loss = of_teacher + of_student * (excess * (1.0 - 0.5 * excess))
            elif TVD:
                loss = 0.5 * of_teacher
            elif FORWARD:
                loss = of_teacher * LN_2
            elif REVERSE:
                loss = of_student * LN_2
            else:
                loss = (rest * of_student + beta * of_teacher) * LN_2
            ct.store(soft, (row,), loss)
            if given(hard):
                known = (label >= 0) & (label < columns)
                column = ct.astype(ct.where(known, label, 0), ct.int32)
                z = ct.astype(ct.gather(student, (local, column), mask=known), ct.float32)
                if given(student_bias):
                    z += ct.astype(ct.gather(student_bias, column, mask=known), ct.float32)
                hard_log_sum = ct.where(known, hard_log_sum, math.nan)
                ct.store(hard, (row,), (q_top - cap(z, student_softcap)[0]) + hard_log_sum * LN_2)
            ct.store(statistics, (0, row), q_top)
            ct.store(statistics, (1, row), q_log_sum)
            ct.store(statistics, (2, row), by_teacher)
            ct.store(statistics, (3, row), by_student)
            ct.store(statistics, (4, row), of_student)
            ct.store(statistics, (5, row), hard_log_sum)


@ct.kernel(occupancy=GRADIENT_OCCUPANCY)
def _gradient(
    dstudent, student, teacher, student_bias, teacher_bias, statistics, labels, by_soft, by_hard,
    first, first_column, ignore_index: ct.ScalarInt64, scale, factor, beta, rest, student_softcap, teacher_softcap,
    FORWARD: ConstBool, REVERSE: ConstBool, TVD: ConstBool, COSINE: ConstBool, GIVEN: ConstBool, LOG: ConstBool,
    HALF: ConstBool,
    SOFT_STEP: ConstInt, HARD_STEP: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    across = ct.num_tiles(dstudent, axis=1, shape=(1, BLOCK))
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    for index in range(ct.bid(0), dstudent.shape[0] * across, ct.num_blocks(0)):
        local, tile = index // across, index % across
        row = first + local
        label, ignored = _label_of(labels, row, ignore_index)
        if ignored:
            ct.store(dstudent, (local, tile), ct.zeros((1, BLOCK), dstudent.dtype), allow_tma=False)
        else:
            q_top, q_log_sum = ct.load(statistics, (0, row), ()), ct.load(statistics, (1, row), ())
            x, derivative = _load(
                student if given(student) else dstudent, student_bias, student_softcap, local, tile,
                dstudent.shape[1], False, BLOCK, BLOCK,
            )  # fmt: skip
            gradient = ct.zeros((1, BLOCK), ct.float32)
            if given(by_soft):
                by = factor * ct.load(by_soft, (row * SOFT_STEP,), ())
                of_teacher, of_student = ct.load(statistics, (2, row), ()), ct.load(statistics, (3, row), ())
                if GIVEN:
                    p = _given(teacher, local, tile, beta, LOG, BLOCK, BLOCK)[0]
                    q = exp2((x - q_top) * scale - q_log_sum)
                    gradient = by * (q * ct.load(statistics, (4, row), ()) - p)
                elif COSINE:
                    y = _load(
                        teacher, teacher_bias, teacher_softcap, local, tile, dstudent.shape[1], False, BLOCK, BLOCK
                    )[0]
                    gradient = by * (x * of_student - y * of_teacher)
                else:
                    y = _load(
                        teacher, teacher_bias, teacher_softcap, local, tile, dstudent.shape[1], False, BLOCK, BLOCK
                    )[0]
                    q = exp2(finite((x - q_top) * scale - q_log_sum))
                    if FORWARD:
                        gradient = by * (q - exp2(finite((y - of_teacher) * scale - of_student)))
                    else:
                        # The gradient of a log-softmax: a class's part of the sum, minus its share of the whole sum.
                        difference = _difference(x, y, of_teacher, scale, of_student)
                        part = _part(difference, beta, rest, TVD, REVERSE, HALF)
                        gradient = by * (q * (part - ct.load(statistics, (4, row), ())))
            if given(by_hard):
                probability = exp2(finite((x - q_top) * LOG2_E - ct.load(statistics, (5, row), ())))
                place = label - (first_column + tile * BLOCK)
                here = (place >= 0) & (place < BLOCK)
                column = ct.astype(ct.where(here, place, -1), ct.int32)
                probability -= ct.where(lanes == column, 1.0, 0.0)
                gradient += ct.load(by_hard, (row * HARD_STEP,), ()) * probability
            ct.store(dstudent, (local, tile), ct.astype(gradient * derivative, dstudent.dtype), allow_tma=False)


@functools.cache
def _with_room() -> Any:
    """`_rows` for a bias or softcap, a second sum or a given target: with the registers of two blocks per multiprocessor.

    With those of four, tileiras 13.4 spills up to 94 registers.
    """
    return _rows.replace_hints(occupancy=2)


@functools.cache
def _gradient_with_room() -> Any:
    """`_gradient` for a given target with a bias or softcap: with the registers of six blocks per multiprocessor.

    With those of eight, tileiras 13.4 spills up to 4 registers.
    """
    return _gradient.replace_hints(occupancy=6)


def _kind(divergence: str) -> tuple[bool, ...]:
    named = (divergence == name for name in ("forward", "reverse", "tvd", "cosine"))
    return *named, divergence in ("given", "log"), divergence == "log"


def _as_wide(student: Logits, teacher: Logits) -> Tensor:
    """The student's logits with what lies behind them, if so does the teacher's.

    If threads load the one row's columns at once and the other's one by one, tileiras 13.4 exchanges them, and spills.
    """
    return student.memory if student.memory.shape[1] == teacher.memory.shape[1] else student.tensor()


@opaque(writes=("results",))
def _launch_rows(
    results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
) -> None:
    options = inputs.options
    students, teachers = as_rows(_as_wide(student, teacher)), as_rows(teacher.memory)
    rows, size = students.shape[0], max(students.element_size(), teachers.element_size())
    tempered = options.temperature != 1.0
    added = (inputs.student_bias, inputs.teacher_bias, options.student_softcap, options.teacher_softcap)
    roomy = any(x is not None for x in added) or options.divergence in ("given", "log")
    kernel = _with_room() if roomy or (results.hard is not None and tempered) else _rows
    launch(
        kernel, (min(rows, MOST_BLOCKS),), *results, students, teachers, inputs.student_bias, inputs.teacher_bias, inputs.labels,
        student.columns, first, options.ignore_index, LOG2_E / options.temperature, options.beta, 1.0 - options.beta,
        options.student_softcap, options.teacher_softcap, *_kind(options.divergence), options.beta == 0.5, tempered,
        students.shape[1] != student.columns, ROW_BYTES // size, GROUP_BYTES // size,
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
    students = None if student is None else as_rows(_as_wide(student, teacher))
    dstudents, teachers = _as_wide(dstudent, teacher), as_rows(teacher.memory)
    columns, options, (by_soft, by_hard) = dstudent.columns, inputs.options, incoming
    of_columns = slice(first_column, first_column + columns)
    student_bias, teacher_bias = (
        None if bias is None else bias[of_columns] for bias in (inputs.student_bias, inputs.teacher_bias)
    )
    block = min(power_of_2(columns), GRADIENT_BYTES // max(dstudents.element_size(), teachers.element_size()))
    divergence, beta = options.divergence, options.beta
    share = {"forward": 1.0, "given": 1.0, "log": 1.0, "reverse": LN_2, "tvd": 0.5}.get(
        divergence, (1.0 - beta) * LN_2
    ) / options.temperature
    roomy = divergence in ("given", "log") and (student_bias is not None or options.student_softcap is not None)
    kernel = _gradient_with_room() if roomy else _gradient
    launch(
        kernel, (min(dstudents.shape[0] * blocks(columns, block), MOST_BLOCKS),), dstudents, students, teachers,
        student_bias, teacher_bias, statistics, inputs.labels, by_soft, by_hard, first, first_column, options.ignore_index,
        LOG2_E / options.temperature, 1.0 if divergence == "cosine" else share, beta, 1.0 - beta,
        options.student_softcap, options.teacher_softcap, *_kind(divergence), beta == 0.5,
        step_of(by_soft), step_of(by_hard), block,
    )  # fmt: skip


@opaque(writes=("count",))
def _launch_count(count: Tensor, labels: Tensor, ignore_index: int) -> None:
    launch_count(count, labels, ignore_index)


@opaque(writes=("total",))
def _launch_total(total: Tensor, losses: Tensor, divisor: Tensor | None) -> None:
    launch_total(total.view(1), losses, divisor, 1.0)


class CuTileDistillation(DistillationKernels):
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
        if labels is None:
            return x.new_full((1,), x.shape[0], dtype=torch.float32)
        count = torch.empty(1, dtype=torch.float32, device=x.device)
        _launch_count(count, labels, ignore_index)
        return count

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        total = losses.new_empty(())
        _launch_total(total, losses, divisor)
        return total


KERNELS = CuTileDistillation()
