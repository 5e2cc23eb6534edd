"""GRPO's losses: forward and backward read the logits once each. Between them there are only a few numbers per token.

One program per token finds its log-probability. Then one program turns those into losses, their means and the gradients of the
log-probabilities, always in the same order. If a token's gradient is 0, because the token is masked or clipped, its logits are
not read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_core.contract import implements
from liger_core.host.grpo_loss import GRPOLoss, GRPOLossKernels, GRPOResults, PolicyInputs, temperatures
from liger_core.host.rows import adjacent
from liger_core.ops.grpo_loss import grpo_loss
from liger_core.policy import PolicyOptions
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import exp_like, fast_exp, tempered
from liger_triton.ops._rows import power_of_2

GROUP_BYTES = 16
"""Bytes that a thread loads at once."""
FORWARD_BYTES, FORWARD_WARPS, FORWARD_STAGES = 16384, 8, 3
"""Bytes of its row that a program reads at once, the warps that read them, and how many such reads are in flight."""
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
TILE, TILE_WARPS = 2048, 16
"""Tokens that a program takes at once, between the two passes over the logits."""


@kernel(do_not_specialize=["length", "tokens"])
def _log_probabilities(
    state, logits, ids, mask, batch_stride, row_stride, columns, length, tokens, temperature, inverse,
    KEEP: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if mask is not None:
        masked = tl.load(mask + token) == 0
        if masked:
            return
    label = tl.load(ids + token)
    logits += (token // length).to(tl.int64) * batch_stride + (token % length).to(tl.int64) * row_stride
    known = (label >= 0) & (label < columns)
    label_logit = tl.load(logits + label, known, other=0.0).to(tl.float32)

    # A thread holds whole groups of columns, so each group has its own maximum and the loop exchanges nothing between threads.
    # If a thread can load a group at once, its columns are neighbours. Otherwise neighbouring threads load neighbouring columns.
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    maximum = tl.full([GROUPS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    group_step: tl.constexpr = GROUP if ALIGNED else 1
    step: tl.constexpr = 1 if ALIGNED else GROUPS
    lanes = tl.arange(0, GROUPS)[:, None] * group_step + tl.arange(0, GROUP)[None, :] * step
    for start in tl.range(0, columns, GROUPS * GROUP, num_stages=STAGES):
        column = start + lanes
        x = tl.load(logits + column, column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        terms = exp_like(tempered(x - higher[:, None], inverse), logits)
        total = total * fast_exp(tempered(maximum - higher, inverse)) + tl.sum(terms, axis=1)
        maximum = higher
    top = tl.max(maximum)
    depth = top - label_logit
    if temperature is not None:
        depth = tl.math.div_rn(depth, tl.cast(temperature, tl.float32))
    tl.store(state + token, tl.where(known, depth, float("nan")))
    tl.store(state + tokens + token, tl.sum(total * exp_like(tempered(maximum - top, inverse), logits)))
    if KEEP:
        tl.store(state + 2 * tokens + token, top)


@triton.jit
def _load_log_probability(state, tokens, at, used):
    """depth and log_sum, whose negative sum is the log-probability."""
    depth = tl.load(state + at, used, other=0.0)
    return depth, libdevice.log(tl.load(state + tokens + at, used, other=1.0))


@triton.jit
def _distance(depth, log_sum, others, at, used):
    """The log-probability minus the other one; if there is no other, minus itself."""
    if others is None:
        return (depth - depth) + (log_sum - log_sum)
    else:
        # In this order no intermediate result is as large as the log-probability: its rounding error would be in the ratio.
        return (-depth - tl.load(others + at, used, other=0.0).to(tl.float32)) - log_sum


@triton.jit
def _clipped(x, clip):
    """x within ±clip, and the x that are outside."""
    outside = tl.abs(x) > clip
    return tl.where(outside, tl.where(x > 0.0, clip, -clip), x), outside


@triton.jit
def _token_losses(
    lp, log_ratio, ref_distance, advantage, importance, beta, low, high, delta, clip, tau_positive, tau_negative,
    CISPO: tl.constexpr, SAPO: tl.constexpr, CORRECT_KL: tl.constexpr,
):  # fmt: skip
    """Loss, divergence, whether the token is clipped, and the loss's derivatives by lp alone and by the ratio's logarithm."""
    if clip is not None:
        clip = tl.cast(clip, tl.float32)
        log_ratio, ratio_clipped = _clipped(log_ratio, clip)
        ref_distance, ref_clipped = _clipped(ref_distance, clip)
    actual = libdevice.exp(log_ratio)
    # No infinite ratio is multiplied by an advantage or an importance of 0.
    ratio = tl.where((advantage * importance == 0.0) & (actual == float("inf")), 1.0, actual)
    if CISPO:
        by_lp = -tl.minimum(ratio, high, propagate_nan=tl.PropagateNan.ALL) * advantage * importance
        by_ratio = tl.zeros_like(ratio)
        loss = by_lp * lp
        clipped = (actual > high) & (advantage > 0.0)
    elif SAPO:
        tau = tl.where(advantage > 0.0, tl.cast(tau_positive, tl.float32), tl.cast(tau_negative, tl.float32))
        u = tau * (ratio - 1.0)
        q = libdevice.exp(-tl.abs(u))
        r = 1.0 / (1.0 + q)
        loss = -4.0 * advantage * tl.where(u < 0.0, q * r, r) / tau
        loss *= importance
        # The ratio may be infinite.
        by_ratio = -4.0 * advantage * tl.where(q == 0.0, 0.0, q * r * r * ratio) * importance
        by_lp = tl.zeros_like(ratio)
        clipped = ratio < 0.0
    else:
        limited, passes = ratio, 1.0
        if delta is not None:
            limited = tl.minimum(ratio, tl.cast(delta, tl.float32), propagate_nan=tl.PropagateNan.ALL)
            passes = tl.where(ratio <= delta, 1.0, 0.0)
        within = (ratio >= low) & (ratio <= high)
        gain = limited * advantage
        clipped_gain = tl.where(within, ratio, tl.where(ratio < low, low, high)) * advantage
        unclipped_passes = tl.where(within, 1.0, 0.0)
        loss = -tl.minimum(gain, clipped_gain, propagate_nan=tl.PropagateNan.ALL)
        tie = 0.5 * (passes + unclipped_passes)
        slope = tl.where(gain < clipped_gain, passes, tl.where(gain > clipped_gain, unclipped_passes, tie))
        loss *= importance
        # If it is clipped, the product would be 0 times infinity.
        by_ratio = tl.where(slope == 0.0, 0.0, -advantage * slope * importance * ratio)
        by_lp = tl.zeros_like(ratio)
        clipped = ((actual < low) & (advantage < 0.0)) | ((actual > high) & (advantage > 0.0))
    kl = tl.zeros_like(ratio)
    if beta is not None:
        beta = tl.cast(beta, tl.float32)
        growth = libdevice.expm1(ref_distance)
        kl = growth - ref_distance
        kl_by_lp = -growth
        if clip is not None:
            kl_by_lp = tl.where(ref_clipped, 0.0, kl_by_lp)
        if CORRECT_KL:
            kl *= actual
            kl_by_lp *= actual
            by_ratio += beta * kl
        loss += beta * kl
        by_lp += beta * kl_by_lp
    if clip is not None:
        by_ratio = tl.where(ratio_clipped, 0.0, by_ratio)
    return loss, kl, clipped, by_lp, by_ratio


@kernel(do_not_specialize=["rows", "length", "divisor"])
def _losses(
    loss, kl, clip, weights, state, old_logps, ref_logps, advantages, mask, importances, items, rows, length, divisor,
    beta, low, high, delta, log_ratio_clip, tau_positive, tau_negative,
    CISPO: tl.constexpr, SAPO: tl.constexpr, CORRECT_KL: tl.constexpr, ROW_RATIO: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    BY_TOKEN: tl.constexpr, KEEP: tl.constexpr, MEAN: tl.constexpr, ROW_MEAN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # If there is a mean, one program makes it, so the order of the sums is always the same.
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    tokens = tl.cast(rows, tl.int64) * length
    counted = tl.zeros([ROWS], tl.float32)
    loss_total = tl.zeros([ROWS], tl.float32)
    kl_total = tl.zeros([ROWS], tl.float32)
    clip_total = tl.zeros([ROWS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        row_inside = row < rows
        advantage = tl.load(advantages + row, row_inside, other=0.0).to(tl.float32)[:, None]
        first = (row.to(tl.int64) * length)[:, None]
        count = tl.zeros([ROWS], tl.float32)
        mean_log_ratio = tl.zeros([ROWS], tl.float32)
        if ROW_RATIO:
            for start in range(0, length, BLOCK):
                column = start + tl.arange(0, BLOCK)[None, :]
                counts = row_inside[:, None] & (column < length)
                if mask is not None:
                    counts &= tl.load(mask + first + column, counts, other=0) != 0
                depth, log_sum = _load_log_probability(state, tokens, first + column, counts)
                log_ratio = _distance(depth, log_sum, old_logps, first + column, counts)
                count += tl.sum(tl.where(counts, 1.0, 0.0), 1)
                mean_log_ratio += tl.sum(tl.where(counts, log_ratio, 0.0), 1)
            mean_log_ratio = tl.math.div_rn(mean_log_ratio, tl.maximum(count, 1.0))
        per_token = (1.0 / tl.maximum(count, 1.0))[:, None]
        count = tl.zeros([ROWS], tl.float32)
        row_loss = tl.zeros([ROWS], tl.float32)
        row_kl = tl.zeros([ROWS], tl.float32)
        row_clip = tl.zeros([ROWS], tl.float32)
        for start in range(0, length, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            at = first + column
            inside = row_inside[:, None] & (column < length)
            counts = inside
            if mask is not None:
                counts = inside & (tl.load(mask + at, inside, other=0) != 0)
            depth, log_sum = _load_log_probability(state, tokens, at, counts)
            if ROW_RATIO:
                log_ratio = tl.where(inside, mean_log_ratio[:, None], 0.0)
            else:
                log_ratio = _distance(depth, log_sum, old_logps, at, counts)
            ref_distance = -_distance(depth, log_sum, ref_logps, at, counts)
            importance = 1.0
            if importances is not None:
                if BY_TOKEN:
                    importance = tl.load(importances + at, counts, other=0.0).to(tl.float32)
                else:
                    importance = tl.load(importances + row, row_inside, other=0.0).to(tl.float32)[:, None]
            token_loss, token_kl, clipped, by_lp, by_ratio = _token_losses(
                -depth - log_sum, log_ratio, ref_distance, advantage, importance,
                beta, low, high, delta, log_ratio_clip, tau_positive, tau_negative, CISPO, SAPO, CORRECT_KL,
            )  # fmt: skip
            token_loss = tl.where(counts, token_loss, 0.0)
            token_kl = tl.where(counts, token_kl, 0.0)
            token_clip = tl.where(counts & clipped, 1.0, 0.0)
            if KEEP:
                if BY_SEQUENCE:
                    by_ratio = tl.where(counts, by_ratio * per_token, 0.0)
                    tl.store(state + 4 * tokens + at, by_ratio, inside)
                else:
                    by_lp += by_ratio
                tl.store(state + 3 * tokens + at, tl.where(counts, by_lp, 0.0), inside)
            if MEAN:
                count += tl.sum(tl.where(counts, 1.0, 0.0), 1)
                row_loss += tl.sum(token_loss, 1)
                row_kl += tl.sum(token_kl, 1)
                row_clip += tl.sum(token_clip, 1)
            else:
                tl.store(loss + at, token_loss, inside)
                tl.store(clip + at, token_clip, inside)
                if beta is not None:
                    tl.store(kl + at, token_kl, inside)
        if MEAN:
            if ROW_MEAN:
                row_loss = tl.math.div_rn(row_loss, tl.maximum(count, 1.0))
                if weights is not None:
                    weight = tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.maximum(count, 1.0) * rows)
                    tl.store(weights + row, weight, row_inside)
            if BY_SEQUENCE:
                row_clip = tl.minimum(row_clip, 1.0)
            counted += count
            loss_total += row_loss
            kl_total += row_kl
            clip_total += row_clip
    if MEAN:
        token_count = tl.maximum(tl.sum(counted), 1.0)
        losses_divisor = token_count
        if items is not None:
            losses_divisor = tl.load(items).to(tl.float32)
        elif divisor is not None:
            losses_divisor = tl.cast(divisor, tl.float32)
        losses_divisor = tl.maximum(losses_divisor, 1.0)
        tl.store(loss, tl.math.div_rn(tl.sum(loss_total), losses_divisor))
        clip_divisor = tl.cast(rows, tl.float32) if BY_SEQUENCE else token_count
        tl.store(clip, tl.math.div_rn(tl.sum(clip_total), clip_divisor))
        if beta is not None:
            tl.store(kl, tl.math.div_rn(tl.sum(kl_total), token_count))
        if weights is not None and not ROW_MEAN:
            tl.store(weights, tl.math.div_rn(tl.full([], 1.0, tl.float32), losses_divisor))


@triton.jit
def _scale_of(dloss, weights, batch, place, weight_stride, dloss_batch_stride, dloss_stride, wanted):
    """The gradient of a token's loss, including its weight in the mean."""
    scale = tl.load(dloss + batch * dloss_batch_stride + place * dloss_stride, wanted)
    if weights is not None:
        scale *= tl.load(weights + batch * weight_stride, wanted)
    return scale


@kernel(do_not_specialize=["rows", "length"])
def _sequence_coefficients(
    coefficients, state, mask, weights, dloss, rows, length, weight_stride, dloss_batch_stride, dloss_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the log-probabilities, if each of them is in the ratio of its whole row."""
    tokens = tl.cast(rows, tl.int64) * length
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    through_ratio = tl.zeros([ROWS], tl.float32)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        at = row * length + column
        inside = (row < rows) & (column < length)
        counts = inside
        if mask is not None:
            counts = inside & (tl.load(mask + at, inside, other=0) != 0)
        scale = _scale_of(dloss, weights, row, column, weight_stride, dloss_batch_stride, dloss_stride, counts)
        through_ratio += tl.sum(tl.where(counts, scale * tl.load(state + 4 * tokens + at, counts), 0.0), 1)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        at = row * length + column
        inside = (row < rows) & (column < length)
        counts = inside
        if mask is not None:
            counts = inside & (tl.load(mask + at, inside, other=0) != 0)
        scale = _scale_of(dloss, weights, row, column, weight_stride, dloss_batch_stride, dloss_stride, counts)
        coefficient = scale * tl.load(state + 3 * tokens + at, counts) + through_ratio[:, None]
        coefficient = tl.where(counts, coefficient, 0.0)
        tl.store(coefficients + at, coefficient, inside)


@kernel(do_not_specialize=["rows", "length"])
def _gradient(
    dlogits, logits, ids, state, coefficients, weights, dloss, batch_stride, row_stride, weight_stride,
    dloss_batch_stride, dloss_stride, columns, rows, length, inverse, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    position = tl.program_id(0) // blocks
    batch = (position // (length + 1)).to(tl.int64)
    place = position % (length + 1)
    tokens = tl.cast(rows, tl.int64) * length
    token = batch * length + place
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dlogits += position.to(tl.int64) * columns
    if coefficients is None:
        coefficient = tl.load(state + 3 * tokens + token, place < length, other=0.0)
    else:
        coefficient = tl.load(coefficients + token, place < length, other=0.0)
    if coefficient == 0.0:
        tl.store(dlogits + column, tl.zeros([BLOCK], tl.float32), inside)
        return

    logits += batch * batch_stride + place.to(tl.int64) * row_stride
    x = tl.load(logits + column, inside, other=0.0).to(tl.float32)
    exp_sum = tl.load(state + tokens + token)
    top = tl.load(state + 2 * tokens + token)
    if coefficients is None:
        # Positions without a token have returned already.
        coefficient *= _scale_of(dloss, weights, batch, place, weight_stride, dloss_batch_stride, dloss_stride, None)
    coefficient = tempered(coefficient, inverse)
    probability = exp_like(tempered(x - top, inverse), logits) * (1.0 / exp_sum)
    label = tl.load(ids + token)
    # Not one minus the probability: an infinite coefficient gives the label's logit NaN, as PyTorch does.
    of_label = tl.where(column == label, coefficient, 0.0)
    tl.store(dlogits + column, tl.fma(-coefficient, probability, of_label), inside)


class TritonGRPOLoss(GRPOLossKernels):
    def forward(
        self, state: Tensor, logits: Tensor, inputs: PolicyInputs, temperature: float, options: PolicyOptions
    ) -> GRPOResults:
        keep, mean = state.shape[0] > 2, options.reduction == "mean"
        (rows, length), columns = inputs.ids.shape, logits.shape[2]
        inputs = inputs.contiguous()
        if length > 0:
            x, (batch_stride, row_stride, _) = adjacent(logits)
            size = x.element_size()
            block = power_of_2(columns)
            block = min(block, FORWARD_BYTES // size)
            group = GROUP_BYTES // size
            _log_probabilities[(rows * length,)](
                state, x, inputs.ids, inputs.mask, batch_stride, row_stride, columns, length,
                rows * length, *temperatures(temperature),
                KEEP=keep, ALIGNED=batch_stride % 16 == 0 and row_stride % 16 == 0 and columns % 16 == 0,
                GROUPS=block // group, GROUP=group, STAGES=FORWARD_STAGES,
                num_warps=max(block * size * FORWARD_WARPS // FORWARD_BYTES, 1),
            )  # fmt: skip

        results = GRPOResults.empty(state, options, options.means_rows())
        loss_type, items = options.loss_type, None if inputs.items is None else inputs.items.to(logits.device)
        tile_rows, block = _tile_of(length)
        _losses[(1 if mean else (rows + tile_rows - 1) // tile_rows,)](
            *results, state, inputs.old_logps, inputs.ref_logps, inputs.advantages, inputs.mask, inputs.importances, items,
            rows, length, inputs.divisor(options), options.beta or None, *options.ratios(), options.delta,
            options.log_ratio_clip, options.sapo_temperature_pos, options.sapo_temperature_neg,
            CISPO=loss_type == "cispo", SAPO=loss_type == "sapo", CORRECT_KL=options.use_bias_correction_kl,
            ROW_RATIO=options.row_ratio(), BY_SEQUENCE=options.by_sequence(), BY_TOKEN=inputs.weighs_tokens(),
            KEEP=keep, MEAN=mean, ROW_MEAN=options.means_rows(), ROWS=tile_rows, BLOCK=block, num_warps=TILE_WARPS,
        )  # fmt: skip
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
        (rows, length), columns = ids.shape, logits.shape[2]
        dloss_strides = dloss.stride() if dloss.dim() else (0, 0)
        weight_stride = 1 if weights is not None and weights.shape[0] > 1 else 0
        coefficients = None
        if options.by_sequence():
            coefficients = torch.empty_like(state[0])
            tile_rows, block = _tile_of(length)
            _sequence_coefficients[((rows + tile_rows - 1) // tile_rows,)](
                coefficients, state, None if mask is None else mask.contiguous(), weights, dloss, rows, length,
                weight_stride, *dloss_strides,
                ROWS=tile_rows, BLOCK=block, num_warps=TILE_WARPS,
            )  # fmt: skip
        x, (batch_stride, row_stride, _) = adjacent(logits)
        block = min(power_of_2(columns), GRADIENT_BLOCK)
        blocks = (columns + block - 1) // block
        _gradient[(rows * (length + 1) * blocks,)](
            dlogits, x, ids.contiguous(), state, coefficients, weights, dloss, batch_stride, row_stride, weight_stride,
            *dloss_strides, columns, rows, length, temperatures(temperature)[1],
            BLOCK=block, num_warps=max(block * GRADIENT_WARPS // GRADIENT_BLOCK, 1),
        )  # fmt: skip


def _tile_of(length: int) -> tuple[int, int]:
    block = min(power_of_2(length), TILE)
    return TILE // block, block


host = GRPOLoss(TritonGRPOLoss())
forward = implements(grpo_loss)(host.forward)
backward = host.backward
