"""Statistics of rows of logits, for `logit_statistics` and `fused_linear_logit_statistics`.

One block per row reads its logits once. It keeps running maxima and, relative to them, running sums: of exponentials e^d, of
their squares, and of e^d d. The entropy is log Σ e^d − Σ e^d d / Σ e^d, whose two terms have one sign. Maxima are of the logits
before the temperature. Differences of logits are multiplied by its inverse.
"""

import math

import cuda.tile as ct
from torch import Tensor

from liger_core.custom_op import opaque
from liger_core.host.logit_statistics import StatisticsGrads, StatisticsInputs, StatisticsKernels, StatisticsResults
from liger_core.host.rows import Logits
from liger_cutile.ops._cross_entropy import OCCUPANCY
from liger_cutile.ops._device import sm_count
from liger_cutile.ops._launch import MOST_BLOCKS, ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import LEAST, cap, exp_like, tempered
from liger_cutile.ops._rows import ZERO, as_rows, blocks, load, load_vector, power_of_2

# Bytes of a tile of logits: registers don't hold 4096 float32 columns and the sums beside them.
ROWS_BYTES = 8192
# Columns of a tile of the gradient, and blocks per multiprocessor.
GRADIENT_BLOCK = 4096
GRADIENT_OCCUPANCY = 3
# Targets of a row that are looked up at once.
MOST_TARGETS = 128


@ct.function
def _cooled(x, temperature):
    """A logit, or a sum of them, over the temperature."""
    if given(temperature):
        return x / temperature
    else:
        return x


@ct.function
def _columns_of(target, row, tile, TARGETS, first_id, columns, ignore_index):
    """Columns of some targets of a row, or 0; whether a target counts, and whether it is a column. ``[1, TARGETS]``."""
    place = ct.reshape(ct.arange(TARGETS, dtype=ct.int32), (1, TARGETS))
    label = ct.load(target, (row, tile), (1, TARGETS), padding_mode=ZERO, allow_tma=False)
    counts = (label != ignore_index) & (place < target.shape[1] - tile * TARGETS)
    column = label - first_id
    known = counts & (column >= 0) & (column < columns)
    return ct.astype(ct.where(known, column, 0), ct.int32), counts, known


@ct.kernel(occupancy=OCCUPANCY)
def _rows(
    lse, picked, entropy, total, log_sum_squares, best, best_index, kept, logits, bias, target, weight,
    columns, first_row, first_id: ct.ScalarInt64, ignore_index: ct.ScalarInt64, softcap, temperature, inverse,
    BLOCK: ConstInt, GROUP: ConstInt, TARGETS: ConstInt,
):  # fmt: skip
    GROUPS = BLOCK // GROUP
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (GROUPS, GROUP))
    local = ct.bid(0)
    row = first_row + local
    count = ct.zeros((), ct.int32)
    for tile in range(ct.num_tiles(target, axis=1, shape=(1, TARGETS))):
        column, counts, known = _columns_of(target, row, tile, TARGETS, first_id, columns, ignore_index)
        z = ct.astype(ct.gather(logits, (local, column), mask=known), ct.float32)
        if given(bias):
            z += ct.astype(ct.gather(bias, column, mask=known), ct.float32)
        z = _cooled(cap(z, softcap)[0], temperature)
        ct.store(picked, (row, tile), ct.where(known, z, 0.0), allow_tma=False)
        count += ct.sum(ct.where(counts, 1, 0))
    counted = count > 0

    # A group is the columns that a thread loads at once. Each group has its own maximum, and the loop exchanges nothing between
    # threads.
    maximum = ct.full((GROUPS, 1), LEAST, ct.float32)
    exp_sum = ct.zeros((GROUPS, 1), ct.float32)
    square_sum = ct.zeros((GROUPS, 1), ct.float32)
    product_sum = ct.zeros((GROUPS, 1), ct.float32)
    weighted = ct.zeros((GROUPS, 1), ct.float32)
    highest = ct.full((GROUPS, 1), -math.inf, ct.float32)
    highest_column = ct.zeros((GROUPS, 1), ct.int32)
    tiles = ct.where(counted, ct.num_tiles(logits, axis=1, shape=(1, BLOCK)), 0).item()  # an ignored row is not read
    for tile in range(tiles):
        inside = lanes < columns - tile * BLOCK
        x = load(logits, (local, tile), 1, BLOCK)
        if given(bias):
            x += load_vector(bias, tile, BLOCK)
        x = ct.reshape(x, (GROUPS, GROUP))
        if given(best):
            real = ct.where(inside, x, -math.inf)
            tile_best = ct.max(real, axis=1, keepdims=True)
            place = ct.argmax(real, axis=1, keepdims=True)
            better = tile_best > highest
            highest = ct.where(better, tile_best, highest)
            start = tile * BLOCK + ct.reshape(ct.arange(GROUPS, dtype=ct.int32), (GROUPS, 1)) * GROUP
            highest_column = ct.where(better, start + place, highest_column)
        x = cap(x, softcap)[0]
        if given(total):
            part = ct.where(inside, x, 0.0)
            if given(weight):
                part *= ct.reshape(load_vector(weight, tile, BLOCK), (GROUPS, GROUP))
            weighted += ct.sum(part, axis=1, keepdims=True)
        x = ct.where(inside, x, -math.inf)
        higher = ct.maximum(maximum, ct.max(x, axis=1, keepdims=True))
        fall = tempered(maximum - higher, inverse)
        rescale = exp_like(fall, logits)
        depth = tempered(x - higher, inverse)
        term = exp_like(depth, logits)
        if given(entropy):
            # The maximum before the first logit leaves no sum, and the product with it could be infinite.
            product_sum = rescale * (product_sum + ct.where(rescale == 0.0, 0.0, fall) * exp_sum)
            product_sum += ct.sum(ct.where(term == 0.0, 0.0, term * depth), axis=1, keepdims=True)
        if given(log_sum_squares):
            square_sum = square_sum * (rescale * rescale) + ct.sum(term * term, axis=1, keepdims=True)
        exp_sum = exp_sum * rescale + ct.sum(term, axis=1, keepdims=True)
        maximum = higher
    top = ct.max(maximum)
    fall = tempered(maximum - top, inverse)
    rescale = exp_like(fall, logits)
    sum_of_all = ct.sum(exp_sum * rescale)
    log_sum = ct.log(sum_of_all)
    ct.store(lse, (row,), ct.where(counted, _cooled(top, temperature) + log_sum, 0.0))
    if given(entropy):
        product_sum = rescale * (product_sum + ct.where(rescale == 0.0, 0.0, fall) * exp_sum)
        row_entropy = ct.where(counted, log_sum - ct.sum(product_sum) / sum_of_all, 0.0)
        ct.store(entropy, (row,), row_entropy)
    if given(total):
        ct.store(total, (row,), ct.where(counted, _cooled(ct.sum(weighted), temperature), 0.0))
    if given(log_sum_squares):
        squares = ct.log(ct.sum(square_sum * (rescale * rescale))) - 2.0 * log_sum
        ct.store(log_sum_squares, (row,), ct.where(counted, squares, 0.0))
    if given(best):
        ct.store(best, (row,), ct.where(counted, ct.max(highest), 0.0))
        winner = ct.min(ct.where(highest == ct.max(highest), highest_column, columns))
        ct.store(best_index, (row,), ct.where(counted, ct.astype(winner, ct.int64) + first_id, -1))
    if given(kept):
        ct.store(kept, (0, row), top, allow_tma=False)
        ct.store(kept, (1, row), ct.where(counted, sum_of_all, -1.0), allow_tma=False)
        if given(entropy):
            ct.store(kept, (2, row), row_entropy, allow_tma=False)


@ct.kernel(occupancy=GRADIENT_OCCUPANCY)
def _gradient(
    dlogits, logits, bias, target, weight, kept, dlse, dpicked, dentropy, dtotal,
    first_row, first_column, parts, first_id: ct.ScalarInt64, ignore_index: ct.ScalarInt64, softcap, inverse,
    SEVERAL: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    tiles = ct.num_tiles(dlogits, axis=1, shape=(1, BLOCK))
    local = ct.bid(0) // parts
    row = first_row + local
    exp_sum = ct.load(kept, (1, row), (), allow_tma=False)
    if exp_sum != -1.0:
        top = ct.load(kept, (0, row), (), allow_tma=False)
        by_lse = ct.load(dlse, (row,), ()) if given(dlse) else 0.0
        by_total = ct.load(dtotal, (row,), ()) if given(dtotal) else 0.0
        by_entropy = ct.zeros((), ct.float32)
        offset = ct.zeros((), ct.float32)
        if given(dentropy):
            by_entropy = ct.load(dentropy, (row,), ())
            offset = ct.load(kept, (2, row), (), allow_tma=False) - ct.log(exp_sum)
        inverse_sum = 1.0 / exp_sum
        for tile in range(ct.bid(0) % parts, tiles, parts):
            x = load(logits if given(logits) else dlogits, (local, tile), 1, BLOCK)
            if given(bias):
                x += load_vector(bias, tile, BLOCK)
            capped, derivative = cap(x, softcap)
            depth = tempered(capped - top, inverse)
            probability = exp_like(depth, logits if given(logits) else dlogits) * inverse_sum
            dz = by_lse * probability
            if given(dentropy):
                dz -= by_entropy * ct.where(probability == 0.0, 0.0, probability * (depth + offset))
            if given(dtotal):
                dz += by_total * load_vector(weight, tile, BLOCK) if given(weight) else by_total
            if given(dpicked):
                for k in range(target.shape[1] if SEVERAL else 1):
                    label = ct.load(target, (row, k), (), allow_tma=False)
                    place = label - first_id - (first_column + tile * BLOCK)
                    if (label != ignore_index) & (place >= 0) & (place < BLOCK):
                        by_picked = ct.load(dpicked, (row, k), (), allow_tma=False)
                        dz += ct.where(lanes == ct.astype(place, ct.int32), by_picked, 0.0)
            ct.store(dlogits, (local, tile), ct.astype(tempered(dz * derivative, inverse), dlogits.dtype))
    else:
        for tile in range(ct.bid(0) % parts, tiles, parts):
            ct.store(dlogits, (local, tile), ct.zeros((1, BLOCK), dlogits.dtype))


@opaque(writes=("results",))
def _launch_rows(results: StatisticsResults, logits: Logits, inputs: StatisticsInputs, first_row: int) -> None:
    memory, columns, target, options = as_rows(logits.tensor()), logits.columns, as_rows(inputs.target), inputs.options
    size = memory.element_size()
    for begin in range(0, memory.shape[0], MOST_BLOCKS):
        chunk = memory[begin : begin + MOST_BLOCKS]
        launch(
            _rows, (chunk.shape[0],), *results, chunk, inputs.bias, target, inputs.weight, columns, first_row + begin,
            options.first, options.ignore_index, options.softcap, options.temperature, options.inverse,
            min(power_of_2(columns), ROWS_BYTES // size), 16 // size,
            min(power_of_2(target.shape[1], 1), MOST_TARGETS),
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
    dx, columns, target, options = dlogits.tensor(), dlogits.columns, as_rows(inputs.target), inputs.options
    n, block = dx.shape[0], min(power_of_2(columns), GRADIENT_BLOCK)
    # If rows are few, one block per row would be too few blocks.
    programs = 2 * GRADIENT_OCCUPANCY * sm_count(dx.device)
    parts = min(blocks(columns, block), blocks(programs, n))
    of_columns = slice(first_column, first_column + columns)
    bias, weight = (None if x is None else x[of_columns] for x in (inputs.bias, inputs.weight))
    x = None if logits is None else as_rows(logits.tensor())
    dlse, dpicked, dentropy, dtotal = incoming
    dpicked = None if dpicked is None else as_rows(dpicked)
    most = MOST_BLOCKS // parts
    for begin in range(0, n, most):
        chunk = slice(begin, min(begin + most, n))
        launch(
            _gradient, ((chunk.stop - begin) * parts,), dx[chunk], None if x is None else x[chunk], bias, target, weight,
            kept, dlse, dpicked, dentropy, dtotal, first_row + begin, first_column, parts, options.first,
            options.ignore_index, options.softcap, options.inverse, target.shape[1] > 1, block,
        )  # fmt: skip


class CuTileStatistics(StatisticsKernels):
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


KERNELS = CuTileStatistics()
