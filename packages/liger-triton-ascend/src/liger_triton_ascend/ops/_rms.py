"""RMS normalisation of a row, rounded as `rms_norm` does in each of its modes."""

import triton
import triton.language as tl


@triton.jit
def rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    """A float32 value, rounded to `dtype` if ROUND."""
    return value.to(dtype).to(tl.float32) if ROUND else value


@triton.jit
def square(xs, NATIVE: tl.constexpr):
    wide = xs.to(tl.float32)
    return rounded(wide * wide, xs.dtype, NATIVE)


@triton.jit
def inverse_rms_of(sum_of_squares, columns, eps, dtype: tl.constexpr, NATIVE: tl.constexpr):
    mean = rounded(sum_of_squares / columns, dtype, NATIVE)
    return rounded(tl.rsqrt(rounded(mean + eps, dtype, NATIVE)), dtype, NATIVE)


@triton.jit
def load_scale(weight, column, inside, offset, NATIVE: tl.constexpr):
    """offset + weight."""
    return rounded(offset + tl.load(weight + column, inside, other=0.0).to(tl.float32), weight.dtype.element_ty, NATIVE)
