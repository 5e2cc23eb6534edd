"""Float32 matrix products on bfloat16 tensor cores: each operand is the sum of three bfloat16 numbers.

For float32 tiles, `ct.mma` doesn't use tensor cores.
"""

import cuda.tile as ct


@ct.function
def split(a):
    """Three bfloat16 tiles whose sum is the tile, the largest first. A bfloat16 tile gives one."""
    if a.dtype == ct.bfloat16:
        return (a,)
    else:
        wide = ct.astype(a, ct.float32)
        high = ct.astype(wide, ct.bfloat16)
        rest = wide - ct.astype(high, ct.float32)
        middle = ct.astype(rest, ct.bfloat16)
        return high, middle, ct.astype(rest - ct.astype(middle, ct.float32), ct.bfloat16)


@ct.function
def transposed(parts):
    if len(parts) == 1:
        return (ct.transpose(parts[0]),)
    else:
        return ct.transpose(parts[0]), ct.transpose(parts[1]), ct.transpose(parts[2])


@ct.function
def product(a, b, total, ROUGH=False):
    """total + a · b, where a and b are the parts of a matrix, as exact as in float32. ROUGH: to a relative 2⁻¹⁶.

    Tensor cores truncate at each step of a sum. So each call's sum starts at zero and is added to `total` with rounding. The
    smallest products are added up first.
    """
    sums = total * 0.0  # a zero that the compiler doesn't know: otherwise it would start at `total`
    if len(a) == 1 and len(b) == 1:
        return total + ct.mma(a[0], b[0], sums)
    elif len(a) == 1:
        if not ROUGH:
            sums = ct.mma(a[0], b[2], sums)
        return total + ct.mma(a[0], b[0], ct.mma(a[0], b[1], sums))
    elif len(b) == 1:
        if not ROUGH:
            sums = ct.mma(a[2], b[0], sums)
        return total + ct.mma(a[0], b[0], ct.mma(a[1], b[0], sums))
    else:
        if not ROUGH:
            sums = ct.mma(a[2], b[0], ct.mma(a[0], b[2], ct.mma(a[1], b[1], sums)))
        return total + ct.mma(a[0], b[0], ct.mma(a[1], b[0], ct.mma(a[0], b[1], sums)))
