"""Float32 exponentials, as accurate as the dtype of the result needs."""

import cuda.tile as ct

LOG2_E = 1.4426950408889634


@ct.function
def exp_like(x, array):
    """e^x. For a 16-bit array it takes three instructions instead of eight, with an error of 1e-7 · (1 + |x|)."""
    if array.dtype == ct.float32:
        return ct.exp(x)
    else:
        return ct.exp2(x * LOG2_E, flush_to_zero=True)
