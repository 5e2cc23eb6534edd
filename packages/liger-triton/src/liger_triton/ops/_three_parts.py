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
def _split(a):
    """Three bfloat16 numbers whose sum is the float32 number, the largest first."""
    high, rest = _cut(a)
    middle, rest = _cut(rest)
    low, _ = _cut(rest)
    return high, middle, low


@triton.jit
def product(a, b, total, ROUGH: tl.constexpr = False):
    """total + a · b, for float32, bfloat16 or float16 matrices, as exact as in float32. ROUGH: to a relative 2⁻¹⁶.

    Tensor cores truncate at each step of a sum. So each call's sum starts at zero and is added to `total` with rounding. The
    smallest products are added up first.
    """
    nothing = total * 0.0  # a zero that the compiler doesn't know: otherwise it would start at `total`
    if a.dtype == tl.bfloat16:
        if b.dtype == tl.bfloat16:
            return total + tl.dot(a, b, nothing)
        else:
            high, middle, low = _split(b.to(tl.float32))
            if ROUGH:
                return total + tl.dot(a, high, tl.dot(a, middle, nothing))
            else:
                return total + tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, nothing)))
    elif b.dtype == tl.bfloat16:
        high, middle, low = _split(a.to(tl.float32))
        if ROUGH:
            return total + tl.dot(high, b, tl.dot(middle, b, nothing))
        else:
            return total + tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b, nothing)))
    else:
        a_high, a_middle, a_low = _split(a.to(tl.float32))
        b_high, b_middle, b_low = _split(b.to(tl.float32))
        sums = nothing
        if not ROUGH:
            sums = tl.dot(a_low, b_high, tl.dot(a_high, b_low, tl.dot(a_middle, b_middle, sums)))
        return total + tl.dot(a_high, b_high, tl.dot(a_middle, b_high, tl.dot(a_high, b_middle, sums)))
