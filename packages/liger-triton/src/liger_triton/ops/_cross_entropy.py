"""Cross-entropy of rows of logits, for `cross_entropy` and `fused_linear_cross_entropy`.

One program per row reads its logits once and keeps a running maximum and a running sum of exponentials. Besides the logits, the
gradient needs only the maximum and the logarithm of the sum. They are kept apart: if they were added, rounding a total near 1e4
would be an error of 5e-4 in every probability.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_core.custom_op import opaque
from liger_core.host.cross_entropy import CrossEntropyInputs, CrossEntropyKernels, CrossEntropyResults
from liger_core.host.rows import Logits
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import biased, cap, exp_like, fast_exp
from liger_triton.ops._rows import as_rows, block_of, in_vectors
from liger_triton.ops._sums import add_up


@triton.jit
def _label_weight(weight, label, known):
    if weight is None:
        return 1.0
    else:
        return tl.load(weight + label, known, other=0.0).to(tl.float32)


@kernel(do_not_specialize=["first", "rows"])
def _rows(
    logits, bias, target, weight, weight_sum, losses, z_losses, hits, predicted, statistics,
    row_stride, columns, width, first, rows, ignore_index, label_smoothing, lse_square_scale, softcap,
    ADD_Z_LOSS: tl.constexpr, TOKEN_SCALING: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    if label_smoothing is not None:
        label_smoothing = tl.cast(label_smoothing, tl.float32)
    if lse_square_scale is not None:
        lse_square_scale = tl.cast(lse_square_scale, tl.float32)
    local = tl.program_id(0).to(tl.int64)
    row = first + local
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if z_losses is not None:
            tl.store(z_losses + row, 0.0)
        if hits is not None:
            tl.store(hits + row, 0.0)
        if predicted is not None:
            tl.store(predicted + row, -1)
        return

    logits += local * row_stride
    known = (label >= 0) & (label < columns)
    label_logit = biased(tl.load(logits + label, known, other=0.0).to(tl.float32), bias, label, known)
    label_logit = cap(label_logit, softcap, logits)[0]
    # Sums of logits are relative to the label's logit, so that a large offset common to all logits doesn't cancel in them.
    pivot = tl.where(tl.abs(label_logit) < float("inf"), label_logit, 0.0)

    # A thread holds whole groups of columns, so each group has its own maximum and the loop exchanges nothing between threads.
    # If a thread can load a group at once, its columns are neighbours. Otherwise neighbouring threads load neighbouring columns.
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    maximum = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    weighted = tl.zeros([GROUPS], tl.float32)
    best = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    best_column = tl.zeros([GROUPS], tl.int32)
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
        if hits is not None or predicted is not None:
            block_best, place = tl.max(x, axis=1, return_indices=True)
            better = block_best > best
            best = tl.where(better, block_best, best)
            best_column = tl.where(better, start + tl.arange(0, GROUPS) * group_step + place * step, best_column)
        if softcap is not None:
            x = tl.where(inside, cap(x, softcap, logits)[0], -float("inf"))
        if label_smoothing is not None:
            distance = tl.where(inside, x - pivot, 0.0)
            if weight is not None:
                distance *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
            weighted += tl.sum(distance, axis=1)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        total = total * fast_exp(maximum - higher) + tl.sum(exp_like(x - higher[:, None], logits), axis=1)
        maximum = higher
    top = tl.max(maximum)
    exp_sum = tl.where(known, tl.sum(total * exp_like(maximum - top, logits)), float("nan"))
    log_sum = tl.log(exp_sum)

    lse = top + log_sum
    nll = (top - label_logit) + log_sum
    loss = _label_weight(weight, label, known) * nll
    if label_smoothing is not None:
        mass = columns * 1.0
        if weight is not None:
            mass = tl.load(weight_sum)
        smooth = ((top - pivot) + log_sum) * mass - tl.sum(weighted)
        loss = loss * (1.0 - label_smoothing) + smooth * (label_smoothing / columns)
    z_loss = lse * 0.0
    if lse_square_scale is not None:
        z_loss = lse * lse * lse_square_scale
    if TOKEN_SCALING:
        # Computed from nll's parts: nll itself is rounded much more coarsely than they are.
        probability = exp_like(label_logit - top, logits) / exp_sum
        loss *= probability
        z_loss *= probability
    if ADD_Z_LOSS:
        loss += z_loss
    tl.store(losses + row, loss)
    if z_losses is not None:
        tl.store(z_losses + row, z_loss)
    if hits is not None or predicted is not None:
        winner = tl.min(tl.where(best == tl.max(best), best_column, columns))
        if hits is not None:
            tl.store(hits + row, tl.where(winner == label, 1.0, 0.0))
        if predicted is not None:
            tl.store(predicted + row, winner)
    if statistics is not None:
        tl.store(statistics + row, top)
        tl.store(statistics + rows + row, exp_sum)
        if TOKEN_SCALING:
            tl.store(statistics + 2 * rows + row, probability)


@kernel(do_not_specialize=["first", "first_column", "rows"])
def _gradient(
    dlogits, logits, bias, target, weight, weight_sum, statistics, dloss, totals,
    gradient_stride, row_stride, dloss_stride, columns, width, vocabulary, first, first_column, rows,
    ignore_index, label_smoothing, lse_square_scale, softcap,
    TOKEN_SCALING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    if label_smoothing is not None:
        label_smoothing = tl.cast(label_smoothing, tl.float32)
    if lse_square_scale is not None:
        lse_square_scale = tl.cast(lse_square_scale, tl.float32)
    blocks = tl.cdiv(columns, BLOCK)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    row = first + local
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dlogits += local * gradient_stride
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(dlogits + column, tl.zeros([BLOCK], tl.float32), column < width)
        return

    x = tl.load(logits + local * row_stride + column, column < width, other=0.0).to(tl.float32)
    x = biased(x, bias, first_column + column, inside)
    top = tl.load(statistics + row)
    exp_sum = tl.load(statistics + rows + row)
    scale = tl.load(dloss + row * dloss_stride) if dloss is not None else 1.0
    if TOKEN_SCALING:
        scale *= tl.load(statistics + 2 * rows + row)
    z_scale = scale
    if totals is not None:
        z_scale = tl.math.div_rn(scale, tl.load(totals))
        scale = tl.math.div_rn(scale, tl.load(totals + 1))

    capped, derivative = cap(x, softcap, logits)
    probability = exp_like(capped - top, logits) * (1.0 / exp_sum)
    label_scale = scale * _label_weight(weight, label, (label >= 0) & (label < vocabulary))
    if label_smoothing is not None:
        label_scale *= 1.0 - label_smoothing
    dx = label_scale * (probability - tl.where(first_column + column == label, 1.0, 0.0))
    if label_smoothing is not None:
        uniform = scale * (label_smoothing / vocabulary)
        if weight is None:
            dx += uniform * (probability * vocabulary - 1.0)
        else:
            weights = tl.load(weight + first_column + column, inside, other=0.0).to(tl.float32)
            dx += uniform * (probability * tl.load(weight_sum) - weights)
    if lse_square_scale is not None:
        dx += probability * (z_scale * (2.0 * lse_square_scale) * (top + tl.log(exp_sum)))
    tl.store(dlogits + column, dx * derivative, column < width)


@kernel(do_not_specialize=["rows"])
def _reduce(
    losses, z_losses, hits, target, weight, loss, z_loss, accuracy, totals, rows, columns, ignore_index,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A single program adds up everything, so the order of the sums is always the same.
    counted = tl.zeros([BLOCK], tl.float32)
    weights, weights_lost = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    loss_sum, lost = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    z_loss_sum, z_lost = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    hit_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        label = tl.load(target + row, inside, other=0)
        counts = inside & (label != ignore_index)
        counted += tl.where(counts, 1.0, 0.0)
        if weight is not None:
            known = counts & (label >= 0) & (label < columns)
            row_weights = tl.load(weight + label, known, other=0.0).to(tl.float32)
            weights, weights_lost = add_up(weights, weights_lost, row_weights)
        if losses is not None:
            loss_sum, lost = add_up(loss_sum, lost, tl.load(losses + row, inside, other=0.0))
        if z_losses is not None:
            z_loss_sum, z_lost = add_up(z_loss_sum, z_lost, tl.load(z_losses + row, inside, other=0.0))
        if hits is not None:
            hit_sum += tl.load(hits + row, inside, other=0.0)
    any_counted = tl.sum(counted) > 0.0
    count = tl.where(any_counted, tl.sum(counted), 1.0)
    weight_total = count
    if weight is not None:
        weight_total = tl.where(any_counted, tl.sum(weights), 1.0)
    if totals is not None:
        tl.store(totals, count)
        tl.store(totals + 1, weight_total)
    if losses is not None:
        loss_value = tl.sum(loss_sum)
        z_loss_value = tl.sum(z_loss_sum)
        if MEAN:
            loss_value /= weight_total
            z_loss_value /= count
        tl.store(loss, loss_value + z_loss_value)
        if z_loss is not None:
            tl.store(z_loss, z_loss_value)
        if accuracy is not None:
            tl.store(accuracy, tl.sum(hit_sum) / count)


@opaque(writes=("results",))
def _launch_rows(results: CrossEntropyResults, logits: Logits, inputs: CrossEntropyInputs, first: int) -> None:
    (memory, row_stride), columns = as_rows(logits.memory), logits.columns
    n, width = memory.shape
    size, options = memory.element_size(), inputs.options
    block = block_of(columns, 16384 // size)
    group = 16 // size  # what a thread loads at once
    _rows[(n,)](
        memory, inputs.bias, inputs.target, inputs.weight, inputs.weight_sum, *results, row_stride, columns, width,
        first, inputs.target.shape[0], options.ignore_index, options.label_smoothing, options.lse_square_scale,
        options.softcap, ADD_Z_LOSS=options.adds_z_loss(), TOKEN_SCALING=options.token_scaling,
        PADDED=width != columns, ALIGNED=in_vectors(row_stride, width), GROUPS=block // group, GROUP=group, STAGES=3,
        num_warps=max(block * size // 2048, 1),
    )  # fmt: skip


@opaque(writes=("dlogits",))
def _launch_gradient(
    dlogits: Logits,
    logits: Logits | None,
    inputs: CrossEntropyInputs,
    statistics: Tensor,
    dloss: Tensor | None,
    totals: Tensor | None,
    first: int,
    first_column: int,
) -> None:
    memory, row_stride = as_rows((logits or dlogits).memory)
    (n, width), columns = memory.shape, dlogits.columns
    options = inputs.options
    block = block_of(columns, 4096)
    blocks = (columns + block - 1) // block
    _gradient[(n * blocks,)](
        dlogits.memory, memory, inputs.bias, inputs.target, inputs.weight, inputs.weight_sum, statistics, dloss, totals,
        dlogits.memory.stride(0), row_stride, dloss.stride(0) if dloss is not None and dloss.dim() else 0, columns,
        width, inputs.vocabulary, first, first_column, inputs.target.shape[0], options.ignore_index,
        options.label_smoothing, options.lse_square_scale, options.softcap,
        TOKEN_SCALING=options.token_scaling, BLOCK=block, num_warps=max(block // 512, 1),
    )  # fmt: skip


class TritonCrossEntropy(CrossEntropyKernels):
    def rows(self, results: CrossEntropyResults, logits: Logits, inputs: CrossEntropyInputs, first: int) -> None:
        _launch_rows(results, logits, inputs, first)

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        inputs: CrossEntropyInputs,
        statistics: Tensor,
        incoming: Any,
        first: int,
        first_column: int,
    ) -> None:
        _launch_gradient(dlogits, logits, inputs, statistics, *incoming, first, first_column)

    def sums(
        self,
        loss: Tensor | None,
        z_loss: Tensor | None,
        accuracy: Tensor | None,
        totals: Tensor | None,
        results: CrossEntropyResults | None,
        inputs: CrossEntropyInputs,
    ) -> None:
        losses, z_losses, hits, *_ = results or (None, None, None)
        mean = inputs.options.reduction == "mean"
        _reduce[(1,)](
            losses, z_losses, hits, inputs.target, inputs.weight if mean else None, loss, z_loss, accuracy, totals,
            inputs.target.shape[0], inputs.vocabulary, inputs.options.ignore_index,
            MEAN=mean, BLOCK=2048, num_warps=8,
        )  # fmt: skip


KERNELS = TritonCrossEntropy()
