"""RMS normalisation of a row, rounded as `rms_norm` does in each of its modes."""

import triton
import triton.language as tl

from liger_triton.ops._sums import multiply


@triton.jit
def rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    """A float32 value, rounded to `dtype` if ROUND."""
    return value.to(dtype).to(tl.float32) if ROUND else value


@triton.jit
def square(xs, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    wide = xs.to(tl.float32)
    return rounded(multiply(wide, wide, BLOCK), xs.dtype, NATIVE)


@triton.jit
def inverse_rms_of(sum_of_squares, columns, eps, dtype: tl.constexpr, NATIVE: tl.constexpr):
    mean = rounded(sum_of_squares / columns, dtype, NATIVE)
    # torch.compile passes floats as float64.
    return rounded(tl.rsqrt(rounded(mean + tl.cast(eps, tl.float32), dtype, NATIVE)), dtype, NATIVE)


@triton.jit
def load_scale(weight, column, inside, offset):
    return tl.cast(offset, tl.float32) + tl.load(weight + column, inside, other=0.0).to(tl.float32)


@triton.jit
def scaled(xs, r, ws, offset, ROUND: tl.constexpr, NATIVE: tl.constexpr):
    """x · r · (offset + weight)."""
    y = xs.to(tl.float32) * r
    if ws is not None:
        scale = rounded(tl.cast(offset, tl.float32) + ws.to(tl.float32), ws.dtype, NATIVE)
        y = rounded(y, xs.dtype, ROUND) * scale
    return y
