"""GRPO's losses: forward and backward read the logits once each. Between them there are only a few numbers per token.

Each program finds the log-probabilities of one token after another: a row of logits seldom fits the Unified Buffer. Then rows of
tokens become losses, their sums, and the gradients of the log-probabilities. PyTorch makes means of the sums. If a token's
gradient is 0, because the token is masked or clipped, its logits are not read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.contract import implements
from liger_core.host.grpo_loss import GRPOLoss, GRPOLossKernels, GRPOResults, PolicyInputs, temperatures
from liger_core.host.rows import adjacent
from liger_core.ops.grpo_loss import grpo_loss
from liger_core.policy import PolicyOptions
from liger_triton_ascend.ops._math import LANES, tempered, top_and_sum
from liger_triton_ascend.ops._rows import long_row_blocks

# Float32 tiles alive, by the estimate.
FORWARD_TILES = 4.5
LOSS_TILES = 14
BACKWARD_TILES = 7


@triton.jit
def _log_probabilities(
    state, logits, ids, mask, batch_stride, row_stride, columns, length, tokens, temperature, inverse,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = (
            logits + tl.cast(token // length, tl.int64) * batch_stride + tl.cast(token % length, tl.int64) * row_stride
        )
        label = tl.load(ids + token)
        known = (label >= 0) & (label < columns)
        label_logit = tl.load(row + tl.minimum(tl.maximum(label, 0), columns - 1)).to(tl.float32)
        end = columns
        if mask is not None:
            end = tl.where(tl.load(mask + token) == 0.0, 0, columns)  # a masked token is not read
        top, exp_sum = top_and_sum(row, end, inverse, BLOCK, LANES)
        depth = top - label_logit
        if temperature is not None:
            depth /= temperature
        tl.store(state + token, tl.where(known, depth, float("nan")))
        tl.store(state + tokens + token, exp_sum)
        if KEEP:
            tl.store(state + 2 * tokens + token, top)


@triton.jit
def _load(x, at, inside, used):
    """x if it is used, otherwise 0: a masked value may be NaN."""
    return tl.where(used, tl.load(x + at, inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _load_log_probability(state, tokens, at, inside, used):
    """depth and log_sum, whose negative sum is the log-probability."""
    exp_sum = tl.where(used, tl.load(state + tokens + at, inside, other=1.0), 1.0)
    return _load(state, at, inside, used), tl.log(exp_sum)


@triton.jit
def _distance(depth, log_sum, others, at, inside, used):
    """The log-probability minus the other one; if there is no other, minus itself."""
    if others is None:
        return (depth - depth) + (log_sum - log_sum)
    else:
        # In this order no intermediate result is as large as the log-probability: its rounding error would be in the ratio.
        return (-depth - _load(others, at, inside, used)) - log_sum


@triton.jit
def _growth(x):
    """exp(x) − 1. Near 0 its digits are the divergence's, so a series gives it there."""
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * 0.0013888889)))))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1.0)


@triton.jit
def _clipped(x, clip):
    """x within ±clip, and the x that are outside."""
    outside = tl.abs(x) > clip
    return tl.where(outside, tl.where(x > 0.0, clip, -clip), x), outside


@triton.jit
def _token_losses(
    lp, log_ratio, ref_distance, advantage, importance, beta, low, high, delta, clip, tau,
    CISPO: tl.constexpr, SAPO: tl.constexpr, CORRECT_KL: tl.constexpr,
):  # fmt: skip
    """Loss, divergence, whether the token is clipped, and the loss's derivatives by lp alone and by the ratio's logarithm."""
    if clip is not None:
        log_ratio, ratio_clipped = _clipped(log_ratio, clip)
        ref_distance, ref_clipped = _clipped(ref_distance, clip)
    actual = tl.exp(log_ratio)
    # No infinite ratio is multiplied by an advantage or an importance of 0.
    ratio = tl.where((advantage * importance == 0.0) & (actual == float("inf")), 1.0, actual)
    if CISPO:
        by_lp = -tl.minimum(ratio, high, propagate_nan=tl.PropagateNan.ALL) * advantage * importance
        by_ratio = tl.zeros_like(ratio)
        loss = by_lp * lp
        clipped = (actual > high) & (advantage > 0.0)
    elif SAPO:
        u = tau * (ratio - 1.0)
        q = tl.exp(-tl.abs(u))
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
            limited = tl.minimum(ratio, delta, propagate_nan=tl.PropagateNan.ALL)
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
        growth = _growth(ref_distance)
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


@triton.jit
def _losses(
    loss, kl, clip, sums, state, old_logps, ref_logps, advantages, mask, importances, rows, length,
    beta, low, high, delta, log_ratio_clip, tau_positive, tau_negative,
    CISPO: tl.constexpr, SAPO: tl.constexpr, CORRECT_KL: tl.constexpr, ROW_RATIO: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    BY_TOKEN: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the losses of all tokens of a row, or add them up in `sums` with divergences, clips and tokens that count."""
    tokens = tl.cast(rows, tl.int64) * length
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        first = tl.cast(row, tl.int64) * length
        advantage = tl.load(advantages + row).to(tl.float32)
        tau = tl.where(advantage > 0.0, tau_positive, tau_negative)
        per_token = 1.0
        if ROW_RATIO:
            counted = tl.zeros((BLOCK,), tl.float32)
            log_ratios = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, length, BLOCK):
                column = start + lane
                inside = column < length
                counts = inside
                if mask is not None:
                    counts = tl.load(mask + first + column, inside, other=0.0) != 0.0
                depth, log_sum = _load_log_probability(state, tokens, first + column, inside, counts)
                counted += tl.where(counts, 1.0, 0.0)
                log_ratios += _distance(depth, log_sum, old_logps, first + column, inside, counts)
            per_token = 1.0 / tl.maximum(tl.sum(counted, 0), 1.0)
            mean_log_ratio = tl.sum(log_ratios, 0) / tl.maximum(tl.sum(counted, 0), 1.0)
        row_count = tl.zeros((BLOCK,), tl.float32)
        row_loss = tl.zeros((BLOCK,), tl.float32)
        row_kl = tl.zeros((BLOCK,), tl.float32)
        row_clip = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, length, BLOCK):
            column = start + lane
            at = first + column
            inside = column < length
            counts = inside
            if mask is not None:
                counts = tl.load(mask + at, inside, other=0.0) != 0.0
            depth, log_sum = _load_log_probability(state, tokens, at, inside, counts)
            if ROW_RATIO:
                log_ratio = tl.where(inside, mean_log_ratio, 0.0)
            else:
                log_ratio = _distance(depth, log_sum, old_logps, at, inside, counts)
            ref_distance = -_distance(depth, log_sum, ref_logps, at, inside, counts)
            importance = 1.0
            if BY_TOKEN:
                importance = _load(importances, at, inside, counts)
            elif importances is not None:
                importance = tl.load(importances + row).to(tl.float32)
            token_loss, token_kl, clipped, by_lp, by_ratio = _token_losses(
                -depth - log_sum, log_ratio, ref_distance, advantage, importance,
                beta, low, high, delta, log_ratio_clip, tau, CISPO, SAPO, CORRECT_KL,
            )  # fmt: skip
            token_loss = tl.where(counts, token_loss, 0.0)
            token_kl = tl.where(counts, token_kl, 0.0)
            token_clip = tl.where(counts & clipped, 1.0, 0.0)
            if KEEP:
                if BY_SEQUENCE:
                    tl.store(state + 4 * tokens + at, tl.where(counts, by_ratio * per_token, 0.0), inside)
                else:
                    by_lp += by_ratio
                tl.store(state + 3 * tokens + at, tl.where(counts, by_lp, 0.0), inside)
            if sums is None:
                tl.store(loss + at, token_loss, inside)
                tl.store(clip + at, token_clip, inside)
                if beta is not None:
                    tl.store(kl + at, token_kl, inside)
            else:
                row_count += tl.where(counts, 1.0, 0.0)
                row_loss += token_loss
                row_kl += token_kl
                row_clip += token_clip
        if sums is not None:
            tl.store(sums + row, tl.sum(row_loss, 0))
            tl.store(sums + rows + row, tl.sum(row_kl, 0))
            tl.store(sums + 2 * rows + row, tl.sum(row_clip, 0))
            tl.store(sums + 3 * rows + row, tl.sum(row_count, 0))


@triton.jit
def _gradient(
    dlogits, logits, ids, state, coefficients, batch_stride, row_stride, columns, rows, length, inverse,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    tokens = tl.cast(rows, tl.int64) * length
    for position in range(tl.program_id(0), rows * (length + 1), tl.num_programs(0)):
        batch = tl.cast(position // (length + 1), tl.int64)
        place = tl.cast(position % (length + 1), tl.int64)
        x_row = logits + batch * batch_stride + place * row_stride
        dx_row = dlogits + tl.cast(position, tl.int64) * columns
        coefficient = tl.load(coefficients + position)
        end = tl.where(coefficient == 0.0, 0, columns)
        token = tl.minimum(batch * length + place, tokens - 1)  # a last position has no token: it takes any
        top = tl.load(state + 2 * tokens + token)
        inverse_sum = 1.0 / tl.load(state + tokens + token)
        label = tl.minimum(tl.load(ids + token), columns).to(tl.int32)
        coefficient = tempered(coefficient, inverse)
        for start in range(0, end, BLOCK):
            column = start + lane
            inside = column < columns
            x = tl.load(x_row + column, inside, other=0.0).to(tl.float32)
            probability = tl.exp(tempered(x - top, inverse)) * inverse_sum
            # Not one minus the probability: an infinite coefficient gives the label's logit NaN, as PyTorch does.
            of_label = tl.where(lane == label - start, coefficient, 0.0)
            tl.store(dx_row + column, of_label - coefficient * probability, inside)
        for start in range(end, columns, BLOCK):  # the whole row, or nothing
            tl.store(dx_row + start + lane, tl.zeros((BLOCK,), tl.float32), start + lane < columns)


def _weights(row_tokens: Tensor, inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    """The weight in the mean of the sum of a row's losses: one per row, or one for all.

    Args:
        row_tokens: tokens of each row that count.
    """
    divisor = inputs.divisor(options)
    if options.means_rows():
        return 1.0 / (row_tokens.clamp(min=1.0) * divisor)
    if inputs.items is not None:
        return 1.0 / inputs.items.to(row_tokens.device, torch.float32).clamp(min=1.0)
    if divisor is None:
        return 1.0 / row_tokens.sum().clamp(min=1.0)
    return torch.full_like(row_tokens[:1], 1.0 / max(divisor, 1))


class AscendGRPOLoss(GRPOLossKernels):
    def forward(
        self, state: Tensor, logits: Tensor, inputs: PolicyInputs, temperature: float, options: PolicyOptions
    ) -> GRPOResults:
        keep, loss_type = state.shape[0] > 2, options.loss_type
        (rows, length), columns = inputs.ids.shape, logits.shape[2]
        inputs = inputs.contiguous()
        mask = None if inputs.mask is None else (inputs.mask != 0).float()
        if length > 0:
            x, (batch_stride, row_stride, _) = adjacent(logits)
            programs, block = long_row_blocks(x, rows * length, columns, FORWARD_TILES)
            _log_probabilities[(programs,)](
                state, x, inputs.ids, mask, batch_stride, row_stride, columns, length,
                rows * length, *temperatures(temperature), KEEP=keep, BLOCK=block, LANES=min(block, LANES),
            )  # fmt: skip

        loss = kl = clip = sums = None
        if options.reduction == "mean":
            sums = state.new_empty((4, rows))
        else:
            loss, kl, clip, _ = GRPOResults.empty(state, options, True)
        programs, block = long_row_blocks(state, rows, length, LOSS_TILES)
        _losses[(programs,)](
            loss, kl, clip, sums, state, inputs.old_logps, inputs.ref_logps, inputs.advantages, mask, inputs.importances,
            rows, length, options.beta or None, *options.ratios(), options.delta,
            options.log_ratio_clip, options.sapo_temperature_pos, options.sapo_temperature_neg,
            CISPO=loss_type == "cispo", SAPO=loss_type == "sapo", CORRECT_KL=options.use_bias_correction_kl,
            ROW_RATIO=options.row_ratio(), BY_SEQUENCE=options.by_sequence(), BY_TOKEN=inputs.weighs_tokens(),
            KEEP=keep, BLOCK=block,
        )  # fmt: skip
        if sums is None:
            return GRPOResults(loss, kl, clip, None)
        row_loss, row_kl, row_clip, row_tokens = sums
        weights = _weights(row_tokens, inputs, options)
        tokens = row_tokens.sum().clamp(min=1.0)
        return GRPOResults(
            (row_loss * weights).sum(),
            None if options.beta == 0 else row_kl.sum() / tokens,
            row_clip.clamp(max=1.0).sum() / rows if options.by_sequence() else row_clip.sum() / tokens,
            weights,
        )

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
        if length == 0:
            dlogits.zero_()
            return
        # The gradient of each token's loss, including its weight in the mean.
        scale = dloss if weights is None else (dloss * weights).expand(rows)[:, None]
        coefficients = torch.zeros((rows, length + 1), dtype=torch.float32, device=logits.device)
        torch.mul(scale, state[3], out=coefficients[:, :length])
        if options.by_sequence():
            # Each token is in the ratio of its whole row.
            through_ratio = (scale * state[4]).sum(1, keepdim=True)
            coefficients[:, :length] += through_ratio if mask is None else through_ratio * (mask != 0)
        x, (batch_stride, row_stride, _) = adjacent(logits)
        programs, block = long_row_blocks(x, rows * (length + 1), columns, BACKWARD_TILES)
        _gradient[(programs,)](
            dlogits, x, ids.contiguous(), state, coefficients, batch_stride, row_stride, columns, rows, length,
            temperatures(temperature)[1], BLOCK=block,
        )  # fmt: skip


host = GRPOLoss(AscendGRPOLoss())
forward = implements(grpo_loss)(host.forward)
backward = host.backward
