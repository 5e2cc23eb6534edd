"""Sums of exponentials of rows longer than the Unified Buffer.

A block of a row is folded to a number of lanes. Each lane keeps its own maximum, and a sum relative to it. So the loop over
blocks exchanges nothing between lanes, and a lane's sum is rescaled once per block, for all its elements there.
"""

import triton
import triton.language as tl

LANES = 1024
"""4 KiB of float32: the lanes' maxima and sums take little beside the tiles of 4096 or 8192 that are folded to them."""


@triton.jit
def tempered(x, scale):
    """x · scale, for a difference of logits: its rounding is then relative to the difference, not to the logits."""
    return x if scale is None else x * scale


@triton.jit
def no_exponentials(LANES: tl.constexpr):
    """The lanes' maxima and sums before the first block."""
    # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
    return tl.full((LANES,), -3.4028234663852886e38, tl.float32), tl.zeros((LANES,), tl.float32)


@triton.jit
def add_exponentials(maximum, total, xs, scale):
    """The lanes' maxima and sums with another block in them. Each lane takes a column of `xs`."""
    higher = tl.maximum(maximum, tl.max(xs, 0))
    total = total * tl.exp(tempered(maximum - higher, scale))
    return higher, total + tl.sum(tl.exp(tempered(xs - higher[None, :], scale)), 0)


@triton.jit
def top_and_sum(row, columns, scale, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The largest element of a row, and Σ exp(scale · (x − largest)). A `scale` of None is 1."""
    lane = tl.arange(0, BLOCK)
    maximum, total = no_exponentials(LANES)
    for start in range(0, columns, BLOCK):
        xs = tl.load(row + start + lane, start + lane < columns, other=float("-inf")).to(tl.float32)
        maximum, total = add_exponentials(maximum, total, tl.reshape(xs, (BLOCK // LANES, LANES)), scale)
    top = tl.max(maximum, 0)
    return top, tl.sum(total * tl.exp(tempered(maximum - top, scale)), 0)
