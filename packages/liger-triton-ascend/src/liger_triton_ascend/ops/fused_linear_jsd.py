"""Jensen-Shannon divergence of two linear layers: PyTorch's matmul computes chunks of logits, and kernels work on those.

A vocabulary seldom fits the Unified Buffer, so each program takes one row after another, block by block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.contract import implements
from liger_core.host.fused_linear_jsd import DivergenceInputs, DivergenceKernels, FusedLinearJSD
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_triton_ascend.ops._divergences import above_mixture, count_of, finite
from liger_triton_ascend.ops._linear import LINEAR
from liger_triton_ascend.ops._math import LANES, top_and_sum
from liger_triton_ascend.ops._rows import long_row_blocks

# Float32 tiles alive, by the estimate: in the loops that add up exponentials, in the one that adds up divergences, and in the
# gradient.
SUM_TILES = 4.5
FORWARD_TILES = 10
BACKWARD_TILES = 9


@triton.jit
def _log_probability(row, column, inside, top, scale, log_sum):
    x = tl.load(row + column, inside, other=float("-inf")).to(tl.float32)
    return finite((x - top) * scale - log_sum)


@triton.jit
def _above(q, p, beta, rest, FORWARD: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr):
    """How far the log-probabilities of student and teacher are above those that each is compared with."""
    if FORWARD or REVERSE:
        return q - p, p - q
    else:
        return above_mixture(q - p, beta, rest, HALF)


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
            # Divided by the sum of the probabilities, which is 1 but for the rounding of its logarithm. That rounding then
            # cancels.
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
                # The gradient of a log-softmax: a class's part of the sum, minus its probability's share of the whole sum.
                above_q, _ = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
                gradient = tl.exp(q) * (above_q - from_student)
            tl.store(dq_row + column, factor * gradient, inside)
        for start in range(end, columns, BLOCK):  # the whole row if it doesn't count, otherwise nothing
            tl.store(dq_row + start + lane, tl.zeros((BLOCK,), tl.float32), start + lane < columns)


def _options(inputs: DivergenceInputs) -> tuple[tuple[int, float, float, float], dict[str, bool]]:
    """Runtime arguments and constants of both kernels."""
    beta = inputs.beta
    kind = {"FORWARD": beta == 0, "REVERSE": beta == 1, "HALF": beta == 0.5}
    return (inputs.ignore_index, 1.0 / inputs.temperature, beta, 1.0 - beta), kind


class AscendDivergence(DivergenceKernels):
    def rows(
        self,
        losses: Tensor,
        statistics: Tensor | None,
        student: Logits,
        teacher: Logits,
        inputs: DivergenceInputs,
        first: int,
    ) -> None:
        count, columns = student.memory.shape
        _, sum_block = long_row_blocks(student.memory, count, columns, SUM_TILES)
        programs, block = long_row_blocks(student.memory, count, columns, FORWARD_TILES)
        options, kind = _options(inputs)
        _rows[(programs,)](
            losses, statistics, student.memory, teacher.memory, inputs.labels, columns, first, count, losses.shape[0], *options,
            **kind, SUM_BLOCK=sum_block, LANES=min(sum_block, LANES), BLOCK=block,
        )  # fmt: skip

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
        count, columns = dstudent.memory.shape
        programs, block = long_row_blocks(dstudent.memory, count, columns, BACKWARD_TILES)
        options, kind = _options(inputs)
        _gradient[(programs,)](
            dstudent.memory, statistics, (student or dstudent).memory, teacher.memory, inputs.labels, incoming, columns,
            first, count, statistics.shape[1], *options, **kind, BLOCK=block,
        )  # fmt: skip

    def incoming(self, dloss: Tensor | None, count: Tensor) -> Tensor:
        """The gradient of Σ losses."""
        return torch.ones_like(count) if dloss is None else dloss / count

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return count_of(x, labels, ignore_index)

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        return losses.sum() / count


_host = FusedLinearJSD(AscendDivergence(), LINEAR)
forward = implements(fused_linear_jsd)(_host.forward)
backward = _host.backward
