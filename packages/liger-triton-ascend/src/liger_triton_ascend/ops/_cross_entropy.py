"""Cross-entropy of rows of logits, for `cross_entropy` and `fused_linear_cross_entropy`.

Rows that fit the Unified Buffer are read once, several together. For a longer row each lane keeps a maximum and a sum of
exponentials, which are reduced once. Besides the logits, the gradient needs only the maximum and the logarithm of the sum. They
are kept apart: if they were added, rounding a total near 1e4 would be an error of 5e-4 in every probability.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.cross_entropy import (
    CrossEntropyInputs,
    CrossEntropyKernelOptions,
    CrossEntropyKernels,
    CrossEntropyResults,
)
from liger_core.host.rows import Logits
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._math import LANES, add_exponentials, cap, no_exponentials
from liger_triton_ascend.ops._rows import as_rows, long_row_blocks, row_tiles

# Float32 tiles alive, by the estimate, and how many more with an option.
FORWARD_TILES, FORWARD_SOFTCAP = 6, 6
FORWARD_LONG_TILES, FORWARD_LONG_SOFTCAP, FORWARD_LONG_SMOOTHING = 4.5, 4, 2
BACKWARD_TILES, BACKWARD_SOFTCAP = 7, 6


@triton.jit
def _finish(
    losses, z_losses, hits, predicted, statistics, weight_sum, at, inside, rows, columns, label, counted, known,
    top, exp_sum, label_logit, label_weight, pivot, weighted, winner, label_smoothing, lse_square_scale,
    WEIGHTED: tl.constexpr, ADD_Z_LOSS: tl.constexpr, TOKEN_SCALING: tl.constexpr,
):  # fmt: skip
    """Write the results of one row or several, from the sums over their logits."""
    exp_sum = tl.where(known, exp_sum, float("nan"))
    log_sum = tl.log(exp_sum)
    nll = (top - label_logit) + log_sum
    loss = label_weight * nll
    if label_smoothing is not None:
        mass = columns * 1.0
        if WEIGHTED:
            mass = tl.load(weight_sum)
        smooth = ((top - pivot) + log_sum) * mass - weighted
        loss = loss * (1.0 - label_smoothing) + smooth * (label_smoothing / columns)
    z_loss = log_sum * 0.0
    if lse_square_scale is not None:
        z_loss = (top + log_sum) * (top + log_sum) * lse_square_scale
    if TOKEN_SCALING:
        # Computed from nll's parts: nll itself is rounded much more coarsely than they are.
        probability = tl.exp(label_logit - top) / exp_sum
        loss *= probability
        z_loss *= probability
    if ADD_Z_LOSS:
        loss += z_loss
    tl.store(losses + at, tl.where(counted, loss, 0.0), inside)
    if z_losses is not None:
        tl.store(z_losses + at, tl.where(counted, z_loss, 0.0), inside)
    if hits is not None:
        tl.store(hits + at, tl.where(counted & (winner == label), 1.0, 0.0), inside)
    if predicted is not None:
        tl.store(predicted + at, tl.where(counted, winner, -1), inside)
    if statistics is not None:
        tl.store(statistics + at, top, inside)
        tl.store(statistics + rows + at, exp_sum, inside)
        if WEIGHTED:
            tl.store(statistics + 2 * rows + at, label_weight, inside)
        if TOKEN_SCALING:
            tl.store(statistics + 3 * rows + at, probability, inside)


@triton.jit
def _rows(
    logits, bias, target, weight, weight_sum, losses, z_losses, hits, predicted, statistics,
    row_stride, columns, first, count, rows, ignore_index, label_smoothing, lse_square_scale, softcap,
    ADD_Z_LOSS: tl.constexpr, TOKEN_SCALING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    if bias is not None:
        biases = tl.load(bias + column, column < columns, other=0.0).to(tl.float32)
    if weight is not None:
        weights = tl.load(weight + column, column < columns, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * ROWS
        row = begin + tl.arange(0, ROWS)[:, None]
        inside = (row < count) & (column < columns)
        flat = begin + tl.arange(0, ROWS)
        wide = tl.load(target + first + flat, flat < count, other=ignore_index)
        counted = wide != ignore_index
        known = (wide >= 0) & (wide < columns)
        label = tl.where(known, wide, -2).to(tl.int32)  # the vector unit doesn't compare int64
        is_label = column == label[:, None]
        xs = tl.load(logits + row * row_stride + column, inside, other=float("-inf")).to(tl.float32)
        if bias is not None:
            xs += biases
        winner = label
        if hits is not None or predicted is not None:
            best = tl.where(xs == tl.max(xs, 1)[:, None], column, columns - 1)
            winner = tl.min(best, 1)
        label_logit, _ = cap(tl.sum(tl.where(is_label, xs, 0.0), 1), softcap)
        if softcap is not None:
            xs = tl.where(inside, cap(xs, softcap)[0], float("-inf"))
        label_weight = label_logit * 0.0 + 1.0
        if weight is not None:
            label_weight = tl.sum(tl.where(is_label, weights, 0.0), 1)
        # Sums of logits are relative to the label's logit, so that a large offset common to all logits doesn't cancel in them.
        pivot = tl.where(tl.abs(label_logit) < float("inf"), label_logit, 0.0)
        weighted = pivot
        if label_smoothing is not None:
            distance = tl.where(inside, xs - pivot[:, None], 0.0)
            if weight is not None:
                distance *= weights
            weighted = tl.sum(distance, 1)
        top = tl.max(xs, 1)
        exp_sum = tl.sum(tl.exp(xs - top[:, None]), 1)
        _finish(
            losses, z_losses, hits, predicted, statistics, weight_sum, first + flat, flat < count, rows, columns,
            label, counted, known, top, exp_sum, label_logit, label_weight, pivot, weighted, winner,
            label_smoothing, lse_square_scale, weight is not None, ADD_Z_LOSS, TOKEN_SCALING,
        )  # fmt: skip


@triton.jit
def _rows_long(
    logits, bias, target, weight, weight_sum, losses, z_losses, hits, predicted, statistics,
    row_stride, columns, first, count, rows, ignore_index, label_smoothing, lse_square_scale, softcap,
    ADD_Z_LOSS: tl.constexpr, TOKEN_SCALING: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = BLOCK // LANES
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        x_row = logits + tl.cast(index, tl.int64) * row_stride
        at = first + tl.cast(index, tl.int64)
        label = tl.load(target + at)
        counted = label != ignore_index
        known = (label >= 0) & (label < columns)
        place = tl.minimum(tl.maximum(label, 0), columns - 1)
        label_logit = tl.load(x_row + place).to(tl.float32)
        if bias is not None:
            label_logit += tl.load(bias + place).to(tl.float32)
        label_logit, _ = cap(label_logit, softcap)
        label_weight = 1.0
        if weight is not None:
            label_weight = tl.load(weight + place).to(tl.float32)
        pivot = tl.where(tl.abs(label_logit) < float("inf"), label_logit, 0.0)

        maximum, total = no_exponentials(LANES)
        weighted = tl.zeros((LANES,), tl.float32)
        best = tl.full((LANES,), float("-inf"), tl.float32)
        end = tl.where(counted, columns, 0)  # a row that doesn't count is not read
        for start in range(0, end, BLOCK):
            column = start + lane
            inside = column < columns
            xs = tl.load(x_row + column, inside, other=float("-inf")).to(tl.float32)
            if bias is not None:
                xs += tl.load(bias + column, inside, other=0.0).to(tl.float32)
            if hits is not None or predicted is not None:
                best = tl.maximum(best, tl.max(tl.reshape(xs, (groups, LANES)), 0))
            if softcap is not None:
                xs = tl.where(inside, cap(xs, softcap)[0], float("-inf"))
            if label_smoothing is not None:
                distance = tl.where(inside, xs - pivot, 0.0)
                if weight is not None:
                    distance *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
                weighted += tl.sum(tl.reshape(distance, (groups, LANES)), 0)
            maximum, total = add_exponentials(maximum, total, tl.reshape(xs, (groups, LANES)), None)
        top = tl.max(maximum, 0)
        exp_sum = tl.sum(total * tl.exp(maximum - top), 0)
        winner = columns - 1
        if hits is not None or predicted is not None:
            # The row is read again for this, so that the loop above needn't carry the column of each lane's maximum.
            highest = tl.max(best, 0)
            nearest = tl.full((LANES,), columns - 1, tl.int32)
            for start in range(0, end, BLOCK):
                column = start + lane
                xs = tl.load(x_row + column, column < columns, other=float("-inf")).to(tl.float32)
                if bias is not None:
                    xs += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)
                equal = tl.where(xs == highest, column, columns - 1)
                nearest = tl.minimum(nearest, tl.min(tl.reshape(equal, (groups, LANES)), 0))
            winner = tl.min(nearest, 0)
        _finish(
            losses, z_losses, hits, predicted, statistics, weight_sum, at, None, rows, columns,
            label, counted, known, top, exp_sum, label_logit, label_weight, pivot, tl.sum(weighted, 0), winner,
            label_smoothing, lse_square_scale, weight is not None, ADD_Z_LOSS, TOKEN_SCALING,
        )  # fmt: skip


@triton.jit
def _row_scales(
    statistics, scales, at, inside, rows, vocabulary, label_smoothing, lse_square_scale,
    WEIGHTED: tl.constexpr, TOKEN_SCALING: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """For one row or several: the largest logit, 1 / Σ exp, and the gradient's factors.

    There is a factor for the label, one for each class, and one for the z-loss.
    """
    top = tl.load(statistics + at, inside)
    exp_sum = tl.load(statistics + rows + at, inside)
    if PER_ROW:
        scale = tl.load(scales + at, inside)
        z_scale = scale
    else:
        z_scale = tl.load(scales) + exp_sum * 0.0  # one for each row, like all the others
        scale = tl.load(scales + 1) + exp_sum * 0.0
    if TOKEN_SCALING:
        probability = tl.load(statistics + 3 * rows + at, inside)
        scale *= probability
        z_scale *= probability
    label_scale = scale
    if WEIGHTED:
        label_scale *= tl.load(statistics + 2 * rows + at, inside)
    uniform = scale
    if label_smoothing is not None:
        label_scale *= 1.0 - label_smoothing
        uniform *= label_smoothing / vocabulary
    by_z = z_scale
    if lse_square_scale is not None:
        by_z *= (2.0 * lse_square_scale) * (top + tl.log(exp_sum))
    return top, 1.0 / exp_sum, label_scale, uniform, by_z


@triton.jit
def _slope(
    xs, is_label, weights, mass, top, inverse, label_scale, uniform, by_z, softcap,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """The gradient of logits, from their rows' `_row_scales`."""
    capped, derivative = cap(xs, softcap)
    probability = tl.exp(capped - top) * inverse
    dx = label_scale * tl.where(is_label, probability - 1.0, probability)
    if SMOOTH:
        dx += uniform * (probability * mass - weights)
    if Z_LOSS:
        dx += probability * by_z
    return dx * derivative


@triton.jit
def _gradient(
    dlogits, logits, bias, target, weight, weight_sum, statistics, scales,
    row_stride, columns, vocabulary, first, first_column, count, rows,
    ignore_index, label_smoothing, lse_square_scale, softcap,
    TOKEN_SCALING: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    weights = 1.0
    mass = vocabulary * 1.0
    if bias is not None:
        biases = tl.load(bias + first_column + column, column < columns, other=0.0).to(tl.float32)
    if label_smoothing is not None and weight is not None:
        weights = tl.load(weight + first_column + column, column < columns, other=0.0).to(tl.float32)
        mass = tl.load(weight_sum)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * ROWS
        row = begin + tl.arange(0, ROWS)[:, None]
        inside = (row < count) & (column < columns)
        flat = begin + tl.arange(0, ROWS)
        xs = tl.load(logits + row * row_stride + column, inside, other=0.0).to(tl.float32)
        if bias is not None:
            xs += biases
        label = tl.load(target + first + flat, flat < count, other=ignore_index)
        counted = label != ignore_index
        known = (label >= 0) & (label < vocabulary)
        place = tl.where(known, label - first_column, -1).to(tl.int32)
        top, inverse, label_scale, uniform, by_z = _row_scales(
            statistics, scales, first + flat, flat < count, rows, vocabulary, label_smoothing, lse_square_scale,
            weight is not None, TOKEN_SCALING, PER_ROW,
        )  # fmt: skip
        dx = _slope(
            xs, column == place[:, None], weights, mass, top[:, None], inverse[:, None], label_scale[:, None],
            uniform[:, None], by_z[:, None], softcap, label_smoothing is not None, lse_square_scale is not None,
        )  # fmt: skip
        tl.store(dlogits + row * columns + column, tl.where(counted[:, None], dx, 0.0), inside)


@triton.jit
def _gradient_long(
    dlogits, logits, bias, target, weight, weight_sum, statistics, scales,
    row_stride, columns, vocabulary, first, first_column, count, rows, span,
    ignore_index, label_smoothing, lse_square_scale, softcap,
    TOKEN_SCALING: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes spans of columns. If there are enough rows, a span is a whole row."""
    lane = tl.arange(0, BLOCK)
    spans = tl.cdiv(columns, span)
    mass = vocabulary * 1.0
    if label_smoothing is not None and weight is not None:
        mass = tl.load(weight_sum)
    for index in range(tl.program_id(0), count * spans, tl.num_programs(0)):
        local = tl.cast(index // spans, tl.int64)
        begin = index % spans * span
        end = tl.minimum(begin + span, columns)
        x_row = logits + local * row_stride
        dx_row = dlogits + local * columns
        label = tl.load(target + first + local)
        if label == ignore_index:
            for start in range(begin, end, BLOCK):
                column = start + lane
                tl.store(dx_row + column, tl.zeros((BLOCK,), tl.float32), column < columns)
        else:
            place = tl.minimum(label - first_column, columns).to(tl.int32)
            top, inverse, label_scale, uniform, by_z = _row_scales(
                statistics, scales, first + local, None, rows, vocabulary, label_smoothing, lse_square_scale,
                weight is not None, TOKEN_SCALING, PER_ROW,
            )  # fmt: skip
            for start in range(begin, end, BLOCK):
                column = start + lane
                inside = column < columns
                xs = tl.load(x_row + column, inside, other=0.0).to(tl.float32)
                if bias is not None:
                    xs += tl.load(bias + first_column + column, inside, other=0.0).to(tl.float32)
                weights = 1.0
                if label_smoothing is not None and weight is not None:
                    weights = tl.load(weight + first_column + column, inside, other=0.0).to(tl.float32)
                dx = _slope(
                    xs, lane == place - start, weights, mass, top, inverse, label_scale, uniform, by_z, softcap,
                    label_smoothing is not None, lse_square_scale is not None,
                )  # fmt: skip
                tl.store(dx_row + column, dx, inside)


class AscendCrossEntropy(CrossEntropyKernels):
    def statistics(self, options: CrossEntropyKernelOptions) -> int:
        """As in other languages, plus the label's class weight in between."""
        return 4

    def rows(self, results: CrossEntropyResults, logits: Logits, inputs: CrossEntropyInputs, first: int) -> None:
        memory, row_stride = as_rows(logits.memory)
        count, columns = memory.shape
        options = inputs.options
        arguments = (
            memory, inputs.bias, inputs.target, inputs.weight, inputs.weight_sum, *results, row_stride, columns, first,
            count, inputs.target.shape[0], options.ignore_index, options.label_smoothing, options.lse_square_scale,
            options.softcap,
        )  # fmt: skip
        flags = {"ADD_Z_LOSS": options.adds_z_loss(), "TOKEN_SCALING": options.token_scaling}
        capped, smoothed = options.softcap is not None, options.label_smoothing is not None
        programs, tile_rows, block = row_tiles(memory, count, columns, FORWARD_TILES + FORWARD_SOFTCAP * capped)
        if block < columns:
            tiles = FORWARD_LONG_TILES + FORWARD_LONG_SOFTCAP * capped + FORWARD_LONG_SMOOTHING * smoothed
            programs, block = long_row_blocks(memory, count, columns, tiles)
            _rows_long[(programs,)](*arguments, **flags, BLOCK=block, LANES=min(block, LANES))
        else:
            _rows[(programs,)](*arguments, **flags, ROWS=tile_rows, BLOCK=block)

    def incoming(self, dloss: Tensor | None, totals: Tensor | None, target: Tensor) -> Tensor:
        """The factors of the gradients of the rows' z-losses and of the rest: two numbers, or one per row."""
        if dloss is None:
            return torch.ones(2, dtype=torch.float32, device=target.device) if totals is None else totals[0] / totals
        if totals is not None:
            return dloss / totals
        return dloss.contiguous() if dloss.dim() else dloss.repeat(2)

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
        memory, row_stride = as_rows((logits or dlogits).memory)
        count, columns = memory.shape
        options = inputs.options
        arguments = (
            dlogits.memory, memory, inputs.bias, inputs.target, inputs.weight, inputs.weight_sum, statistics, incoming,
            row_stride, columns, inputs.vocabulary, first, first_column, count, inputs.target.shape[0],
        )  # fmt: skip
        chosen = options.ignore_index, options.label_smoothing, options.lse_square_scale, options.softcap
        flags = {"TOKEN_SCALING": options.token_scaling, "PER_ROW": options.reduction == "none"}
        tiles = BACKWARD_TILES + BACKWARD_SOFTCAP * (options.softcap is not None)
        programs, tile_rows, block = row_tiles(memory, count, columns, tiles)
        if block < columns:
            cores = get_npu_core_count(memory.device)
            blocks = (columns + block - 1) // block
            sharers = min(blocks, max(1, cores // count))  # programs per row, if there are fewer rows than cores
            span = (blocks + sharers - 1) // sharers * block
            programs = min(count * sharers, cores)
            _gradient_long[(programs,)](*arguments, span, *chosen, **flags, BLOCK=block)
        else:
            _gradient[(programs,)](*arguments, *chosen, **flags, ROWS=tile_rows, BLOCK=block)

    def totals(self, inputs: CrossEntropyInputs) -> Tensor:
        target, weight = inputs.target, inputs.weight
        counted = target != inputs.options.ignore_index
        count = counted.sum(dtype=torch.float32)
        if weight is None:
            return count.clamp(min=1.0).repeat(2)
        known = counted & (target >= 0) & (target < inputs.vocabulary)
        weights = weight.float()[target.clamp(0, inputs.vocabulary - 1)].masked_fill(~known, 0.0).sum()
        return torch.where(count > 0, torch.stack((count, weights)), 1.0)

    def reduce(
        self,
        results: CrossEntropyResults,
        inputs: CrossEntropyInputs,
        totals: Tensor | None,
        return_z_loss: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        loss, z_loss, accuracy = results.losses, results.z_losses, results.hits
        if totals is None and inputs.options.reduction == "mean":
            totals = self.totals(inputs)
        loss = loss.sum() if totals is None else loss.sum() / totals[1]
        if z_loss is not None:
            z_loss = z_loss.sum() if totals is None else z_loss.sum() / totals[0]
            loss = loss + z_loss
        if accuracy is not None:
            accuracy = accuracy.sum() / (inputs.target != inputs.options.ignore_index).sum().clamp(min=1)
        return loss, z_loss if return_z_loss else None, accuracy, totals


KERNELS = AscendCrossEntropy()
