"""Float32 matrix products on bfloat16 tensor cores: each operand is the sum of three bfloat16 numbers."""

import triton
import triton.language as tl


@triton.jit
def _cut(a):
    """The first eight bits of each float32's fraction, as bfloat16, and the exact rest.

    It cuts instead of rounding, because rounding takes a conversion, and a multiprocessor does only 16 of those per cycle
    (sm_90).
    """
    bits = a.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, a - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def split(a):
    """Three bfloat16 tensors whose sum is a, the largest first. A bfloat16 tensor gives one."""
    if a.dtype == tl.bfloat16:
        return (a,)
    else:
        high, rest = _cut(a.to(tl.float32))
        middle, rest = _cut(rest)
        low, _ = _cut(rest)
        return high, middle, low


@triton.jit
def product(a, b, total, ROUGH: tl.constexpr = False):
    """total + a · b, where a and b are the parts of a matrix, as exact as in float32. ROUGH: to a relative 2⁻¹⁶.

    Tensor cores truncate at each step of a sum. So each call's sum starts at zero and is added to `total` with rounding. The
    smallest products are added up first.
    """
    sums = total * 0.0  # a zero that the compiler doesn't know: otherwise it would start at `total`
    if len(a) == 1 and len(b) == 1:
        return total + tl.dot(a[0], b[0], sums)
    elif len(a) == 1:
        if not ROUGH:
            sums = tl.dot(a[0], b[2], sums)
        return total + tl.dot(a[0], b[0], tl.dot(a[0], b[1], sums))
    elif len(b) == 1:
        if not ROUGH:
            sums = tl.dot(a[2], b[0], sums)
        return total + tl.dot(a[0], b[0], tl.dot(a[1], b[0], sums))
    else:
        if not ROUGH:
            sums = tl.dot(a[2], b[0], tl.dot(a[0], b[2], tl.dot(a[1], b[1], sums)))
        return total + tl.dot(a[0], b[0], tl.dot(a[1], b[0], tl.dot(a[0], b[1], sums)))
