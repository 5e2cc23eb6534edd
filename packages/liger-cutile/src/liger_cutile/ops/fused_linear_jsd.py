"""Jensen-Shannon divergence of two linear layers: PyTorch's matmul computes chunks of logits, and kernels work on those."""

import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import fused_linear_jsd
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.fused_linear_jsd import DivergenceInputs, DivergenceKernels, FusedLinearJSD
from liger_core.host.rows import Logits
from liger_cutile.ops._divergences import above_mixture, finite, launch_count, launch_total
from liger_cutile.ops._launch import MOST_BLOCKS, ConstBool, ConstInt, given, launch
from liger_cutile.ops._linear import LINEAR
from liger_cutile.ops._math import LEAST, LN_2, LOG2_E, exp2
from liger_cutile.ops._rows import blocks, power_of_2

# Bytes of a tile of logits, and blocks per multiprocessor. Loads go into registers. With few blocks, their rows are still in the
# cache when they are read again.
ROW_BYTES, ROW_OCCUPANCY = 8192, 4
GRADIENT_BYTES, GRADIENT_OCCUPANCY = 4096, 8
# Bytes that a thread loads at once: what a loop adds up of them stays in the thread.
GROUP_BYTES = 16


@ct.function
def _load(logits, row, tile, columns, PADDED, BLOCK, GROUP):
    """A row's tile in float32, ``[BLOCK / GROUP, GROUP]``; -inf outside the row.

    Rows that are PADDED are loaded with what lies behind them: a bound that 16 divides lets a thread load its columns at once.
    """
    x = ct.load(logits, (row, tile), (1, BLOCK), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
    x = ct.astype(ct.reshape(x, (BLOCK // GROUP, GROUP)), ct.float32)
    if PADDED:
        column = tile * BLOCK + ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (BLOCK // GROUP, GROUP))
        x = ct.where(column < columns, x, -math.inf)
    return x


@ct.function
def _top_and_log_sum(logits, row, scale, columns, PADDED, BLOCK, GROUP):
    """The largest logit of a row, and log2 of the sum of 2^(scale · (logit − largest))."""
    maximum = ct.full((BLOCK // GROUP, 1), LEAST, ct.float32)
    total = ct.zeros((BLOCK // GROUP, 1), ct.float32)
    for tile in range(ct.num_tiles(logits, axis=1, shape=(1, BLOCK))):
        x = _load(logits, row, tile, columns, PADDED, BLOCK, GROUP)
        higher = ct.maximum(maximum, ct.max(x, axis=1, keepdims=True))
        sums = ct.sum(exp2((x - higher) * scale), axis=1, keepdims=True)
        total = total * exp2((maximum - higher) * scale) + sums
        maximum = higher
    top = ct.max(maximum)
    return top, ct.log2(ct.sum(total * exp2((maximum - top) * scale)))


@ct.function
def _log2_probability(x, top, scale, log_sum):
    return finite((x - top) * scale - log_sum)


@ct.function
def _above(q, p, beta, rest, FORWARD, REVERSE, HALF):
    """How far the log2 probabilities of student and teacher are above those that each is compared with."""
    if FORWARD or REVERSE:
        return q - p, p - q
    else:
        return above_mixture(q - p, beta, rest, HALF, LOG2_E)


@ct.function
def _ignored(labels, row, ignore_index):
    if given(labels):
        return ct.load(labels, (row,), ()) == ignore_index
    else:
        return False


@ct.kernel(occupancy=ROW_OCCUPANCY)
def _rows(
    losses, statistics, student, teacher, labels, columns, first, ignore_index: ct.ScalarInt64, scale, beta, rest,
    FORWARD: ConstBool, REVERSE: ConstBool, HALF: ConstBool, PADDED: ConstBool, BLOCK: ConstInt, GROUP: ConstInt,
):  # fmt: skip
    for local in range(ct.bid(0), student.shape[0], ct.num_blocks(0)):
        row = first + local
        if _ignored(labels, row, ignore_index):
            ct.store(losses, (row,), 0.0)
        else:
            q_top, q_log_sum = _top_and_log_sum(student, local, scale, columns, PADDED, BLOCK, GROUP)
            p_top, p_log_sum = _top_and_log_sum(teacher, local, scale, columns, PADDED, BLOCK, GROUP)
            from_q = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            from_p = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            # Backwards: what was read last is still in the cache.
            tiles = ct.num_tiles(student, axis=1, shape=(1, BLOCK))
            for back in range(tiles):
                tile = tiles - 1 - back
                x = _load(student, local, tile, columns, PADDED, BLOCK, GROUP)
                q = _log2_probability(x, q_top, scale, q_log_sum)
                y = _load(teacher, local, tile, columns, PADDED, BLOCK, GROUP)
                p = _log2_probability(y, p_top, scale, p_log_sum)
                above_q, above_p = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
                from_q += ct.sum(exp2(q) * above_q, axis=1, keepdims=True)
                from_p += ct.sum(exp2(p) * above_p, axis=1, keepdims=True)
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
            x = _load(student if given(student) else dstudent, local, tile, 0, False, BLOCK, BLOCK)
            q = _log2_probability(x, q_top, scale, q_log_sum)
            y = _load(teacher, local, tile, 0, False, BLOCK, BLOCK)
            p = _log2_probability(y, p_top, scale, p_log_sum)
            if FORWARD:
                gradient = exp2(q) - exp2(p)
            else:
                # The gradient of a log-softmax: a class's part of the sum, minus its probability's share of the whole sum.
                above_q, _ = _above(q, p, beta, rest, FORWARD, REVERSE, HALF)
                gradient = exp2(q) * (above_q - ct.load(statistics, (4, row), ()))
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
    columns: int,
    labels: Tensor | None,
    first: int,
    ignore_index: int,
    temperature: float,
    beta: float,
) -> None:
    rows, size = student.shape[0], max(student.element_size(), teacher.element_size())
    launch(
        _rows, (min(rows, MOST_BLOCKS),), losses, statistics, student, teacher, labels, columns, first, ignore_index,
        LOG2_E / temperature, float(beta), 1.0 - beta, *_kind(beta), Logits(student, columns).padded(),
        ROW_BYTES // size, GROUP_BYTES // size,
    )  # fmt: skip


@opaque(writes=("dstudent",))
def _launch_gradient(
    dstudent: Tensor,
    student: Tensor | None,
    teacher: Tensor,
    columns: int,
    statistics: Tensor,
    labels: Tensor | None,
    dloss: Tensor | None,
    count: Tensor,
    first: int,
    ignore_index: int,
    temperature: float,
    beta: float,
) -> None:
    block = min(power_of_2(columns), GRADIENT_BYTES // max(dstudent.element_size(), teacher.element_size()))
    factor = {0: 1.0, 1: LN_2}.get(beta, (1.0 - beta) * LN_2) / temperature
    launch(
        _gradient, (min(dstudent.shape[0] * blocks(columns, block), MOST_BLOCKS),), dstudent, student, teacher, statistics,
        labels, None if dloss is None else dloss.view(1), count, first, ignore_index,
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


class CuTileDivergence(DivergenceKernels):
    def rows(
        self,
        losses: Tensor,
        statistics: Tensor | None,
        student: Logits,
        teacher: Logits,
        inputs: DivergenceInputs,
        first: int,
    ) -> None:
        _launch_rows(
            losses, statistics, student.memory, teacher.memory, student.columns, inputs.labels, first, *inputs[1:]
        )

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
        _launch_gradient(
            dstudent.memory, None if student is None else student.memory, teacher.memory, dstudent.columns, statistics,
            inputs.labels, *incoming, first, *inputs[1:],
        )  # fmt: skip

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        if labels is None:
            return x.new_full((1,), x.shape[0], dtype=torch.float32)
        count = torch.empty(1, dtype=torch.float32, device=x.device)
        _launch_count(count, labels, ignore_index)
        return count

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        loss = losses.new_empty(())
        _launch_loss(loss, losses, count)
        return loss


_host = FusedLinearJSD(CuTileDivergence(), LINEAR)
forward = implements(fused_linear_jsd)(_host.forward)
backward = _host.backward
