"""Statistics of rows of logits, for `logit_statistics` and `fused_linear_logit_statistics`.

One program per row reads its logits once. It keeps running maxima and, relative to them, running sums: of exponentials e^d, of
their squares, and of e^d d. The entropy is log Σ e^d − Σ e^d d / Σ e^d, whose two terms have one sign. Maxima are of the logits
before the temperature. Differences of logits are multiplied by its inverse.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.logit_statistics import Incoming, Labels, Rows, StatisticsKernels
from liger_triton.ops._cross_entropy import _biased, _block, _cap, _exp_like
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, power_of_2

MOST_TARGETS = 128
"""Targets of a row that are looked up at once."""


@triton.jit
def _tempered(x, inverse):
    """x / temperature, for a difference of logits: its rounding is then relative to the difference, not to the logits."""
    if inverse is None:
        return x
    else:
        return x * tl.cast(inverse, tl.float32)  # torch.compile passes floats as float64


@triton.jit
def _cooled(x, temperature):
    """A logit, or a sum of them, over the temperature."""
    if temperature is None:
        return x
    else:
        return tl.math.div_rn(x, tl.cast(temperature, tl.float32))


@triton.jit
def _labels(target, k, count, k_stride, first_id, columns, ignore_index):
    """Columns of some targets of a row, whether each target counts, and whether its column is here."""
    label = tl.load(target + k * k_stride, k < count, other=ignore_index)
    counts = label != ignore_index
    column = label - first_id
    return column, counts, counts & (column >= 0) & (column < columns)


@kernel(do_not_specialize=["first_row", "rows", "first_id", "target_stride", "k_stride"])
def _rows(
    logits, bias, target, weight, lse, picked, entropy, total, log_sum_squares, best, best_index, kept,
    row_stride, target_stride, k_stride, columns, targets, first_row, rows, first_id, ignore_index, softcap,
    temperature, inverse,
    ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    logits += local * row_stride
    target += row * target_stride
    picked += row * targets
    counted = 0
    for start in range(0, targets, TARGETS):
        k = start + tl.arange(0, TARGETS)
        _, counts, _ = _labels(target, k, targets, k_stride, first_id, columns, ignore_index)
        counted += tl.sum(counts.to(tl.int32))
    for start in range(0, targets, TARGETS):
        k = start + tl.arange(0, TARGETS)
        column, _, known = _labels(target, k, targets, k_stride, first_id, columns, ignore_index)
        z = tl.load(logits + column, known, other=0.0).to(tl.float32)
        z = _cooled(_cap(_biased(z, bias, column, known), softcap, logits)[0], temperature)
        tl.store(picked + k, tl.where(known, z, 0.0), k < targets)
    if counted == 0:
        tl.store(lse + row, 0.0)
        if entropy is not None:
            tl.store(entropy + row, 0.0)
        if total is not None:
            tl.store(total + row, 0.0)
        if log_sum_squares is not None:
            tl.store(log_sum_squares + row, 0.0)
        if best is not None:
            tl.store(best + row, 0.0)
            tl.store(best_index + row, -1)
        if kept is not None:
            tl.store(kept + rows + row, -1.0)
        return

    # A thread holds whole groups of columns, so each group has its own maximum and the loop exchanges nothing between threads.
    # If a thread can load a group at once, its columns are neighbours. Otherwise neighbouring threads load neighbouring columns.
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    maximum = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    exp_sum = tl.zeros([GROUPS], tl.float32)
    square_sum = tl.zeros([GROUPS], tl.float32)
    product_sum = tl.zeros([GROUPS], tl.float32)
    weighted = tl.zeros([GROUPS], tl.float32)
    highest = tl.full([GROUPS], -float("inf"), tl.float32)
    highest_column = tl.zeros([GROUPS], tl.int32)
    group_step: tl.constexpr = GROUP if ALIGNED else 1
    step: tl.constexpr = 1 if ALIGNED else GROUPS
    lanes = tl.arange(0, GROUPS)[:, None] * group_step + tl.arange(0, GROUP)[None, :] * step
    for start in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = start + lanes
        inside = column < columns
        x = _biased(tl.load(logits + column, inside, other=-float("inf")).to(tl.float32), bias, column, inside)
        if best is not None:
            block_best, place = tl.max(x, axis=1, return_indices=True)
            better = block_best > highest
            highest = tl.where(better, block_best, highest)
            highest_column = tl.where(better, start + tl.arange(0, GROUPS) * group_step + place * step, highest_column)
        if softcap is not None:
            x = tl.where(inside, _cap(x, softcap, logits)[0], -float("inf"))
        if total is not None:
            part = tl.where(inside, x, 0.0)
            if weight is not None:
                part *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
            weighted += tl.sum(part, axis=1)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        fall = _tempered(maximum - higher, inverse)
        rescale = _exp_like(fall, logits)
        depth = _tempered(x - higher[:, None], inverse)
        term = _exp_like(depth, logits)
        if entropy is not None:
            # The maximum before the first logit leaves no sum, and the product with it could be infinite.
            product_sum = rescale * (product_sum + tl.where(rescale == 0.0, 0.0, fall) * exp_sum)
            product_sum += tl.sum(tl.where(term == 0.0, 0.0, term * depth), axis=1)
        if log_sum_squares is not None:
            square_sum = square_sum * (rescale * rescale) + tl.sum(term * term, axis=1)
        exp_sum = exp_sum * rescale + tl.sum(term, axis=1)
        maximum = higher
    top = tl.max(maximum)
    fall = _tempered(maximum - top, inverse)
    rescale = _exp_like(fall, logits)
    sum_of_all = tl.sum(exp_sum * rescale)
    log_sum = tl.log(sum_of_all)
    tl.store(lse + row, _cooled(top, temperature) + log_sum)
    if entropy is not None:
        product_sum = rescale * (product_sum + tl.where(rescale == 0.0, 0.0, fall) * exp_sum)
        row_entropy = log_sum - tl.math.div_rn(tl.sum(product_sum), sum_of_all)
        tl.store(entropy + row, row_entropy)
    if total is not None:
        tl.store(total + row, _cooled(tl.sum(weighted), temperature))
    if log_sum_squares is not None:
        tl.store(log_sum_squares + row, tl.log(tl.sum(square_sum * (rescale * rescale))) - 2.0 * log_sum)
    if best is not None:
        tl.store(best + row, tl.max(highest))
        winner = tl.min(tl.where(highest == tl.max(highest), highest_column, columns))
        tl.store(best_index + row, winner.to(tl.int64) + first_id)
    if kept is not None:
        tl.store(kept + row, top)
        tl.store(kept + rows + row, sum_of_all)
        if entropy is not None:
            tl.store(kept + 2 * rows + row, row_entropy)


@kernel(do_not_specialize=["first_row", "first_column", "rows", "first_id", "target_stride", "k_stride"])
def _gradient(
    dlogits, logits, bias, target, weight, kept, dlse, dpicked, dentropy, dtotal,
    row_stride, target_stride, k_stride, columns, targets, first_row, first_column, rows, first_id, ignore_index,
    softcap, inverse,
    SEVERAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    row = first_row + local
    begin = tl.program_id(0) % blocks * BLOCK
    column = begin + tl.arange(0, BLOCK)
    inside = column < columns
    dlogits += local * columns
    exp_sum = tl.load(kept + rows + row)
    if exp_sum == -1.0:
        tl.store(dlogits + column, tl.zeros([BLOCK], tl.float32), inside)
        return

    x = tl.load(logits + local * row_stride + column, inside, other=0.0).to(tl.float32)
    x, derivative = _cap(_biased(x, bias, first_column + column, inside), softcap, logits)
    depth = _tempered(x - tl.load(kept + row), inverse)
    probability = _exp_like(depth, logits) * (1.0 / exp_sum)
    dz = tl.zeros([BLOCK], tl.float32)
    if dentropy is not None:
        by_entropy = tl.load(dentropy + row)
        offset = tl.load(kept + 2 * rows + row) - tl.log(exp_sum)
        dz = -by_entropy * tl.where(probability == 0.0, 0.0, probability * (depth + offset))
    if dlse is not None:
        dz += tl.load(dlse + row) * probability
    if dtotal is not None:
        by_total = tl.load(dtotal + row)
        if weight is None:
            dz += by_total
        else:
            dz += by_total * tl.load(weight + first_column + column, inside, other=0.0).to(tl.float32)
    if dpicked is not None:
        for k in range(0, targets if SEVERAL else 1):
            label = tl.load(target + row * target_stride + k * k_stride)
            place = label - first_id - first_column - begin
            if (label != ignore_index) & (place >= 0) & (place < BLOCK):
                dz += tl.where(column == begin + place, tl.load(dpicked + row * targets + k), 0.0)
    tl.store(dlogits + column, _tempered(dz * derivative, inverse), inside)


class _Kernels(StatisticsKernels):
    def rows(self, results: Rows, logits: Tensor, labels: Labels, first_row: int) -> None:
        logits, row_stride = as_rows(logits)
        n, columns = logits.shape
        size, options, target = logits.element_size(), labels.options, labels.target
        block = _block(columns, 16384 // size)
        group = 16 // size  # what a thread loads at once
        _rows[(n,)](
            logits, labels.bias, target, labels.weight, *results, row_stride, target.stride(0), target.stride(1),
            columns, target.shape[1], first_row, target.shape[0], options.first, options.ignore_index, options.softcap,
            options.temperature, options.inverse,
            ALIGNED=row_stride % 16 == 0 and columns % 16 == 0, GROUPS=block // group, GROUP=group, STAGES=3,
            TARGETS=min(power_of_2(target.shape[1], 1), MOST_TARGETS), num_warps=max(block * size // 2048, 1),
        )  # fmt: skip

    def gradient(
        self,
        dlogits: Tensor,
        logits: Tensor | None,
        labels: Labels,
        kept: Tensor,
        incoming: Incoming,
        first_row: int,
        first_column: int,
    ) -> None:
        logits, row_stride = as_rows(dlogits if logits is None else logits)
        n, columns = logits.shape
        options, target = labels.options, labels.target
        dlse, dpicked, dentropy, dtotal = incoming
        block = _block(columns, 4096)
        blocks = (columns + block - 1) // block
        _gradient[(n * blocks,)](
            dlogits, logits, labels.bias, target, labels.weight, kept, dlse, dpicked, dentropy, dtotal,
            row_stride, target.stride(0), target.stride(1), columns, target.shape[1], first_row, first_column,
            target.shape[0], options.first, options.ignore_index, options.softcap, options.inverse,
            SEVERAL=target.shape[1] > 1, BLOCK=block, num_warps=max(block // 512, 1),
        )  # fmt: skip


KERNELS = _Kernels()
