"""Functions of values in kernels: exponentials, a softcap, widening, and float32 matrix products on bfloat16 tensor cores."""

import cuda.tile as ct

from liger_cutile.ops._launch import given

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Stands for -inf in differences: the difference of two of them is 0.
LEAST = -3.4028234663852886e38


@ct.function
def exp_like(x, array):
    """e^x. For a 16-bit array it takes three instructions instead of eight, with an error of 1e-7 · (1 + |x|)."""
    if array.dtype == ct.float32:
        return ct.exp(x)
    else:
        return ct.exp2(x * LOG2_E, flush_to_zero=True)


@ct.function
def exp(x, EXACT):
    """The exponential. With EXACT it is right to a unit of rounding; otherwise its error doesn't add up in a sum of many."""
    if EXACT:
        return ct.exp(x)
    else:
        # log2(e) is in two parts: rounded to one, it makes every result too small by 1.3e-8 · |x|. Results below 2^-126 become
        # 0.
        return ct.exp2(x * 1.4426950216293335 + x * 1.925963033500987e-8, flush_to_zero=True)


@ct.function
def exp2(x):
    return ct.exp2(x, flush_to_zero=True)


@ct.function
def expm1_near(x):
    """exp(x) − 1, for x from −0.25 to 0.25."""
    series = x * (0.008333334 + x * 0.0013888889)
    return x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + series))))


@ct.function
def expm1(x):
    """exp(x) − 1, for x of −1 to 1."""
    quarter = expm1_near(0.25 * x)
    half = quarter * (2.0 + quarter)
    return half * (2.0 + half)


@ct.function
def cap(x, softcap):
    """softcap · tanh(x / softcap), and its derivative; x and 1 without a softcap."""
    if given(softcap):
        u = x / softcap
        # Not 1 − tanh²: near 1 nothing is left of it.
        e = ct.exp(-2.0 * ct.abs(u))
        return softcap * ct.tanh(u), 4.0 * e / ((1.0 + e) * (1.0 + e))
    else:
        return x, 1.0


@ct.function
def tempered(x, inverse):
    """x / temperature, for a difference of logits: its rounding is then relative to the difference, not to the logits."""
    if given(inverse):
        return x * inverse
    else:
        return x


@ct.function
def widen_again(tile):
    """A tile that is held in its own dtype, widened to float32 a second time.

    A second ct.astype would reuse the first one's result, and keep it in twice the registers.
    """
    if tile.dtype == ct.bfloat16:
        bits = ct.astype(ct.bitcast(tile, ct.uint16), ct.uint32)
        return ct.bitcast(ct.bitwise_lshift(bits, ct.full(tile.shape, 16, ct.uint32)), ct.float32)
    else:
        return ct.astype(tile, ct.float32)


@ct.function
def parts_of(a):
    """Three bfloat16 tiles whose sum is the tile, the largest first. A bfloat16 tile gives one.

    For float32 tiles, `ct.mma` doesn't use tensor cores.
    """
    if a.dtype == ct.bfloat16:
        return (a,)
    else:
        wide = ct.astype(a, ct.float32)
        high = ct.astype(wide, ct.bfloat16)
        rest = wide - ct.astype(high, ct.float32)
        middle = ct.astype(rest, ct.bfloat16)
        return high, middle, ct.astype(rest - ct.astype(middle, ct.float32), ct.bfloat16)


@ct.function
def transposed_parts(parts):
    if len(parts) == 1:
        return (ct.transpose(parts[0]),)
    else:
        return ct.transpose(parts[0]), ct.transpose(parts[1]), ct.transpose(parts[2])


@ct.function
def product_of_parts(a, b, total, ROUGH=False):
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
