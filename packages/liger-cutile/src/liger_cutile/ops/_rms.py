"""RMS normalisation of a row, rounded as `rms_norm` does in each of its modes."""

import cuda.tile as ct

from liger_cutile.ops._launch import given
from liger_cutile.ops._rows import load_vector


@ct.function
def rounded(value, dtype, ROUND):
    """A float32 value, rounded to `dtype` if ROUND."""
    return ct.astype(ct.astype(value, dtype), ct.float32) if ROUND else value


@ct.function
def inverse_rms_of(sum_of_squares, columns, eps, dtype, NATIVE):
    mean = rounded(sum_of_squares / columns, dtype, NATIVE)
    return rounded(ct.rsqrt(rounded(mean + eps, dtype, NATIVE)), dtype, NATIVE)


@ct.function
def load_weight(weight, column, BLOCK, INSIDE):
    return load_vector(weight, column, BLOCK, INSIDE) if given(weight) else weight


@ct.function
def scaled(xs, r, weight, weights, offset, dtype, ROUND, NATIVE):
    """x · r · (offset + weight), for a tile of the weight."""
    y = xs * r
    if given(weight):
        scale = rounded(ct.astype(weights, ct.float32) + offset, weight.dtype, NATIVE)
        y = rounded(y, dtype, ROUND) * scale
    return ct.astype(y, dtype)


@ct.function
def unscaled(dys, weight, weights, offset):
    """The gradient of x · r, for a tile of the weight."""
    return dys * (ct.astype(weights, ct.float32) + offset) if given(weight) else dys
