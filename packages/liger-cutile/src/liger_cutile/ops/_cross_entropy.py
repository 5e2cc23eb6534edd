"""Cross-entropy of rows of logits, for `cross_entropy` and `fused_linear_cross_entropy`.

One block per row reads its logits once and keeps running maxima and running sums of exponentials. Besides the logits, the
gradient needs only the maximum and the sum. They are kept apart: if the sum's logarithm were added to the maximum, rounding a
total near 1e4 would be an error of 5e-4 in every probability.
"""

import math
from typing import Any

import cuda.tile as ct
from torch import Tensor

from liger_core.custom_op import opaque
from liger_core.host.cross_entropy import CrossEntropyInputs, CrossEntropyKernels, CrossEntropyResults
from liger_core.host.rows import Logits
from liger_cutile.ops._device import sm_count
from liger_cutile.ops._launch import MOST_BLOCKS, ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import LEAST, cap, exp_like
from liger_cutile.ops._rows import ZERO, as_rows, blocks, load, load_vector, power_of_2
from liger_cutile.ops._sums import add_up

# Columns of a tile, and blocks per multiprocessor. Four blocks leave a thread 64 registers, and 4096 columns fill half of them
# (sm_90, tileiras 13.4).
BLOCK = 4096
OCCUPANCY = 4
# Bytes of a tile of the gradient. On an H200, 4096 x 128256 in bfloat16 takes 0.545 ms, with half as many bytes 0.622. If the
# blocks took all first tiles before the next ones, it would take 0.576.
GRADIENT_BYTES = 16384
# Rows of a tile of labels.
LABELS = 2048


@ct.function
def _label_of(target, row, ignore_index, columns):
    """A row's label, or 0; whether the row counts, and whether its label is in range."""
    label = ct.load(target, (row,), ())
    counts = label != ignore_index
    known = counts & (label >= 0) & (label < columns)
    return ct.astype(ct.where(known, label, 0), ct.int32), counts, known


@ct.function
def _label_weight(weight, label, known):
    if given(weight):
        return ct.astype(ct.gather(weight, label, mask=known), ct.float32)
    else:
        return 1.0


@ct.kernel(occupancy=OCCUPANCY)
def _rows(
    losses, z_losses, hits, predicted, statistics, logits, bias, target, weight, weight_sum,
    columns, first, ignore_index: ct.ScalarInt64, label_smoothing, lse_square_scale, softcap,
    ADD_Z_LOSS: ConstBool, TOKEN_SCALING: ConstBool, BLOCK: ConstInt, GROUP: ConstInt,
):  # fmt: skip
    GROUPS = BLOCK // GROUP
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (GROUPS, GROUP))
    local = ct.bid(0)
    row = first + local
    label, counts, known = _label_of(target, row, ignore_index, columns)
    label_logit = ct.astype(ct.gather(logits, (local, label), mask=known), ct.float32)
    if given(bias):
        label_logit += ct.astype(ct.gather(bias, label, mask=known), ct.float32)
    label_logit = cap(label_logit, softcap)[0]
    # Sums of logits are relative to the label's logit, so that a large offset common to all logits doesn't cancel in them.
    pivot = ct.where(ct.abs(label_logit) < math.inf, label_logit, 0.0)

    # A group is the columns that a thread loads at once. Each group has its own maximum, and the loop exchanges nothing between
    # threads.
    maximum = ct.full((GROUPS, 1), LEAST, ct.float32)
    total = ct.zeros((GROUPS, 1), ct.float32)
    weighted = ct.zeros((GROUPS, 1), ct.float32)
    best = ct.full((GROUPS, 1), LEAST, ct.float32)
    best_column = ct.zeros((GROUPS, 1), ct.int32)
    tiles = ct.where(counts, ct.num_tiles(logits, axis=1, shape=(1, BLOCK)), 0).item()
    for tile in range(tiles):
        inside = lanes < columns - tile * BLOCK
        x = load(logits, (local, tile), 1, BLOCK)
        if given(bias):
            x += load_vector(bias, tile, BLOCK)
        x = ct.reshape(x, (GROUPS, GROUP))
        if given(hits) or given(predicted):
            real = ct.where(inside, x, -math.inf)
            tile_best = ct.max(real, axis=1, keepdims=True)
            place = ct.argmax(real, axis=1, keepdims=True)
            better = tile_best > best
            best = ct.where(better, tile_best, best)
            start = tile * BLOCK + ct.reshape(ct.arange(GROUPS, dtype=ct.int32), (GROUPS, 1)) * GROUP
            best_column = ct.where(better, start + place, best_column)
        x = cap(x, softcap)[0]
        if given(label_smoothing):
            distance = ct.where(inside, x - pivot, 0.0)
            if given(weight):
                distance *= ct.reshape(load_vector(weight, tile, BLOCK), (GROUPS, GROUP))
            weighted += ct.sum(distance, axis=1, keepdims=True)
        x = ct.where(inside, x, -math.inf)
        higher = ct.maximum(maximum, ct.max(x, axis=1, keepdims=True))
        total = total * exp_like(maximum - higher, logits)
        total += ct.sum(exp_like(x - higher, logits), axis=1, keepdims=True)
        maximum = higher
    top = ct.max(maximum)
    exp_sum = ct.where(known, ct.sum(total * exp_like(maximum - top, logits)), math.nan)
    log_sum = ct.log(exp_sum)

    lse = top + log_sum
    nll = (top - label_logit) + log_sum
    loss = _label_weight(weight, label, known) * nll
    if given(label_smoothing):
        mass = ct.astype(columns, ct.float32)
        if given(weight):
            mass = ct.load(weight_sum, (0,), ())
        smooth = ((top - pivot) + log_sum) * mass - ct.sum(weighted)
        loss = loss * (1.0 - label_smoothing) + smooth * (label_smoothing / columns)
    z_loss = lse * 0.0
    if given(lse_square_scale):
        z_loss = lse * lse * lse_square_scale
    # Computed from nll's parts: nll itself is rounded much more coarsely than they are.
    probability = exp_like(label_logit - top, logits) / exp_sum
    if TOKEN_SCALING:
        loss *= probability
        z_loss *= probability
    if ADD_Z_LOSS:
        loss += z_loss
    ct.store(losses, (row,), ct.where(counts, loss, 0.0))
    if given(z_losses):
        ct.store(z_losses, (row,), ct.where(counts, z_loss, 0.0))
    winner = ct.min(ct.where(best == ct.max(best), best_column, columns))
    if given(hits):
        ct.store(hits, (row,), ct.where(counts & known & (winner == label), 1.0, 0.0))
    if given(predicted):
        ct.store(predicted, (row,), ct.astype(ct.where(counts, winner, -1), ct.int64))
    if given(statistics):
        ct.store(statistics, (0, row), top, allow_tma=False)
        ct.store(statistics, (1, row), exp_sum, allow_tma=False)
        if TOKEN_SCALING:
            ct.store(statistics, (2, row), probability, allow_tma=False)


@ct.kernel(occupancy=ct.ByTarget(sm_90=OCCUPANCY, default=3))  # with four, sm_80 and sm_100 spill
def _gradient(
    dlogits, logits, bias, target, weight, column_weight, weight_sum, statistics, dloss, totals,
    vocabulary, first, first_column, parts, ignore_index: ct.ScalarInt64, label_smoothing, lse_square_scale, softcap,
    TOKEN_SCALING: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    lanes = first_column + ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    tiles = ct.num_tiles(dlogits, axis=1, shape=(1, BLOCK))
    local = ct.bid(0) // parts
    row = first + local
    label, counts, known = _label_of(target, row, ignore_index, vocabulary)
    if counts:
        top = ct.load(statistics, (0, row), (), allow_tma=False)
        exp_sum = ct.load(statistics, (1, row), (), allow_tma=False)
        scale = ct.full((), 1.0, ct.float32)
        if given(dloss):
            scale = ct.load(dloss, (row,), ())
        if TOKEN_SCALING:
            scale *= ct.load(statistics, (2, row), (), allow_tma=False)
        z_scale = scale
        if given(totals):
            z_scale = scale / ct.load(totals, (0,), ())
            scale = scale / ct.load(totals, (1,), ())
        label_scale = scale * _label_weight(weight, label, known)
        # `slope` multiplies the probabilities, besides label_scale. `uniform` multiplies the class weights.
        slope = scale * 0.0
        uniform = scale * 0.0
        if given(label_smoothing):
            label_scale *= 1.0 - label_smoothing
            uniform = scale * (label_smoothing / vocabulary)
            slope = uniform * (ct.load(weight_sum, (0,), ()) if given(weight) else vocabulary)
        if given(lse_square_scale):
            slope += z_scale * (2.0 * lse_square_scale) * (top + ct.log(exp_sum))
        inverse = 1.0 / exp_sum
        for tile in range(ct.bid(0) % parts, tiles, parts):
            x = load(logits if given(logits) else dlogits, (local, tile), 1, BLOCK)
            if given(bias):
                x += load_vector(bias, tile, BLOCK)
            capped, derivative = cap(x, softcap)
            probability = exp_like(capped - top, dlogits) * inverse
            dx = label_scale * (probability - ct.where(lanes == label - tile * BLOCK, 1.0, 0.0))
            if given(label_smoothing) or given(lse_square_scale):
                dx += slope * probability
            if given(label_smoothing):
                if given(weight):
                    dx -= uniform * load_vector(column_weight, tile, BLOCK)
                else:
                    dx -= uniform
            ct.store(dlogits, (local, tile), ct.astype(dx * derivative, dlogits.dtype))
    else:
        for tile in range(ct.bid(0) % parts, tiles, parts):
            ct.store(dlogits, (local, tile), ct.zeros((1, BLOCK), dlogits.dtype))


@ct.kernel
def _reduce(
    loss, z_loss, accuracy, totals, losses, z_losses, hits, target, weight, columns, ignore_index: ct.ScalarInt64,
    MEAN: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    # A single block adds up everything, so the order of the sums is always the same.
    counted = ct.zeros((BLOCK,), ct.float32)
    weights, weights_lost = ct.zeros((BLOCK,), ct.float32), ct.zeros((BLOCK,), ct.float32)
    loss_sum, lost = ct.zeros((BLOCK,), ct.float32), ct.zeros((BLOCK,), ct.float32)
    z_loss_sum, z_lost = ct.zeros((BLOCK,), ct.float32), ct.zeros((BLOCK,), ct.float32)
    hit_sum = ct.zeros((BLOCK,), ct.float32)
    rows = target.shape[0]
    for tile in range(ct.num_tiles(target, axis=0, shape=(BLOCK,))):
        inside = tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32) < rows
        label = ct.load(target, (tile,), (BLOCK,), padding_mode=ZERO)
        counts = inside & (label != ignore_index)
        counted += ct.where(counts, 1.0, 0.0)
        if given(weight):
            known = counts & (label >= 0) & (label < columns)
            at = ct.astype(ct.where(known, label, 0), ct.int32)
            row_weights = ct.astype(ct.gather(weight, at, mask=known), ct.float32)
            weights, weights_lost = add_up(weights, weights_lost, row_weights)
        if given(losses):
            loss_sum, lost = add_up(loss_sum, lost, ct.load(losses, (tile,), (BLOCK,), padding_mode=ZERO))
        if given(z_losses):
            z_loss_sum, z_lost = add_up(z_loss_sum, z_lost, ct.load(z_losses, (tile,), (BLOCK,), padding_mode=ZERO))
        if given(hits):
            hit_sum += ct.load(hits, (tile,), (BLOCK,), padding_mode=ZERO)
    any_counted = ct.sum(counted) > 0.0
    count = ct.where(any_counted, ct.sum(counted), 1.0)
    weight_total = count
    if given(weight):
        weight_total = ct.where(any_counted, ct.sum(weights), 1.0)
    if given(totals):
        ct.store(totals, (0,), count)
        ct.store(totals, (1,), weight_total)
    if given(losses):
        loss_value = ct.sum(loss_sum)
        z_loss_value = ct.sum(z_loss_sum)
        if MEAN:
            loss_value = loss_value / weight_total
            z_loss_value = z_loss_value / count
        ct.store(loss, (0,), loss_value + z_loss_value)
        if given(z_loss):
            ct.store(z_loss, (0,), z_loss_value)
        if given(accuracy):
            ct.store(accuracy, (0,), ct.sum(hit_sum) / count)


def _vector(scalar: Tensor | None) -> Tensor | None:
    """A scalar tensor as a vector of one element: tileiras 13.4 takes no argument without dimensions."""
    return None if scalar is None else scalar.view(1)


@opaque(writes=("results",))
def _launch_rows(results: CrossEntropyResults, logits: Logits, inputs: CrossEntropyInputs, first: int) -> None:
    memory, columns, options = as_rows(logits.tensor()), logits.columns, inputs.options
    for begin in range(0, memory.shape[0], MOST_BLOCKS):
        part = memory[begin : begin + MOST_BLOCKS]
        launch(
            _rows, (part.shape[0],), *results, part, inputs.bias, inputs.target, inputs.weight,
            _vector(inputs.weight_sum), columns, first + begin, options.ignore_index, options.label_smoothing,
            options.lse_square_scale, options.softcap, options.adds_z_loss(), options.token_scaling,
            min(power_of_2(columns), BLOCK), 16 // memory.element_size(),
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
    y, columns, options = dlogits.tensor(), dlogits.columns, inputs.options
    n, block = y.shape[0], min(power_of_2(columns), GRADIENT_BYTES // y.element_size())
    # If rows are few, one block per row would be too few blocks.
    programs = 2 * OCCUPANCY * sm_count(y.device)
    parts = min(blocks(columns, block), blocks(programs, n))
    of_columns = slice(first_column, first_column + columns)
    bias, column_weight = (None if x is None else x[of_columns] for x in (inputs.bias, inputs.weight))
    dloss = None if dloss is None else dloss.expand_as(inputs.target)
    x = None if logits is None else as_rows(logits.tensor())
    most = MOST_BLOCKS // parts
    for begin in range(0, n, most):
        rows = slice(begin, min(begin + most, n))
        launch(
            _gradient, ((rows.stop - begin) * parts,), y[rows], None if x is None else x[rows], bias, inputs.target,
            inputs.weight, column_weight, _vector(inputs.weight_sum), statistics, dloss, totals, inputs.vocabulary,
            first + begin, first_column, parts, options.ignore_index, options.label_smoothing,
            options.lse_square_scale, options.softcap, options.token_scaling, block,
        )  # fmt: skip


@opaque(writes=("loss", "z_loss", "accuracy", "totals"))
def _launch_reduce(
    loss: Tensor | None,
    z_loss: Tensor | None,
    accuracy: Tensor | None,
    totals: Tensor | None,
    losses: Tensor | None,
    z_losses: Tensor | None,
    hits: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    columns: int,
    ignore_index: int,
    mean: bool,
) -> None:
    launch(
        _reduce, (1,), _vector(loss), _vector(z_loss), _vector(accuracy), totals, losses, z_losses, hits, target,
        weight, columns, ignore_index, mean, min(power_of_2(target.shape[0]), LABELS),
    )  # fmt: skip


class CuTileCrossEntropy(CrossEntropyKernels):
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
        _launch_reduce(
            loss, z_loss, accuracy, totals, losses, z_losses, hits, inputs.target, inputs.weight if mean else None,
            inputs.vocabulary, inputs.options.ignore_index, mean,
        )  # fmt: skip


KERNELS = CuTileCrossEntropy()
