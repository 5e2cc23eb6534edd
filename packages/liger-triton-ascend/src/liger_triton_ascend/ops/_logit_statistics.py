"""Statistics of rows of logits, for `logit_statistics` and `fused_linear_logit_statistics`.

Each program takes one row after another, in blocks: a row of logits seldom fits the Unified Buffer. Each lane keeps a maximum
and, relative to it, sums: of exponentials e^d, of their squares, and of e^d d. They are reduced once. The entropy is
log Σ e^d − Σ e^d d / Σ e^d, whose two terms have one sign. Maxima are of the logits before the temperature. Differences of logits
are multiplied by its inverse.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.logit_statistics import StatisticsGrads, StatisticsInputs, StatisticsKernels, StatisticsResults
from liger_core.host.rows import Logits
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._math import LANES, cap, no_exponentials, tempered
from liger_triton_ascend.ops._rows import as_rows, long_row_blocks

# Float32 tiles alive, by the estimate, and how many more with an option.
FORWARD_TILES, FORWARD_SOFTCAP, FORWARD_TOTAL = 6.5, 4, 2
BACKWARD_TILES, BACKWARD_SOFTCAP = 7, 6


@triton.jit
def load_biased(row, bias, column, inside, other: tl.constexpr):
    xs = tl.load(row + column, inside, other=other).to(tl.float32)
    if bias is not None:
        xs += tl.load(bias + column, inside, other=0.0).to(tl.float32)
    return xs


@triton.jit
def _cooled(x, temperature):
    """A logit, or a sum of them, over the temperature."""
    return x if temperature is None else x / temperature


@triton.jit
def _rescaled(product_sum, exp_sum, fall, rescale):
    """Σ e^d d, if each d becomes less by `fall`. The maximum before the first logit leaves no sum."""
    return rescale * (product_sum + tl.where(rescale == 0.0, 0.0, fall) * exp_sum)


@triton.jit
def _rows(
    logits, bias, target, weight, lse, picked, entropy, total, log_sum_squares, best, best_index, kept,
    row_stride, target_stride, k_stride, columns, targets, first_row, count, rows, first_id, ignore_index, softcap,
    temperature, inverse, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = BLOCK // LANES
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        x_row = logits + tl.cast(index, tl.int64) * row_stride
        at = first_row + tl.cast(index, tl.int64)
        counted = 0
        for k in range(0, targets):
            label = tl.load(target + at * target_stride + k * k_stride)
            column = label - first_id
            known = (label != ignore_index) & (column >= 0) & (column < columns)
            place = tl.minimum(tl.maximum(column, 0), columns - 1)
            z = tl.load(x_row + place).to(tl.float32)
            if bias is not None:
                z += tl.load(bias + place).to(tl.float32)
            z = _cooled(cap(z, softcap)[0], temperature)
            tl.store(picked + at * targets + k, tl.where(known, z, 0.0))
            counted += tl.where(label != ignore_index, 1, 0)

        maximum, exp_sum = no_exponentials(LANES)
        square_sum = tl.zeros((LANES,), tl.float32)
        product_sum = tl.zeros((LANES,), tl.float32)
        weighted = tl.zeros((LANES,), tl.float32)
        highest = tl.full((LANES,), float("-inf"), tl.float32)
        end = tl.where(counted > 0, columns, 0)  # an ignored row is not read
        for start in range(0, end, BLOCK):
            column = start + lane
            inside = column < columns
            xs = load_biased(x_row, bias, column, inside, float("-inf"))
            if best is not None:
                highest = tl.maximum(highest, tl.max(tl.reshape(xs, (groups, LANES)), 0))
            if softcap is not None:
                xs = tl.where(inside, cap(xs, softcap)[0], float("-inf"))
            if total is not None:
                part = tl.where(inside, xs, 0.0)
                if weight is not None:
                    part *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
                weighted += tl.sum(tl.reshape(part, (groups, LANES)), 0)
            xs = tl.reshape(xs, (groups, LANES))
            higher = tl.maximum(maximum, tl.max(xs, 0))
            fall = tempered(maximum - higher, inverse)
            rescale = tl.exp(fall)
            depth = tempered(xs - higher[None, :], inverse)
            term = tl.exp(depth)
            if entropy is not None:
                product_sum = _rescaled(product_sum, exp_sum, fall, rescale)
                product_sum += tl.sum(tl.where(term == 0.0, 0.0, term * depth), 0)
            if log_sum_squares is not None:
                square_sum = square_sum * (rescale * rescale) + tl.sum(term * term, 0)
            exp_sum = exp_sum * rescale + tl.sum(term, 0)
            maximum = higher
        top = tl.max(maximum, 0)
        fall = tempered(maximum - top, inverse)
        rescale = tl.exp(fall)
        sum_of_all = tl.sum(exp_sum * rescale, 0)
        log_sum = tl.log(sum_of_all)
        tl.store(lse + at, tl.where(counted > 0, _cooled(top, temperature) + log_sum, 0.0))
        row_entropy = log_sum
        if entropy is not None:
            product_sum = _rescaled(product_sum, exp_sum, fall, rescale)
            row_entropy = tl.where(counted > 0, log_sum - tl.sum(product_sum, 0) / sum_of_all, 0.0)
            tl.store(entropy + at, row_entropy)
        if total is not None:
            tl.store(total + at, tl.where(counted > 0, _cooled(tl.sum(weighted, 0), temperature), 0.0))
        if log_sum_squares is not None:
            squares = tl.log(tl.sum(square_sum * (rescale * rescale), 0)) - 2.0 * log_sum
            tl.store(log_sum_squares + at, tl.where(counted > 0, squares, 0.0))
        if best is not None:
            # The row is read again for this, so that the loop above needn't carry the column of each lane's maximum.
            largest = tl.max(highest, 0)
            nearest = tl.full((LANES,), columns - 1, tl.int32)
            for start in range(0, end, BLOCK):
                column = start + lane
                xs = load_biased(x_row, bias, column, column < columns, float("-inf"))
                equal = tl.where(xs == largest, column, columns - 1)
                nearest = tl.minimum(nearest, tl.min(tl.reshape(equal, (groups, LANES)), 0))
            tl.store(best + at, tl.where(counted > 0, largest, 0.0))
            winner = tl.min(nearest, 0).to(tl.int64) + first_id
            tl.store(best_index + at, tl.where(counted > 0, winner, -1))
        if kept is not None:
            tl.store(kept + at, top)
            tl.store(kept + rows + at, tl.where(counted > 0, sum_of_all, -1.0))
            if entropy is not None:
                tl.store(kept + 2 * rows + at, row_entropy)


@triton.jit
def _gradient(
    dlogits, logits, bias, target, weight, kept, dlse, dpicked, dentropy, dtotal,
    row_stride, target_stride, k_stride, columns, targets, first_row, first_column, count, rows, span, first_id,
    ignore_index, softcap, inverse, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes spans of columns. If there are enough rows, a span is a whole row."""
    lane = tl.arange(0, BLOCK)
    spans = tl.cdiv(columns, span)
    if bias is not None:
        bias += first_column
    if weight is not None:
        weight += first_column
    for index in range(tl.program_id(0), count * spans, tl.num_programs(0)):
        local = tl.cast(index // spans, tl.int64)
        begin = index % spans * span
        end = tl.minimum(begin + span, columns)
        x_row = logits + local * row_stride
        dx_row = dlogits + local * columns
        at = first_row + local
        exp_sum = tl.load(kept + rows + at)
        if exp_sum == -1.0:
            for start in range(begin, end, BLOCK):
                column = start + lane
                tl.store(dx_row + column, tl.zeros((BLOCK,), tl.float32), column < columns)
        else:
            top = tl.load(kept + at)
            inverse_sum = 1.0 / exp_sum
            for start in range(begin, end, BLOCK):
                column = start + lane
                inside = column < columns
                xs, derivative = cap(load_biased(x_row, bias, column, inside, 0.0), softcap)
                depth = tempered(xs - top, inverse)
                probability = tl.exp(depth) * inverse_sum
                dz = tl.zeros((BLOCK,), tl.float32)
                if dlse is not None:
                    dz += tl.load(dlse + at) * probability
                if dentropy is not None:
                    offset = tl.load(kept + 2 * rows + at) - tl.log(exp_sum)
                    part = tl.where(probability == 0.0, 0.0, probability * (depth + offset))
                    dz -= tl.load(dentropy + at) * part
                if dtotal is not None:
                    by_total = tl.load(dtotal + at)
                    if weight is None:
                        dz += by_total
                    else:
                        dz += by_total * tl.load(weight + column, inside, other=0.0).to(tl.float32)
                if dpicked is not None:
                    for k in range(0, targets):
                        label = tl.load(target + at * target_stride + k * k_stride)
                        place = label - first_id - first_column - start
                        known = (label != ignore_index) & (place >= 0) & (place < BLOCK)
                        by_picked = tl.load(dpicked + at * targets + k)
                        dz += tl.where(lane == tl.where(known, place, -1).to(tl.int32), by_picked, 0.0)
                tl.store(dx_row + column, tempered(dz * derivative, inverse), inside)


class AscendStatistics(StatisticsKernels):
    def rows(self, results: StatisticsResults, logits: Logits, inputs: StatisticsInputs, first_row: int) -> None:
        memory, row_stride = as_rows(logits.memory)
        count, columns = memory.shape
        options, target = inputs.options, inputs.target
        tiles = FORWARD_TILES + FORWARD_SOFTCAP * (options.softcap is not None)
        programs, block = long_row_blocks(memory, count, columns, tiles + FORWARD_TOTAL * (results.total is not None))
        _rows[(programs,)](
            memory, inputs.bias, target, inputs.weight, *results, row_stride, target.stride(0), target.stride(1),
            columns, target.shape[1], first_row, count, target.shape[0], options.first, options.ignore_index,
            options.softcap, options.temperature, options.inverse, BLOCK=block, LANES=min(block, LANES),
        )  # fmt: skip

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        inputs: StatisticsInputs,
        kept: Tensor,
        incoming: StatisticsGrads,
        first_row: int,
        first_column: int,
    ) -> None:
        memory, row_stride = as_rows((logits or dlogits).memory)
        count, columns = memory.shape
        options, target = inputs.options, inputs.target
        dlse, dpicked, dentropy, dtotal = incoming
        tiles = BACKWARD_TILES + BACKWARD_SOFTCAP * (options.softcap is not None)
        _, block = long_row_blocks(memory, count, columns, tiles)
        cores = get_npu_core_count(memory.device)
        blocks = (columns + block - 1) // block
        sharers = min(blocks, max(1, cores // count))  # programs per row, if there are fewer rows than cores
        span = (blocks + sharers - 1) // sharers * block
        _gradient[(min(count * sharers, cores),)](
            dlogits.memory, memory, inputs.bias, target, inputs.weight, kept, dlse, dpicked, dentropy, dtotal, row_stride,
            target.stride(0), target.stride(1), columns, target.shape[1], first_row, first_column, count,
            target.shape[0], span, options.first, options.ignore_index, options.softcap, options.inverse, BLOCK=block,
        )  # fmt: skip


KERNELS = AscendStatistics()
