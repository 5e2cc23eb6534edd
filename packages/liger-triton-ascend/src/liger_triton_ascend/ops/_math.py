"""Functions of values in kernels: a softcap, comparisons, and sums of exponentials of rows longer than the Unified Buffer.

For such a sum, a block of a row is folded to a number of lanes. Each lane keeps its own maximum, and a sum relative to it. So the
loop over blocks exchanges nothing between lanes, and a lane's sum is rescaled once per block, for all its elements there.
"""

import triton
import triton.language as tl

LANES = 1024
"""4 KiB of float32: the lanes' maxima and sums take little beside the tiles of 4096 or 8192 that are folded to them."""


@triton.jit
def ones_below(index, bound):
    """1 if index < bound, else 0. They are compared as floats: the vector unit would compare integers one by one."""
    return (index.to(tl.float32) < bound).to(tl.float32)


@triton.jit
def expm1_near(x):
    """exp(x) − 1, for x from −0.25 to 0.25."""
    series = x * (0.008333334 + x * 0.0013888889)
    return x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + series))))


@triton.jit
def cap(x, softcap):
    """softcap · tanh(x / softcap), and its derivative; x and 1 without a softcap."""
    if softcap is None:
        return x, 1.0
    else:
        u = x / softcap
        q = tl.exp(-2.0 * tl.abs(u))
        r = 1.0 / (1.0 + q)
        # Near 0 no digit of `tail` is correct. The polynomial is a minimax fit of (tanh(u) - u) / u³.
        square = u * u
        series = 0.020639074966311455 - 0.005704974289983511 * square
        series = series * square - 0.05373971164226532
        series = series * square + 0.13331441581249237
        series = series * square - 0.3333328068256378
        series = series * square * u + u
        tail = 1.0 - 2.0 * q * r
        near = tl.abs(u) < 0.625
        tanh = tl.where(near, series, tl.where(u < 0.0, -tail, tail))
        return softcap * tanh, tl.where(near, 1.0 - series * series, 4.0 * q * r * r)


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
