"""Statistics of rows of logits, for `logit_statistics` and `fused_linear_logit_statistics`.

One program per row reads its logits once. It keeps running maxima and, relative to them, running sums: of exponentials e^d, of
their squares, and of e^d d. The entropy is log Σ e^d − Σ e^d d / Σ e^d, whose two terms have one sign. Maxima are of the logits
before the temperature. Differences of logits are multiplied by its inverse.

On Hopper, logits of half-precision x and weight need no memory: a program that multiplies a tile of them finds its maxima and
sums, while it loads the next. Another kernel joins those of a row's tiles, and makes the targets' logits once more.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_core import torch_state
from liger_core.custom_op import opaque
from liger_core.host.logit_statistics import (
    StatisticsGrads,
    StatisticsInputs,
    StatisticsKernels,
    StatisticsResults,
    terms_columns,
)
from liger_core.host.rows import Logits
from liger_triton.ops._device import is_hopper, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._linear import TILES_IN_TURN, tile_in_turn
from liger_triton.ops._math import biased, cap, exp_like, fast_exp, tempered
from liger_triton.ops._rows import as_rows, block_of, in_vectors, power_of_2

MOST_TARGETS = 128
"""Targets of a row that are looked up at once."""

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 256, 64
"""The tile of logits that a program multiplies, and how much of x's rows it loads at once."""
PART = 128
"""Columns whose maxima and sums are found together: half of a tile. Of a whole tile they would spill registers."""
LEAST_ROWS = 512
"""Rows below which PyTorch's product is as fast."""
SAMPLE = 128
"""Logits of a row that are made first. All terms of a row can then be relative to one number, its base."""
RISE = tl.constexpr(30.0)
"""How far a base is above the largest logit of its sample, over the temperature; and how far a part's may be above the base.

The terms of a part that is further above are relative to its own maximum. Others are at most e^30, and the row's largest is at
least e^-30: in bfloat16 neither they nor their products with the weight overflow, or lose what matters."""
FEW_TARGETS = 64
"""Targets of a row whose logits are made once more. Each reads a row of the weight."""


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


@triton.jit
def _count(target, targets, k_stride, first_id, columns, ignore_index, TARGETS: tl.constexpr):
    """How many of a row's targets count."""
    counted = 0
    for start in range(0, targets, TARGETS):
        k = start + tl.arange(0, TARGETS)
        _, counts, _ = _labels(target, k, targets, k_stride, first_id, columns, ignore_index)
        counted += tl.sum(counts.to(tl.int32))
    return counted


@triton.jit
def _store_ignored(lse, entropy, total, log_sum_squares, best, best_index, kept, row, rows):
    """Write the results of a row without a target that counts."""
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


@triton.jit
def _store_row(
    lse, entropy, total, log_sum_squares, best, best_index, kept, row, rows, columns, first_id, temperature, inverse,
    maximum, exp_sum, product_sum, square_sum, weighted, highest, highest_column, logits,
):  # fmt: skip
    """Write a row's results from the maxima and sums of its parts."""
    top = tl.max(maximum)
    fall = tempered(maximum - top, inverse)
    rescale = exp_like(fall, logits)
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


@kernel(do_not_specialize=["first_row", "rows", "first_id", "target_stride", "k_stride"])
def _rows(
    logits, bias, target, weight, lse, picked, entropy, total, log_sum_squares, best, best_index, kept,
    row_stride, target_stride, k_stride, columns, width, targets, first_row, rows, first_id, ignore_index, softcap,
    temperature, inverse,
    PADDED: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    TARGETS: tl.constexpr,
):  # fmt: skip
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    logits += local * row_stride
    target += row * target_stride
    picked += row * targets
    counted = _count(target, targets, k_stride, first_id, columns, ignore_index, TARGETS)
    for start in range(0, targets, TARGETS):
        k = start + tl.arange(0, TARGETS)
        column, _, known = _labels(target, k, targets, k_stride, first_id, columns, ignore_index)
        z = tl.load(logits + column, known, other=0.0).to(tl.float32)
        z = _cooled(cap(biased(z, bias, column, known), softcap, logits)[0], temperature)
        tl.store(picked + k, tl.where(known, z, 0.0), k < targets)
    if counted == 0:
        _store_ignored(lse, entropy, total, log_sum_squares, best, best_index, kept, row, rows)
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
        x = tl.load(logits + column, column < width, other=-float("inf")).to(tl.float32)
        if PADDED:
            x = tl.where(inside, x, -float("inf"))
        x = biased(x, bias, column, inside)
        if best is not None:
            block_best, place = tl.max(x, axis=1, return_indices=True)
            better = block_best > highest
            highest = tl.where(better, block_best, highest)
            highest_column = tl.where(better, start + tl.arange(0, GROUPS) * group_step + place * step, highest_column)
        if softcap is not None:
            x = tl.where(inside, cap(x, softcap, logits)[0], -float("inf"))
        if total is not None:
            part = tl.where(inside, x, 0.0)
            if weight is not None:
                part *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
            weighted += tl.sum(part, axis=1)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        fall = tempered(maximum - higher, inverse)
        rescale = exp_like(fall, logits)
        depth = tempered(x - higher[:, None], inverse)
        term = exp_like(depth, logits)
        if entropy is not None:
            # The maximum before the first logit leaves no sum, and the product with it could be infinite.
            product_sum = rescale * (product_sum + tl.where(rescale == 0.0, 0.0, fall) * exp_sum)
            product_sum += tl.sum(tl.where(term == 0.0, 0.0, term * depth), axis=1)
        if log_sum_squares is not None:
            square_sum = square_sum * (rescale * rescale) + tl.sum(term * term, axis=1)
        exp_sum = exp_sum * rescale + tl.sum(term, axis=1)
        maximum = higher
    _store_row(
        lse, entropy, total, log_sum_squares, best, best_index, kept, row, rows, columns, first_id, temperature, inverse,
        maximum, exp_sum, product_sum, square_sum, weighted, highest, highest_column, logits,
    )  # fmt: skip


@triton.jit
def _tell_part(
    x, first_row, first, part, bias, target, terms, bases, maxima, exp_sums, product_sums, square_sums, weighted_sums,
    bests, best_columns, row, here, target_stride, columns, parts, ignore_index, inverse,
    PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the maxima and sums of some columns of a tile of logits.

    `terms` get the exponentials: relative to the row's base, if there is one and the maximum is not far above it, or else to the
    maximum. With bases, those of ignored rows are 0. So are those of columns from `columns` on.
    """
    column = first + tl.arange(0, PART)
    inside = column < columns
    here &= part < parts
    if bias is not None:
        x += tl.load(bias + column, inside, other=0.0).to(tl.float32)[None, :]
    at = row * parts + part
    if bests is not None:
        highest, place = tl.max(
            x if WHOLE else tl.where(inside[None, :], x, -float("inf")), axis=1, return_indices=True
        )
        tl.store(bests + at, highest, here)
        tl.store(best_columns + at, first + place, here)
    if weighted_sums is not None:
        tl.store(weighted_sums + at, tl.sum(x if WHOLE else tl.where(inside[None, :], x, 0.0), axis=1), here)
    if bases is not None:
        # Ignored rows' terms are 0, even if their logits are NaN. A select of the terms would take twice the instructions.
        label = tl.load(target + row * target_stride, here, other=ignore_index)
        x = tl.where(column[None, :] < tl.where(label == ignore_index, 0, columns)[:, None], x, -float("inf"))
    elif not WHOLE:
        x = tl.where(inside[None, :], x, -float("inf"))
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    top = tl.maximum(tl.max(x, axis=1), -3.4028234663852886e38)
    depth = tempered(x - top[:, None], inverse)
    # No other work hides this. A term is off by its depth's rounding, which among so many is less than their sum's.
    term = fast_exp(depth)
    tl.store(maxima + at, top, here)
    tl.store(exp_sums + at, tl.sum(term, axis=1), here)
    if terms is not None:
        based = term
        if bases is not None:
            # This takes no second exponential per element, and the sums have the same bits without bases.
            rise = tempered(top - tl.load(bases + row, here, other=0.0), inverse)
            based *= tl.where(rise <= RISE, fast_exp(rise), 1.0)[:, None]
        # By TMA: threads' own stores, of four bytes each, take longer.
        terms.store([first_row, first], based.to(terms.dtype))
    if product_sums is not None:
        tl.store(product_sums + at, tl.sum(tl.where(term == 0.0, 0.0, term * depth), axis=1), here)
    if square_sums is not None:
        tl.store(square_sums + at, tl.sum(term * term, axis=1), here)


@kernel(do_not_specialize=["rows", "target_stride"])
def _tiles(
    x, weight, bias, target, terms, bases, maxima, exp_sums, product_sums, square_sums, weighted_sums, bests,
    best_columns, target_stride, rows, columns, depth, parts, ignore_index, inverse,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, DEPTH: tl.constexpr, TURN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Multiply tiles of logits. Write their maxima and sums."""
    row_tiles = tl.cdiv(rows, ROWS)
    tiles = row_tiles * tl.cdiv(columns, COLUMNS)
    # `flatten` makes one loop of all tiles' steps: a tile's first loads are under way while the sums of the last are found.
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile, block = tile_in_turn(number, row_tiles, columns, COLUMNS, TURN)
        first_row, first_column = tile * ROWS, block * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, depth, DEPTH):
            sums = tl.dot(x.load([first_row, k]), weight.load([first_column, k]).T, sums)
        row = first_row.to(tl.int64) + tl.arange(0, ROWS)
        here = row < rows
        part = first_column // PART
        left, right = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, PART)), (0, 2, 1)))
        _tell_part(
            left, first_row, first_column, part, bias, target, terms, bases, maxima, exp_sums, product_sums, square_sums,
            weighted_sums, bests, best_columns, row, here, target_stride, columns, parts, ignore_index, inverse, PART,
            WHOLE,
        )  # fmt: skip
        _tell_part(
            right, first_row, first_column + PART, part + 1, bias, target, terms, bases, maxima, exp_sums, product_sums,
            square_sums, weighted_sums, bests, best_columns, row, here, target_stride, columns, parts, ignore_index,
            inverse, PART, WHOLE,
        )  # fmt: skip


@kernel(do_not_specialize=["first_row", "rows", "first_id", "target_stride", "k_stride"])
def _join(
    x, linear_weight, bias, target, terms, lse, picked, entropy, total, log_sum_squares, best, best_index, kept, maxima,
    exp_sums, product_sums, square_sums, weighted_sums, bests, best_columns, x_row, weight_row, target_stride, k_stride,
    columns, terms_columns, depth, targets, parts, first_row, rows, first_id, ignore_index, temperature, inverse,
    BLOCK: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Write a row's results from the maxima and sums of its parts, and its targets' logits. Targets' terms become 0."""
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    target += row * target_stride
    if _count(target, targets, k_stride, first_id, columns, ignore_index, TARGETS) == 0:
        for start in range(0, targets, TARGETS):
            k = start + tl.arange(0, TARGETS)
            tl.store(picked + row * targets + k, 0.0, k < targets)
        _store_ignored(lse, entropy, total, log_sum_squares, best, best_index, kept, row, rows)
        return

    maximum = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    exp_sum = tl.zeros([BLOCK], tl.float32)
    square_sum = tl.zeros([BLOCK], tl.float32)
    product_sum = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    highest_column = tl.zeros([BLOCK], tl.int32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        there = part < parts
        at = local * parts + part
        if best is not None:
            part_best = tl.load(bests + at, there, other=-float("inf"))
            better = part_best > highest
            highest = tl.where(better, part_best, highest)
            highest_column = tl.where(better, tl.load(best_columns + at, there, other=0), highest_column)
        if total is not None:
            weighted += tl.load(weighted_sums + at, there, other=0.0)
        top = tl.load(maxima + at, there, other=-3.4028234663852886e38)
        higher = tl.maximum(maximum, top)
        fall, own_fall = tempered(maximum - higher, inverse), tempered(top - higher, inverse)
        rescale, own_rescale = exp_like(fall, maxima), exp_like(own_fall, maxima)
        own_sum = tl.load(exp_sums + at, there, other=0.0)
        if entropy is not None:
            # The maximum before the first logit leaves no sum, and the product with it could be infinite.
            product_sum = rescale * (product_sum + tl.where(rescale == 0.0, 0.0, fall) * exp_sum)
            own = tl.load(product_sums + at, there, other=0.0)
            product_sum += own_rescale * (own + tl.where(own_rescale == 0.0, 0.0, own_fall) * own_sum)
        if log_sum_squares is not None:
            own = tl.load(square_sums + at, there, other=0.0)
            square_sum = square_sum * (rescale * rescale) + own * (own_rescale * own_rescale)
        exp_sum = exp_sum * rescale + own_sum * own_rescale
        maximum = higher
    # A target's logit is made once more, which costs less than to look for it in every tile. Its sum has another order. It is at
    # most the row's maximum, so that no probability is above 1.
    top = tl.max(maximum)
    x += local * x_row
    for k in range(targets):
        label = tl.load(target + k * k_stride).to(tl.int64)
        column = label - first_id
        logit = 0.0
        if (label != ignore_index) & (column >= 0) & (column < columns):
            products = tl.zeros([BLOCK], tl.float32)
            for start in range(0, depth, BLOCK):
                i = start + tl.arange(0, BLOCK)
                there = i < depth
                left = tl.load(x + i, there, other=0.0).to(tl.float32)
                products += left * tl.load(linear_weight + column * weight_row + i, there, other=0.0).to(tl.float32)
            logit = tl.sum(products)
            if bias is not None:
                logit += tl.load(bias + column).to(tl.float32)
            logit = _cooled(tl.where(logit > top, top, logit), temperature)
            if terms is not None:
                tl.store(terms + local * terms_columns + column, 0.0)
        tl.store(picked + row * targets + k, logit)
    _store_row(
        lse, entropy, total, log_sum_squares, best, best_index, kept, row, rows, columns, first_id, temperature, inverse,
        maximum, exp_sum, product_sum, square_sum, weighted, highest, highest_column, maxima,
    )  # fmt: skip


@kernel(do_not_specialize=["first_row", "rows"])
def _normalise(
    terms, maxima, bases, scales, kept, dlse, columns, parts, programs, first_row, rows, inverse,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Turn `_tell_part`'s terms into the gradient of lse: into probabilities, over the temperature.

    If all terms of a row are relative to its base, they stay, and `scales` get the factor that they lack.
    """
    local = (tl.program_id(0) // programs).to(tl.int64)
    terms += local * columns
    exp_sum = tl.load(kept + rows + first_row + local)
    row_top = tl.load(kept + first_row + local)
    if bases is not None:
        base = tl.load(bases + local)
        fall = tempered(base - row_top, inverse)
        near = (exp_sum == -1.0) | (fall >= -RISE)
        scale = tl.where(near, tempered(exp_like(fall, maxima) / exp_sum, inverse), 1.0)
        tl.store(scales + first_row + local, tl.where(exp_sum == -1.0, 0.0, scale))
        parts = tl.where(near, 0, parts)
    for start in range(tl.program_id(0) % programs * PARTS, parts, programs * PARTS):
        part = start + tl.arange(0, PARTS)
        column = part[:, None] * PART + tl.arange(0, PART)[None, :]
        inside = column < columns
        top = tl.load(maxima + local * parts + part, part < parts, other=-3.4028234663852886e38)
        if bases is not None:
            top = tl.where(tempered(top - base, inverse) <= RISE, base, top)
        factor = tempered(exp_like(tempered(top - row_top, inverse), maxima) / exp_sum, inverse)
        if dlse is not None:
            factor *= tl.load(dlse + first_row + local)
        term = tl.load(terms + column, inside, other=0.0).to(tl.float32)
        tl.store(terms + column, tl.where(exp_sum == -1.0, 0.0, term * factor[:, None]), inside)


@kernel(do_not_specialize=["first_row", "first_column", "rows", "first_id", "target_stride", "k_stride"])
def _gradient(
    dlogits, logits, bias, target, weight, kept, dlse, dpicked, dentropy, dtotal,
    gradient_stride, row_stride, target_stride, k_stride, columns, width, targets, first_row, first_column, rows,
    first_id, ignore_index, softcap, inverse,
    SEVERAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    row = first_row + local
    begin = tl.program_id(0) % blocks * BLOCK
    column = begin + tl.arange(0, BLOCK)
    inside = column < columns
    dlogits += local * gradient_stride
    exp_sum = tl.load(kept + rows + row)
    if exp_sum == -1.0:
        tl.store(dlogits + column, tl.zeros([BLOCK], tl.float32), column < width)
        return

    x = tl.load(logits + local * row_stride + column, column < width, other=0.0).to(tl.float32)
    x, derivative = cap(biased(x, bias, first_column + column, inside), softcap, logits)
    depth = tempered(x - tl.load(kept + row), inverse)
    probability = exp_like(depth, logits) * (1.0 / exp_sum)
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
    tl.store(dlogits + column, tempered(dz * derivative, inverse), column < width)


@kernel
def _frozen(
    dx, m, by_m, weight, column, by_weight, weight_row, weight_column, hidden, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up a row of m and one of the weight, each multiplied by its factor."""
    blocks = tl.cdiv(hidden, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = i < hidden
    at = row * hidden + i
    place = tl.load(column + row) * weight_row + i.to(tl.int64) * weight_column
    sums = tl.load(by_weight + row) * tl.load(weight + place, inside, other=0.0).to(tl.float32)
    if by_m is not None:
        sums += tl.load(by_m + row) * tl.load(m + at, inside, other=0.0).to(tl.float32)
    tl.store(dx + at, sums, inside)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How TMA loads or stores blocks of a matrix."""
    return TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [rows, columns])


def _loads(rows: Tensor) -> bool:
    """Whether TMA loads these rows: it wants addresses that are multiples of 16 bytes."""
    row, column = rows.stride()
    if column != 1 or row < rows.shape[1] or row % 8:
        return False
    # A trace has no addresses. What turns out to lie elsewhere is copied, and then rows follow each other.
    return rows.shape[1] % 8 == 0 if torch_state.compiling() else rows.data_ptr() % 16 == 0


class _Found(NamedTuple):
    """Results of `_tiles` for each part of a row, ``[rows, parts]``."""

    maxima: Tensor
    exp_sums: Tensor
    product_sums: Tensor | None
    square_sums: Tensor | None
    weighted_sums: Tensor | None
    bests: Tensor | None
    best_columns: Tensor | None


def _launch_tiles(
    terms: Tensor | None,
    bases: Tensor | None,
    found: _Found,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    inverse: float | None,
) -> None:
    """The launch of `_tiles`."""
    x, weight = (rows if rows.data_ptr() % 16 == 0 else rows.clone() for rows in (x, weight))
    (n, depth), columns, parts = x.shape, weight.shape[0], found.maxima.shape[1]
    tiles = (n + TILE_ROWS - 1) // TILE_ROWS * ((columns + TILE_COLUMNS - 1) // TILE_COLUMNS)
    _tiles[(min(tiles, sm_count(x.device)),)](
        _descriptor(x, TILE_ROWS, TILE_DEPTH), _descriptor(weight, TILE_COLUMNS, TILE_DEPTH), bias, target,
        None if terms is None else _descriptor(terms, TILE_ROWS, PART), bases, *found, target.stride(0), n, columns, depth,
        parts, ignore_index, inverse, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, PART=PART, DEPTH=TILE_DEPTH, TURN=TILES_IN_TURN,
        WHOLE=columns % PART == 0, num_warps=8, num_stages=4,
    )  # fmt: skip


def _columns_of(terms: Tensor | None) -> int:
    return 0 if terms is None else terms.shape[1]


def _like(maxima: Tensor, wanted: Tensor | None) -> Tensor | None:
    """Memory for what parts find of a result that is wanted: a column of a tile is an int32."""
    if wanted is None:
        return None
    return torch.empty_like(maxima, dtype=torch.int32 if wanted.dtype is torch.int64 else torch.float32)


def _bases(x: Tensor, weight: Tensor, inputs: StatisticsInputs) -> Tensor:
    """The base that each row's terms are relative to, except in parts far above it."""
    if x.dtype is torch.float16:  # all parts are: float16 has too few exponents
        return torch.full((x.shape[0],), -torch.inf, dtype=torch.float32, device=x.device)
    step = max(weight.shape[0] // SAMPLE, 8)  # at 8, the sample takes less memory than terms leave of the logits'
    sampled = slice(None, SAMPLE * step, step)
    logits = torch.mm(x, weight[sampled].t())
    if inputs.bias is not None:
        logits = logits + inputs.bias[sampled]
    return logits.amax(1).float() + RISE.value * (inputs.options.temperature or 1.0)


def _launch_normalise(
    terms: Tensor,
    maxima: Tensor,
    bases: Tensor | None,
    scales: Tensor | None,
    inverse: float | None,
    kept: Tensor,
    dlse: Tensor | None,
    first_row: int,
) -> None:
    """The launch of `_normalise`. With bases, a row mostly has nothing to do, so it has one program."""
    n, columns = terms.shape
    programs = (columns + 4095) // 4096 if bases is None else 1
    _normalise[(n * programs,)](
        terms, maxima, bases, scales, kept, dlse, columns, maxima.shape[1], programs, first_row, kept.shape[1],
        inverse, PARTS=4096 // PART, PART=PART, num_warps=8,
    )  # fmt: skip


def _launch_join(
    results: StatisticsResults,
    found: _Found,
    x: Tensor,
    weight: Tensor,
    inputs: StatisticsInputs,
    terms: Tensor | None,
    first_row: int,
) -> None:
    options, target = inputs.options, inputs.target
    n, parts = found.maxima.shape
    _join[(n,)](
        x, weight, inputs.bias, target, terms, *results, *found, x.stride(0), weight.stride(0), target.stride(0),
        target.stride(1), weight.shape[0], _columns_of(terms), x.shape[1], target.shape[1], parts, first_row, target.shape[0],
        options.first, options.ignore_index, options.temperature, options.inverse,
        BLOCK=1024, TARGETS=min(power_of_2(target.shape[1], 1), MOST_TARGETS), num_warps=4,
    )  # fmt: skip


@opaque(writes=("results",))
def _launch_rows(results: StatisticsResults, logits: Logits, inputs: StatisticsInputs, first_row: int) -> None:
    (memory, row_stride), columns = as_rows(logits.memory), logits.columns
    n, width = memory.shape
    size, options, target = memory.element_size(), inputs.options, inputs.target
    block = block_of(columns, 16384 // size)
    group = 16 // size  # what a thread loads at once
    _rows[(n,)](
        memory, inputs.bias, target, inputs.weight, *results, row_stride, target.stride(0), target.stride(1),
        columns, width, target.shape[1], first_row, target.shape[0], options.first, options.ignore_index,
        options.softcap, options.temperature, options.inverse,
        PADDED=width != columns, ALIGNED=in_vectors(row_stride, width), GROUPS=block // group, GROUP=group, STAGES=3,
        TARGETS=min(power_of_2(target.shape[1], 1), MOST_TARGETS), num_warps=max(block * size // 2048, 1),
    )  # fmt: skip


@opaque(writes=("dlogits",))
def _launch_gradient(
    dlogits: Logits,
    logits: Logits | None,
    inputs: StatisticsInputs,
    kept: Tensor,
    incoming: StatisticsGrads,
    first_row: int,
    first_column: int,
) -> None:
    memory, row_stride = as_rows((logits or dlogits).memory)
    (n, width), columns = memory.shape, dlogits.columns
    options, target = inputs.options, inputs.target
    dlse, dpicked, dentropy, dtotal = incoming
    block = block_of(columns, 4096)
    blocks = (columns + block - 1) // block
    _gradient[(n * blocks,)](
        dlogits.memory, memory, inputs.bias, target, inputs.weight, kept, dlse, dpicked, dentropy, dtotal,
        dlogits.memory.stride(0), row_stride, target.stride(0), target.stride(1), columns,
        width, target.shape[1], first_row, first_column, target.shape[0], options.first,
        options.ignore_index, options.softcap, options.inverse,
        SEVERAL=target.shape[1] > 1, BLOCK=block, num_warps=max(block // 512, 1),
    )  # fmt: skip


class TritonStatistics(StatisticsKernels):
    def rows_of_product(self, x: Tensor, weight: Tensor, inputs: StatisticsInputs, most: int) -> int:
        if x.dtype is torch.float32 or not is_hopper(x.device):
            return 0
        if inputs.options.softcap is not None or inputs.weight is not None or inputs.target.shape[1] > FEW_TARGETS:
            return 0
        if not (_loads(x) and _loads(weight)):
            return 0
        # A part takes up to seven numbers in place of its logits.
        columns = weight.shape[0]
        rows = min(x.shape[0], most * columns // (7 * ((columns + PART - 1) // PART)))
        return rows if rows >= LEAST_ROWS else 0

    def rows_of_terms(self, x: Tensor, weight: Tensor, memory: int) -> int:
        columns = weight.shape[0]
        return memory // (x.element_size() * terms_columns(columns) + 8 * ((columns + PART - 1) // PART))

    def product(
        self,
        results: StatisticsResults,
        x: Tensor,
        weight: Tensor,
        inputs: StatisticsInputs,
        first_row: int,
        terms: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        n, columns = x.shape[0], weight.shape[0]
        parts = (columns + PART - 1) // PART
        _, _, entropy, total, log_sum_squares, best, best_index, saved = results
        options = inputs.options
        bases = None if scales is None else _bases(x, weight, inputs)

        maxima = torch.empty((n, parts), dtype=torch.float32, device=x.device)
        pointers = _Found(
            maxima,
            torch.empty_like(maxima),
            _like(maxima, entropy),
            _like(maxima, log_sum_squares),
            _like(maxima, total),
            _like(maxima, best),
            _like(maxima, best_index),
        )
        target = inputs.target[first_row : first_row + n]
        _launch_tiles(terms, bases, pointers, x, weight, inputs.bias, target, options.ignore_index, options.inverse)
        _launch_join(results, pointers, x, weight, inputs, None if scales is None else terms, first_row)
        if scales is not None:
            assert terms is not None
            assert saved is not None
            _launch_normalise(terms, maxima, bases, scales, options.inverse, saved, None, first_row)
        return maxima

    def normalise(
        self, terms: Tensor, beside: Any, inputs: StatisticsInputs, kept: Tensor, dlse: Tensor | None, first_row: int
    ) -> None:
        _launch_normalise(terms, beside, None, None, inputs.options.inverse, kept, dlse, first_row)

    def rows(self, results: StatisticsResults, logits: Logits, inputs: StatisticsInputs, first_row: int) -> None:
        _launch_rows(results, logits, inputs, first_row)

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
        _launch_gradient(dlogits, logits, inputs, kept, incoming, first_row, first_column)

    def frozen(
        self, dx: Tensor, m: Tensor, by_m: Tensor | None, weight: Tensor, column: Tensor, by_weight: Tensor, most: int
    ) -> None:
        (n, hidden), block = dx.shape, min(power_of_2(dx.shape[1], 16), 2048)
        _frozen[(n * ((hidden + block - 1) // block),)](
            dx, m, by_m, weight, column, by_weight, weight.stride(0), weight.stride(1), hidden, BLOCK=block,
            num_warps=max(block // 512, 1),
        )  # fmt: skip


KERNELS = TritonStatistics()
