"""Functions of values in kernels: exponentials, a softcap, and float32 matrix products on bfloat16 tensor cores."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def fast_exp(x):
    # Results below 2^-126 become 0. tl.exp spends three more instructions per element to keep them.
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def exp_like(x, logits):
    """The exponential, accurate enough for the logits' dtype: in float32, a probability near 1 has no bit to lose."""
    if logits.dtype.element_ty == tl.float32:
        return libdevice.exp(x)
    else:
        return fast_exp(x)


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """The exponential. With EXACT it is right to a unit of rounding; otherwise its error doesn't add up in a sum of many."""
    if EXACT:
        return libdevice.exp(x)
    else:
        # log2(e) is in two parts: tl.exp rounds it to one, which makes every result too small by 1.3e-8 · |x|.
        # Results below 2^-126 become 0.
        return tl.exp2(tl.fma(x, 1.4426950216293335, x * 1.925963033500987e-8))


@triton.jit
def expm1_near(x):
    """exp(x) − 1, for x from −0.25 to 0.25."""
    series = x * (0.008333334 + x * 0.0013888889)
    return x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + series))))


@triton.jit
def expm1(x):
    """exp(x) − 1, for x of −1 to 1."""
    quarter = expm1_near(0.25 * x)
    half = quarter * (2.0 + quarter)
    return half * (2.0 + half)


@triton.jit
def _inverse_like(x, logits):
    """1 / x, for x of 1 or more; rounded to nearest for float32 logits."""
    if logits.dtype.element_ty == tl.float32:
        return tl.math.div_rn(tl.minimum(x, 1.0), x)
    else:
        return 1.0 / x


@triton.jit
def cap(x, softcap, logits):
    """softcap · tanh(x / softcap), and its derivative; x and 1 without a softcap."""
    if softcap is None:
        return x, 1.0
    else:
        softcap = tl.cast(softcap, tl.float32)  # torch.compile passes floats as float64
        u = x / softcap
        q = exp_like(-2.0 * tl.abs(u), logits)
        r = _inverse_like(1.0 + q, logits)
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
        # fma rounds the product. The compiler might fuse a plain product with a later subtraction, and it would then differ from
        # itself.
        return tl.fma(tanh, softcap, 0.0), tl.where(near, 1.0 - series * series, 4.0 * q * r * r)


@triton.jit
def biased(x, bias, column, inside):
    return x if bias is None else x + tl.load(bias + column, inside, other=0.0).to(tl.float32)


@triton.jit
def tempered(x, inverse):
    """x / temperature, for a difference of logits: its rounding is then relative to the difference, not to the logits."""
    if inverse is None:
        return x
    else:
        return x * tl.cast(inverse, tl.float32)  # torch.compile passes floats as float64


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
def parts_of(a):
    """Three bfloat16 tensors whose sum is a, the largest first. A bfloat16 tensor gives one."""
    if a.dtype == tl.bfloat16:
        return (a,)
    else:
        high, rest = _cut(a.to(tl.float32))
        middle, rest = _cut(rest)
        low, _ = _cut(rest)
        return high, middle, low


@triton.jit
def product_of_parts(a, b, total, ROUGH: tl.constexpr = False):
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
