"""GRPO's losses: forward and backward read the logits once each. Between them there are only a few numbers per token.

One block per token finds its log-probability. Then blocks of tokens turn those into losses and into the gradients of the
log-probabilities, and one block takes the means, always in the same order. If a token's gradient is 0, because the token is
masked or clipped, its logits are not read again.
"""

import math

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import grpo_loss
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.grpo_loss import GRPOLoss, GRPOLossKernels, GRPOResults, PolicyInputs, temperatures
from liger_core.host.rows import adjacent
from liger_core.policy import PolicyOptions
from liger_cutile.ops._launch import MOST_BLOCKS, ConstBool, ConstInt, block_number, given, launch, one_each
from liger_cutile.ops._math import LEAST, exp_like, tempered
from liger_cutile.ops._rows import as_rows, blocks, power_of_2

# Blocks per multiprocessor, which hide each other's memory latency, with loads into 64 registers per thread.
OCCUPANCY = 8
# Bytes of a tile of logits: as many 16-byte loads per thread of 4 warps as fit those registers.
TILE_BYTES = 8192
# The gradient's blocks per token, and per multiprocessor. With the registers of four blocks, a thread has all its loads of a
# tile in flight. On an H200 (tileiras 13.4), the gradient of 8 x 2049 x 151936 in bfloat16 takes 2.307 ms, 2.378 with two blocks
# per token, and 2.720 with a block per tile and eight per multiprocessor.
GRADIENT_PARTS, GRADIENT_OCCUPANCY = 8, 4
# Bytes that a thread loads at once: each such group has its own maximum.
GROUP_BYTES = 16
# Tokens that a block takes at once between the two passes over the logits, and rows that the block of means takes at once.
TOKENS, ROWS_OF_MEANS = 512, 256

ZERO, NEG_INF = ct.PaddingMode.ZERO, ct.PaddingMode.NEG_INF


@ct.function
def _load(array, at, ROWS, BLOCK):
    return ct.astype(ct.load(array, at, (ROWS, BLOCK), padding_mode=ZERO, allow_tma=False), ct.float32)


@ct.function
def _load_number(vector, row):
    return ct.astype(ct.load(vector, (row,), ()), ct.float32)


@ct.function
def _load_state(state, which, at, BLOCK):
    values = ct.load(state, (which, at[0], at[1]), (1, 1, BLOCK), padding_mode=ZERO, allow_tma=False)
    return ct.reshape(values, (1, BLOCK))


@ct.function
def _store_state(state, which, at, value, BLOCK):
    ct.store(state, (which, at[0], at[1]), ct.reshape(value, (1, 1, BLOCK)), allow_tma=False)


@ct.kernel(occupancy=OCCUPANCY)
def _log_probabilities(
    state, logits: ct.IndexedWithInt64, ids, mask, temperature, inverse,
    KEEP: ConstBool, BLOCK: ConstInt, GROUP: ConstInt,
):  # fmt: skip
    rows, length = ids.shape
    for token in range(ct.bid(0), rows * length, ct.num_blocks(0)):
        row, place = token // length, token % length
        counts = True
        if given(mask):
            counts = ct.load(mask, (row, place), ()) != 0
        if counts:
            label = ct.load(ids, (row, place), ())
            known = (label >= 0) & (label < logits.shape[2])
            label_logit = ct.astype(ct.gather(logits, (row, place, label), mask=known), ct.float32)
            # A thread's group of columns has its own maximum, and the loop exchanges nothing between threads.
            maximum = ct.full((BLOCK // GROUP, 1), LEAST, ct.float32)
            total = ct.zeros((BLOCK // GROUP, 1), ct.float32)
            for tile in range(ct.num_tiles(logits, axis=2, shape=(1, 1, BLOCK))):
                x = ct.load(logits, (row, place, tile), (1, 1, BLOCK), padding_mode=NEG_INF, allow_tma=False)
                x = ct.astype(ct.reshape(x, (BLOCK // GROUP, GROUP)), ct.float32)
                higher = ct.maximum(maximum, ct.max(x, axis=1, keepdims=True))
                total = total * exp_like(tempered(maximum - higher, inverse), logits)
                total += ct.sum(exp_like(tempered(x - higher, inverse), logits), axis=1, keepdims=True)
                maximum = higher
            top = ct.max(maximum)
            depth = top - label_logit
            if given(temperature):
                depth = depth / temperature
            ct.store(state, (0, row, place), ct.where(known, depth, math.nan))
            ct.store(state, (1, row, place), ct.sum(total * exp_like(tempered(maximum - top, inverse), logits)))
            if KEEP:
                ct.store(state, (2, row, place), top)
        else:
            ct.store(state, (0, row, place), 0.0)
            ct.store(state, (1, row, place), 1.0)


@ct.function
def _load_log_probability(state, at, used, BLOCK):
    """depth and log_sum, whose negative sum is the log-probability."""
    depth = ct.where(used, _load_state(state, 0, at, BLOCK), 0.0)
    return depth, ct.log(ct.where(used, _load_state(state, 1, at, BLOCK), 1.0))


@ct.function
def _distance(depth, log_sum, others, at, used, BLOCK):
    """The log-probability minus the other one; if there is no other, minus itself."""
    if given(others):
        # In this order no intermediate result is as large as the log-probability: its rounding error would be in the ratio.
        return (-depth - ct.where(used, _load(others, at, 1, BLOCK), 0.0)) - log_sum
    else:
        return (depth - depth) + (log_sum - log_sum)


@ct.function
def _growth(x):
    """e^x − 1, and e^x − 1 − x without cancellation near 0."""
    far = ct.exp(x) - 1.0
    series = x * 2.08767570e-9 + 2.50521084e-8
    series = x * series + 2.75573192e-7
    series = x * series + 2.75573192e-6
    series = x * series + 2.48015873e-5
    series = x * series + 1.98412698e-4
    series = x * series + 1.38888889e-3
    series = x * series + 8.33333333e-3
    series = x * series + 4.16666667e-2
    series = x * series + 1.66666667e-1
    series = (x * series + 0.5) * x * x
    near = ct.abs(x) < 1.0
    return ct.where(near, x + series, far), ct.where(near, series, far - x)


@ct.function
def _clipped(x, clip):
    """x within ±clip, and the x that are outside."""
    outside = ct.abs(x) > clip
    return ct.where(outside, ct.where(x > 0.0, clip, -clip), x), outside


@ct.function
def _token_losses(
    lp, log_ratio, ref_distance, advantage, importance, beta, low, high, delta, clip, tau_positive, tau_negative,
    CISPO, SAPO, CORRECT_KL,
):  # fmt: skip
    """Loss, divergence, whether the token is clipped, and the loss's derivatives by lp alone and by the ratio's logarithm."""
    if given(clip):
        log_ratio, ratio_clipped = _clipped(log_ratio, clip)
        ref_distance, ref_clipped = _clipped(ref_distance, clip)
    actual = ct.exp(log_ratio)
    # No infinite ratio is multiplied by an advantage or an importance of 0.
    ratio = ct.where((advantage * importance == 0.0) & (actual == math.inf), 1.0, actual)
    nothing = ct.zeros(ratio.shape, ct.float32)
    if CISPO:
        by_lp = -ct.minimum(ratio, high, propagate_nan=True) * advantage * importance
        by_ratio = nothing
        loss = by_lp * lp
        clipped = (actual > high) & (advantage > 0.0)
    elif SAPO:
        tau = ct.where(advantage > 0.0, tau_positive, tau_negative)
        u = tau * (ratio - 1.0)
        q = ct.exp(-ct.abs(u))
        r = 1.0 / (1.0 + q)
        loss = -4.0 * advantage * ct.where(u < 0.0, q * r, r) / tau
        loss *= importance
        # The ratio may be infinite.
        by_ratio = -4.0 * advantage * ct.where(q == 0.0, 0.0, q * r * r * ratio) * importance
        by_lp = nothing
        clipped = ratio < 0.0
    else:
        limited = ratio
        passes = ct.ones(ratio.shape, ct.float32)
        if given(delta):
            limited = ct.minimum(ratio, delta, propagate_nan=True)
            passes = ct.where(ratio <= delta, 1.0, 0.0)
        within = (ratio >= low) & (ratio <= high)
        gain = limited * advantage
        clipped_gain = ct.where(within, ratio, ct.where(ratio < low, low, high)) * advantage
        unclipped_passes = ct.where(within, 1.0, 0.0)
        loss = -ct.minimum(gain, clipped_gain, propagate_nan=True)
        tie = 0.5 * (passes + unclipped_passes)
        slope = ct.where(gain < clipped_gain, passes, ct.where(gain > clipped_gain, unclipped_passes, tie))
        loss *= importance
        # If it is clipped, the product would be 0 times infinity.
        by_ratio = ct.where(slope == 0.0, 0.0, -advantage * slope * importance * ratio)
        by_lp = nothing
        clipped = ((actual < low) & (advantage < 0.0)) | ((actual > high) & (advantage > 0.0))
    kl = nothing
    if given(beta):
        growth, kl = _growth(ref_distance)
        kl_by_lp = -growth
        if given(clip):
            kl_by_lp = ct.where(ref_clipped, 0.0, kl_by_lp)
        if CORRECT_KL:
            kl *= actual
            kl_by_lp *= actual
            by_ratio += beta * kl
        loss += beta * kl
        by_lp += beta * kl_by_lp
    if given(clip):
        by_ratio = ct.where(ratio_clipped, 0.0, by_ratio)
    return loss, kl, clipped, by_lp, by_ratio


@ct.function
def _inside(array, column, BLOCK):
    """Which columns of a tile exist, ``[1, BLOCK]``."""
    columns = column * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    return ct.reshape(columns < array.shape[1], (1, BLOCK))


@ct.function
def _counts(mask, inside, at, BLOCK):
    """Which tokens of a tile exist and aren't masked."""
    if given(mask):
        return inside & (ct.load(mask, at, (1, BLOCK), padding_mode=ZERO, allow_tma=False) != 0)
    else:
        return ct.broadcast_to(inside, (1, BLOCK))


@ct.function
def _store_sum(sums, row, column, values):
    ct.store(sums, (row, column), ct.sum(values, axis=1, keepdims=True), allow_tma=False)


@ct.kernel(occupancy=OCCUPANCY)
def _sequence_ratios(ratios, state, old_logps, mask, ids, BLOCK: ConstInt):
    """For each row: the mean over its tokens of the ratio's logarithm, and one token's share of that mean."""
    row = ct.bid(0)
    count = ct.zeros((1, 1), ct.float32)
    total = ct.zeros((1, 1), ct.float32)
    for column in range(ct.num_tiles(ids, axis=1, shape=(1, BLOCK))):
        at = row, column
        counts = _counts(mask, _inside(ids, column, BLOCK), at, BLOCK)
        depth, log_sum = _load_log_probability(state, at, counts, BLOCK)
        log_ratio = _distance(depth, log_sum, old_logps, at, counts, BLOCK)
        count += ct.sum(ct.where(counts, 1.0, 0.0), axis=1, keepdims=True)
        total += ct.sum(ct.where(counts, log_ratio, 0.0), axis=1, keepdims=True)
    count = ct.maximum(count, 1.0)
    ct.store(ratios, (row, 0), total / count, allow_tma=False)
    ct.store(ratios, (row, 1), 1.0 / count, allow_tma=False)


# No loop: tileiras 13.4 would unroll it for sm_90 until registers spill.
@ct.kernel
def _losses(
    loss, kl, clip, sums, state, ids, old_logps, ref_logps, ratios, advantages, mask, importances,
    beta, low, high, delta, log_ratio_clip, tau_positive, tau_negative,
    CISPO: ConstBool, SAPO: ConstBool, CORRECT_KL: ConstBool, BY_SEQUENCE: ConstBool, KEEP: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    across = ct.num_tiles(ids, axis=1, shape=(1, BLOCK))
    row, column = ct.bid(0) // across, ct.bid(0) % across
    at = row, column
    counts = _counts(mask, _inside(ids, column, BLOCK), at, BLOCK)
    depth, log_sum = _load_log_probability(state, at, counts, BLOCK)
    if given(ratios):
        log_ratio = ct.where(counts, _load(ratios, (row, 0), 1, 1), 0.0)
    else:
        log_ratio = _distance(depth, log_sum, old_logps, at, counts, BLOCK)
    ref_distance = -_distance(depth, log_sum, ref_logps, at, counts, BLOCK)
    importance = 1.0
    if given(importances):
        if ct.static_eval(importances.ndim == 2):
            importance = ct.where(counts, _load(importances, at, 1, BLOCK), 0.0)
        else:
            importance = _load_number(importances, row)
    token_loss, token_kl, clipped, by_lp, by_ratio = _token_losses(
        -depth - log_sum, log_ratio, ref_distance, _load_number(advantages, row), importance,
        beta, low, high, delta, log_ratio_clip, tau_positive, tau_negative, CISPO, SAPO, CORRECT_KL,
    )  # fmt: skip
    token_loss = ct.where(counts, token_loss, 0.0)
    token_kl = ct.where(counts, token_kl, 0.0)
    token_clip = ct.where(counts & clipped, 1.0, 0.0)
    if KEEP:
        if BY_SEQUENCE:
            by_ratio = by_ratio * _load(ratios, (row, 1), 1, 1)
            _store_state(state, 4, at, ct.where(counts, by_ratio, 0.0), BLOCK)
        else:
            by_lp += by_ratio
        _store_state(state, 3, at, ct.where(counts, by_lp, 0.0), BLOCK)
    if given(sums):
        _store_sum(sums, row, 4 * column, ct.where(counts, 1.0, 0.0))
        _store_sum(sums, row, 4 * column + 1, token_loss)
        _store_sum(sums, row, 4 * column + 2, token_kl)
        _store_sum(sums, row, 4 * column + 3, token_clip)
    else:
        ct.store(loss, at, token_loss, allow_tma=False)
        ct.store(clip, at, token_clip, allow_tma=False)
        if given(kl):
            ct.store(kl, at, token_kl, allow_tma=False)


@ct.kernel
def _means(
    loss, kl, clip, weights, sums, items, divisor,
    BY_SEQUENCE: ConstBool, ROW_MEAN: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    rows = sums.shape[0]
    counted = ct.zeros((BLOCK, 1), ct.float32)
    loss_total = counted
    kl_total = counted
    clip_total = counted
    tiles = ct.num_tiles(sums, axis=0, shape=(BLOCK, 1))
    for row in range(tiles):
        count = ct.zeros((BLOCK, 1), ct.float32)
        row_loss = count
        row_clip = count
        for column in range(0, sums.shape[1], 4):
            count += _load(sums, (row, column), BLOCK, 1)
            row_loss += _load(sums, (row, column + 1), BLOCK, 1)
            kl_total += _load(sums, (row, column + 2), BLOCK, 1)
            row_clip += _load(sums, (row, column + 3), BLOCK, 1)
        if ROW_MEAN:
            row_loss = row_loss / ct.maximum(count, 1.0)
            if given(weights):
                weight = 1.0 / (ct.maximum(count, 1.0) * rows)
                ct.store(weights, (row,), ct.reshape(weight, (BLOCK,)), allow_tma=False)
        if BY_SEQUENCE:
            row_clip = ct.minimum(row_clip, 1.0)
        counted += count
        loss_total += row_loss
        clip_total += row_clip
    token_count = ct.maximum(ct.sum(counted), 1.0)
    losses_divisor = token_count
    if given(items):
        losses_divisor = ct.astype(ct.load(items, (0,), ()), ct.float32)
    elif given(divisor):
        losses_divisor = divisor
    losses_divisor = ct.maximum(losses_divisor, 1.0)
    ct.store(loss, (0,), ct.sum(loss_total) / losses_divisor)
    clip_divisor = token_count
    if BY_SEQUENCE:
        clip_divisor = ct.astype(rows, ct.float32)
    ct.store(clip, (0,), ct.sum(clip_total) / clip_divisor)
    if given(kl):
        ct.store(kl, (0,), ct.sum(kl_total) / token_count)
    if given(weights) and not ROW_MEAN:
        for row in range(tiles):
            ct.store(weights, (row,), ct.full((BLOCK,), 1.0, ct.float32) / losses_divisor, allow_tma=False)


@ct.function
def _load_scales(dloss, weights, at, BLOCK):
    """The gradients of tokens' losses, including their weights in the mean: one per token, or one per row."""
    if given(weights):
        return ct.load(dloss, (0,), ()) * _load_number(weights, at[0])
    else:
        return _load(dloss, at, 1, BLOCK)


@ct.kernel(occupancy=OCCUPANCY)
def _sequence_coefficients(
    coefficients, dloss, state, mask, weights, BLOCK: ConstInt
):  # fmt: skip
    """Gradients of the log-probabilities, if each of them is in the ratio of its whole row."""
    tiles = ct.num_tiles(coefficients, axis=1, shape=(1, BLOCK))
    row = ct.bid(0)
    through_ratio = ct.zeros((1, 1), ct.float32)
    for column in range(tiles):
        at = row, column
        scale = _load_scales(dloss, weights, at, BLOCK)
        by_ratio = _load_state(state, 4, at, BLOCK)
        through_ratio += ct.sum(ct.where(by_ratio == 0.0, 0.0, scale * by_ratio), axis=1, keepdims=True)
    for column in range(tiles):
        at = row, column
        counts = _counts(mask, _inside(coefficients, column, BLOCK), at, BLOCK)
        scale = _load_scales(dloss, weights, at, BLOCK)
        by_lp = _load_state(state, 3, at, BLOCK)
        coefficient = ct.where(by_lp == 0.0, 0.0, scale * by_lp) + ct.where(counts, through_ratio, 0.0)
        ct.store(coefficients, at, coefficient, allow_tma=False)


@ct.kernel(occupancy=GRADIENT_OCCUPANCY)
def _gradient(
    dlogits, dloss, logits, ids, state, coefficients, weights, inverse, PARTS: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    rows, length = ids.shape
    position, part = block_number() // PARTS, block_number() % PARTS
    row, place = position // (length + 1), position % (length + 1)
    if row < rows:
        tiles = ct.num_tiles(dlogits, axis=1, shape=(1, BLOCK))
        first, last = part * tiles // PARTS, (part + 1) * tiles // PARTS
        coefficient = ct.zeros((), ct.float32)
        if place < length:
            coefficient = ct.load(coefficients, (row, place), ())
        if coefficient == 0.0:
            for column in range(first, last):
                ct.store(dlogits, (position, column), ct.zeros((1, BLOCK), dlogits.dtype), allow_tma=False)
        else:
            exp_sum = ct.load(state, (1, row, place), ())
            top = ct.load(state, (2, row, place), ())
            if given(weights):
                coefficient = coefficient * (ct.load(dloss, (0,), ()) * ct.load(weights, (row,), ()))
            elif given(dloss):
                coefficient = coefficient * ct.load(dloss, (row, place), ())
            coefficient = tempered(coefficient, inverse)
            rate = -coefficient * (1.0 / exp_sum)
            label = ct.astype(ct.load(ids, (row, place), ()), ct.int32)
            columns = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
            for column in range(first, last):
                x = ct.load(logits, (position, column), (1, BLOCK), padding_mode=ZERO, allow_tma=False)
                gradient = rate * exp_like(tempered(ct.astype(x, ct.float32) - top, inverse), logits)
                gradient = ct.where(columns == label - column * BLOCK, gradient + coefficient, gradient)
                ct.store(dlogits, (position, column), ct.astype(gradient, dlogits.dtype), allow_tma=False)


@opaque(writes=("results", "state"))
def _launch_forward(
    results: GRPOResults,
    state: Tensor,
    logits: Tensor,
    inputs: PolicyInputs,
    temperature: float,
    options: PolicyOptions,
) -> None:
    rows, length = inputs.ids.shape
    if length == 0:
        for result in (results.loss, results.kl, results.clip):
            if result is not None:
                result.zero_()
        return
    keep, mean, loss_type = state.shape[0] > 2, options.reduction == "mean", options.loss_type
    (logits, _), ids = adjacent(logits), as_rows(inputs.ids)
    mask, old_logps, ref_logps = (
        None if x is None else as_rows(x) for x in (inputs.mask, inputs.old_logps, inputs.ref_logps)
    )
    size = logits.element_size()
    # Multiplying differences by 1 / temperature takes registers, so there is half a tile.
    block = min(power_of_2(logits.shape[2]), TILE_BYTES // size // (1 if temperature == 1.0 else 2))
    launch(
        _log_probabilities, (min(rows * length, MOST_BLOCKS),), state, logits, ids, mask,
        *temperatures(temperature), keep, block, GROUP_BYTES // size,
    )  # fmt: skip

    importances = inputs.importances
    if importances is not None:
        importances = importances.reshape(rows) if importances.numel() == rows else as_rows(importances)
    across = blocks(length, TOKENS)
    ratios = None
    if options.row_ratio():
        ratios = torch.empty((rows, 2), dtype=torch.float32, device=state.device)
        launch(_sequence_ratios, (rows,), ratios, state, old_logps, mask, ids, TOKENS)
    loss, kl, clip, weights = results
    sums = torch.empty((rows, 4 * across), dtype=torch.float32, device=state.device) if mean else None
    low, high = options.ratios()
    launch(
        _losses, (rows * across,), *((None, None, None) if mean else (loss, kl, clip)), sums, state, ids, old_logps,
        ref_logps, ratios, inputs.advantages.contiguous(), mask, importances,
        float(options.beta) or None, low, float(high), None if options.delta is None else float(options.delta),
        None if options.log_ratio_clip is None else float(options.log_ratio_clip),
        float(options.sapo_temperature_pos), float(options.sapo_temperature_neg),
        loss_type == "cispo", loss_type == "sapo", options.use_bias_correction_kl,
        options.by_sequence(), keep, TOKENS,
    )  # fmt: skip
    if mean:
        items, divisor = inputs.items, inputs.divisor(options)
        launch(
            _means, (1,), loss.view(1), None if kl is None else kl.view(1), clip.view(1), weights, sums,
            None if items is None else items.to(state.device).view(1), None if divisor is None else float(divisor),
            options.by_sequence(), options.means_rows(), ROWS_OF_MEANS,
        )  # fmt: skip


@opaque(writes=("dlogits",))
def _launch_backward(
    dlogits: Tensor,
    dloss: Tensor,
    logits: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    state: Tensor,
    weights: Tensor | None,
    temperature: float,
    by_sequence: bool,
) -> None:
    rows, length = ids.shape
    if length == 0:
        dlogits.zero_()
        return
    dloss = as_rows(dloss) if weights is None else dloss.view(1)
    (logits, _), ids = adjacent(logits), as_rows(ids)
    coefficients = state[3]
    if by_sequence:
        coefficients = torch.empty((rows, length), dtype=torch.float32, device=dlogits.device)
        launch(
            _sequence_coefficients, (rows,), coefficients, dloss, state, None if mask is None else as_rows(mask),
            weights, TOKENS,
        )  # fmt: skip
        dloss = weights = None
    columns = logits.shape[2]
    block = min(power_of_2(columns), TILE_BYTES // logits.element_size())
    parts = min(GRADIENT_PARTS, blocks(columns, block))
    # All rows at once if all lie at one distance from each other; otherwise one sequence at a time.
    step = rows if logits.stride(0) == (length + 1) * logits.stride(1) else 1
    for first in range(0, rows, step):
        row_slice = slice(first, first + step)
        launch(
            _gradient, one_each(step * (length + 1) * parts), as_rows(dlogits[row_slice]),
            dloss[row_slice] if dloss is not None and weights is None else dloss, as_rows(logits[row_slice]), ids[row_slice],
            state[:, row_slice], coefficients[row_slice], None if weights is None else weights[row_slice],
            temperatures(temperature)[1], parts, block,
        )  # fmt: skip


class CuTileGRPOLoss(GRPOLossKernels):
    def forward(
        self, state: Tensor, logits: Tensor, inputs: PolicyInputs, temperature: float, options: PolicyOptions
    ) -> GRPOResults:
        results = GRPOResults.empty(state, options, True)
        _launch_forward(results, state, logits, inputs, temperature, options)
        return results

    def backward(
        self,
        dlogits: Tensor,
        dloss: Tensor,
        logits: Tensor,
        ids: Tensor,
        mask: Tensor | None,
        state: Tensor,
        weights: Tensor | None,
        temperature: float,
        options: PolicyOptions,
    ) -> None:
        _launch_backward(dlogits, dloss, logits, ids, mask, state, weights, temperature, options.by_sequence())


host = GRPOLoss(CuTileGRPOLoss())
forward = implements(grpo_loss)(host.forward)
backward = host.backward
