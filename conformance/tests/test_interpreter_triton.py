"""The repairs of Triton's interpreter, against PyTorch.

Each repair has tests that fail without it. To see that, delete its line in `_REPAIRS` of
liger_conformance/interpreters/triton.py and run this file with a release of triton that needs it, which the repair's
docstring says.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from liger_conformance.interpreters import triton_operations
from liger_conformance.interpreters.triton import Launch, launches, repair

triton = pytest.importorskip("triton")
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
ASCEND = RELEASE == (3, 2)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
if INTERPRETED:
    repair()

import triton.language as tl  # noqa: E402
from triton.language.math import exp as exp_by_name  # noqa: E402

if ASCEND:
    from triton.language.extra.ascend import libdevice
    from triton.language.math import tanh as tanh_by_name

    LIBDEVICES = [libdevice]
else:
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice
    from triton.language.extra.libdevice import tanh as tanh_by_name

    LIBDEVICES = [libdevice, cuda_libdevice]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TL_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
N = 64


def each_dtype(function):
    return pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))(function)


def not_on_ascend(reason):
    return pytest.mark.skipif(ASCEND, reason=f"triton-ascend: {reason}")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def run_python(code, **environment):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


# A kernel of each kind of operation. OP selects it: constexpr, so that the others aren't run.


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "div":
        out = x / y
    elif OP == "neg":
        out = -x
    elif OP == "abs":
        out = tl.abs(x)
    elif OP == "maximum":
        out = tl.maximum(x, y)
    elif OP == "minimum":
        out = tl.minimum(x, y)
    elif OP == "clamp":
        out = tl.clamp(x, -tl.abs(y), tl.abs(y))
    elif OP == "where":
        out = tl.where(x > y, x, y * 2)
    elif OP == "lt":
        out = x < y
    elif OP == "ge":
        out = x >= y
    elif OP == "eq":
        out = x == y
    elif OP == "constant":
        out = x * 3 + 0.5
    elif OP == "fma":
        out = tl.fma(x, y, x)
    tl.store(out_ptr + i, out)


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "clamp": lambda x, y: torch.clamp(x, -y.abs(), y.abs()),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "lt": torch.lt,
    "ge": torch.ge,
    "eq": torch.eq,
    "constant": lambda x, y: x * 3 + 0.5,
    "fma": lambda x, y: (x.double() * y.double() + x.double()).to(x.dtype),
}


@each_dtype
@pytest.mark.parametrize("op", BINARY)
def test_arithmetic(op, dtype):
    x, y = randn(N, dtype=dtype), randn(N, dtype=dtype, seed=1)
    y[::4] = x[::4]
    expected = BINARY[op](x, y)
    out = torch.empty_like(expected)
    binary_kernel[(1,)](x, y, out, op, N)
    equal(out, expected)


@each_dtype
@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_maximum_and_minimum_ignore_nan(op, dtype):
    x, y = randn(N, dtype=dtype), randn(N, dtype=dtype, seed=1)
    x[::3] = math.nan
    out = torch.empty_like(x)
    binary_kernel[(1,)](x, y, out, op, N)
    equal(out, BINARY[op](x, y))


@triton.jit
def clamp_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.clamp(tl.load(x_ptr + i), -1.0, 1.0))


def test_clamp_ignores_nan():
    x, out = randn(N), torch.empty(N)
    x[::3] = math.nan
    clamp_kernel[(1,)](x, out, N)
    equal(out.abs().clamp(max=1), out.abs())  # either limit: that of a H200 is 1.0
    equal(out[~x.isnan()], x.clamp(-1, 1)[~x.isnan()])


def test_fma_rounds_once():
    x = torch.full((N,), 1 + 2.0**-12)
    y, out = x.clone(), torch.empty(N)
    fma_of_negated_kernel[(1,)](x, y, out, N)
    assert out[0] == 2.0**-24, "(1 + 2^-12)² − (1 + 2^-11) is 2^-24: the product was rounded before the sum"


@triton.jit
def fma_of_negated_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), -1.00048828125))


# Casts


@triton.jit
def cast_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, ROUNDING: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x.to(DTYPE, fp_downcast_rounding=ROUNDING))


def cast(x, dtype, rounding=None):
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, TL_DTYPE[dtype], rounding, x.numel())
    return out


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-40, 65519.0, 65520.0]


def values_to_round():
    """Halfway between bf16 values, one bit beside that, halfway between fp16 values, two NaN, and the special ones."""
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x3FFFFFFF, 0x7F800001, 0x7FFFFFFF]
    fp16_ties = 1 + torch.arange(1, 8, 2) * 2.0**-11
    values = [torch.tensor(bits, dtype=torch.int32).view(torch.float32), fp16_ties, torch.tensor(SPECIAL), randn(256)]
    return torch.cat(values)[:256]


@pytest.mark.parametrize("rounding", [None, "rtne"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_cast_rounds_to_nearest_even(dtype, rounding):
    x = values_to_round()
    equal(cast(x, dtype, rounding), x.to(dtype))


def every_fp8(dtype):
    """All 256 values, NaN and infinities among them."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def fp8_value(bits, dtype):
    """A positive finite value, by the definition of the format."""
    mantissa_bits, bias = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}[dtype]
    exponent, mantissa = bits >> mantissa_bits, bits & (1 << mantissa_bits) - 1
    return (mantissa / (1 << mantissa_bits) + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_is_widened_exactly(dtype):
    x = every_fp8(dtype)
    for wide in DTYPES:
        equal(cast(x, wide), x.float().to(wide))
    largest = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[dtype]
    expected = torch.tensor([fp8_value(bits, dtype) for bits in range(largest + 1)])
    equal(cast(x, torch.float32)[: largest + 1], expected)
    assert expected[-1] == torch.finfo(dtype).max


@pytest.mark.parametrize("rounding", [None, "rtne"])
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_cast_to_fp8_rounds_to_nearest_even_and_saturates(dtype, source, rounding):
    """The result is a nearest value, of two such the even one. NaN stays NaN, and infinity becomes the largest."""
    values = every_fp8(dtype).float().nan_to_num(0.0, 1e5, -1e5).sort().values
    between = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, between, between * (1 + 2.0**-7), torch.tensor([math.inf, -math.inf, math.nan, 6e4, -1e-9])])
    x = torch.nn.functional.pad(x, (0, 1024 - x.numel())).to(source)
    bits = cast(x, dtype, rounding).view(torch.uint8).int()
    result = bits.to(torch.uint8).view(dtype).float()
    assert result[x.isnan()].isnan().all()
    x, bits, result = (each[~x.isnan()] for each in (x.float(), bits, result))
    most = torch.finfo(dtype).max
    finite = every_fp8(dtype).float()
    finite = finite[finite.abs() <= most]
    distance = (x.clamp(-most, most)[:, None].double() - finite.double()).abs()
    assert ((result.double() - x.clamp(-most, most)).abs() == distance.min(1).values).all()
    tie = (distance == distance.min(1).values[:, None]).sum(1) > 1
    tie &= result != 0  # of which there are two
    assert tie.sum() > 100
    assert (bits[tie] % 2 == 0).all()


def test_cast_towards_zero():
    x = values_to_round()
    x = x[~x.isinf()]
    x = torch.nn.functional.pad(x, (0, 256 - x.numel()))
    expected = (x.view(torch.int32) & -0x10000).view(torch.float32)
    equal(cast(x, torch.bfloat16, "rtz").float(), torch.where(x.isnan(), x, expected))


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.permutations([torch.int32, torch.int64, *DTYPES], 2)), ids=str
)
def test_cast(source, target):
    x = (randn(N) * 100).to(source)
    equal(cast(x, target), x.to(target))


@triton.jit
def full_kernel(out_ptr, DTYPE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.full((N,), -0.3, DTYPE) + tl.zeros((N,), DTYPE))


@each_dtype
def test_full(dtype):
    out = torch.empty(N, dtype=dtype)
    full_kernel[(1,)](out, TL_DTYPE[dtype], N)
    equal(out, torch.full((N,), -0.3, dtype=dtype))


@triton.jit
def comparison_cast_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, (tl.load(x_ptr + i) > 0).to(DTYPE))


@each_dtype
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_cast_of_comparison(dtype, target):
    x, out = randn(N, dtype=dtype), torch.empty(N, dtype=target)
    comparison_cast_kernel[(1,)](x, out, TL_DTYPE[target], N)
    equal(out, (x > 0).to(target))


@triton.jit
def scalar_mask_kernel(x_ptr, out_ptr, n, row, rows, N: tl.constexpr):
    i = tl.arange(0, N)
    inside = (i < n) & (row < rows)
    tl.store(out_ptr + i, tl.load(x_ptr + i, inside, other=-1.0), (row < rows) & (i < N))


def test_mask_of_a_block_and_a_scalar():
    x, out = randn(N), torch.zeros(N)
    scalar_mask_kernel[(1,)](x[:50], out, 50, 4, 4, N)
    equal(out, torch.zeros(N))
    scalar_mask_kernel[(1,)](x[:50], out, 50, 3, 4, N)
    equal(out, torch.cat([x[:50], torch.full((N - 50,), -1.0)]))
    with pytest.raises(IndexError, match="'x_ptr': element 50"):
        scalar_mask_kernel[(1,)](x[:50], out, 51, 3, 4, N)


# tl.dot


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, PRECISION: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    out = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets), input_precision=PRECISION)
    tl.store(out_ptr + offsets, out)


@each_dtype
def test_dot(dtype):
    a, b, out = randn(32, 32, dtype=dtype), randn(32, 32, dtype=dtype, seed=1), torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, "ieee", 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_dot_of_fp8(dtype):
    a, b, out = randn(32, 32).to(dtype), (randn(32, 32, seed=1) * 2.0**-8).to(dtype), torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, "ieee", 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-8)


def test_dot_is_tf32_by_default():
    a = torch.full((16, 16), 1 + 2.0**-12)  # which tf32 rounds to 1
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, torch.eye(16), out, None, 16)
    equal(out, a if ASCEND else torch.ones(16, 16))  # Ascend's is "ieee"


# Reductions and scans


@triton.jit
def add_combine(a, b):
    return a + b


@triton.jit
def last_combine(a, b):
    return b


@triton.jit
def welford_combine(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    delta = mean_b - mean_a
    return mean_a + delta * (count_b / count), m2_a + m2_b + delta * delta * (count_a * count_b / count), count


@triton.jit
def linear_combine(a_left, b_left, a_right, b_right):
    return a_left * a_right, a_right * b_left + b_right


@triton.jit
def reduce_kernel(x_ptr, out_ptr, OP: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :])
    if OP == "sum":
        out = tl.sum(x, AXIS, keep_dims=KEEP)
    elif OP == "max":
        out = tl.max(x, AXIS, keep_dims=KEEP)
    elif OP == "min":
        out = tl.min(x, AXIS, keep_dims=KEEP)
    elif OP == "argmax":
        out = tl.argmax(x, AXIS, keep_dims=KEEP)
    elif OP == "argmin":
        out = tl.argmin(x, AXIS, keep_dims=KEEP)
    elif OP == "add":
        out = tl.reduce(x, AXIS, add_combine, keep_dims=KEEP)
    elif OP == "last":
        out = tl.reduce(x, AXIS, last_combine, keep_dims=KEEP)
    tl.store(out_ptr + tl.arange(0, out.numel).reshape(out.shape), out)


REDUCTIONS = {
    "sum": torch.Tensor.sum,
    "max": torch.Tensor.amax,
    "min": torch.Tensor.amin,
    "argmax": torch.Tensor.argmax,
    "argmin": torch.Tensor.argmin,
    "add": torch.Tensor.sum,
    "last": lambda x, axis: x.select(axis, -1),
}


@each_dtype
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep_dims"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce(op, axis, keep, dtype):
    x = (randn(16, 32) * 8).round().to(dtype)  # small integers: sums are exact, and there are ties
    expected = REDUCTIONS[op](x, axis)
    out = torch.empty(expected.shape, dtype=torch.int32 if op.startswith("arg") else dtype)
    reduce_kernel[(1,)](x, out, op, axis, keep)
    equal(out, expected.to(out.dtype))


@each_dtype
def test_reduce_everything(dtype):
    x, out = (randn(16, 32) * 8).round().to(dtype), torch.empty(1, dtype=dtype)
    reduce_kernel[(1,)](x, out, "add", None, True)
    equal(out, x.sum().reshape(1))


@triton.jit
def reduce_4_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, 4)), 0, add_combine))


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 2048), (torch.bfloat16, 256)], ids=["float16", "bfloat16"]
)
def test_each_step_of_a_reduction_is_rounded(dtype, large):
    """In any order: where the next value is 2 further, adding 1 changes nothing, and the other two 1s add up to 2."""
    out = torch.empty(1, dtype=dtype)
    reduce_4_kernel[(1,)](torch.tensor([large, 1, 1, 1], dtype=dtype), out)
    assert out.item() == large + 2


@triton.jit
def welford_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    mean, m2, count = tl.reduce((x, tl.zeros_like(x), tl.full((N,), 1.0, tl.float32)), 0, welford_combine)
    tl.store(out_ptr, mean)
    tl.store(out_ptr + 1, m2 / count)


def test_reduce_of_a_tuple():
    x, out = randn(1024) + 1000, torch.empty(2)
    welford_kernel[(1,)](x, out, 1024)
    torch.testing.assert_close(out, torch.stack([x.mean(), x.var(correction=0)]), rtol=1e-4, atol=0)


@triton.jit
def argmax_kernel(x_ptr, out_ptr, TIES: tl.constexpr, N: tl.constexpr):
    tl.store(out_ptr, tl.argmax(tl.load(x_ptr + tl.arange(0, N)), 0, tie_break_left=TIES))


@pytest.mark.parametrize("ties", [True, False], ids=["tie_break_left", "tie_break_fast"])
def test_argmax_of_nan_does_not_raise(ties):
    out = torch.full((1,), -1)
    argmax_kernel[(1,)](torch.full((N,), math.nan), out, ties, N)
    assert 0 <= out.item() < N


@pytest.mark.parametrize("op", ["max", "min"])
def test_max_ignores_nan(op):
    x, out = randn(16, 32), torch.empty(16)
    x[:, ::3] = math.nan
    x[3] = math.nan
    reduce_kernel[(1,)](x, out, op, 1, False)
    fill = -math.inf if op == "max" else math.inf
    equal(out, torch.where(x.isnan().all(1), math.nan, REDUCTIONS[op](x.nan_to_num(fill), 1)))


def test_max_is_not_computed_by_its_combine_function(monkeypatch):
    monkeypatch.setattr(triton_operations, "_combine", None)
    for op in ("max", "min", "argmax", "argmin", "sum"):
        reduce_kernel[(1,)](randn(16, 32), torch.empty(16), op, 1, False)


combine_calls = []


@triton.jit
def counted_combine(a, b):
    combine_calls.append(1)
    return a + b


@triton.jit
def counted_kernel(x_ptr, out_ptr, SCAN: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    if SCAN:
        tl.store(out_ptr + tl.arange(0, N), tl.associative_scan(x, 0, counted_combine))
    else:
        tl.store(out_ptr, tl.reduce(x, 0, counted_combine))


@pytest.mark.parametrize("scan", [False, True], ids=["reduce", "scan"])
def test_combine_function_is_called_a_logarithmic_number_of_times(scan):
    combine_calls.clear()
    x, out = torch.ones(4096), torch.zeros(4096)
    counted_kernel[(1,)](x, out, scan, 4096)
    assert out.max() == 4096
    assert len(combine_calls) == 12


@triton.jit
def scan_kernel(x_ptr, out_ptr, OP: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    offsets = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offsets)
    if OP == "cumsum":
        out = tl.cumsum(x, AXIS, reverse=REVERSE)
    elif OP == "cumprod":
        out = tl.cumprod(x, AXIS, reverse=REVERSE)
    elif OP == "add":
        out = tl.associative_scan(x, AXIS, add_combine, reverse=REVERSE)
    elif OP == "sum_combine":
        out = tl.associative_scan(x, AXIS, tl.standard._sum_combine, reverse=REVERSE)
    elif OP == "last":
        out = tl.associative_scan(x, AXIS, last_combine, reverse=REVERSE)
    tl.store(out_ptr + offsets, out)


SCANS = {"cumsum": torch.cumsum, "cumprod": torch.cumprod, "add": torch.cumsum, "sum_combine": torch.cumsum}


@each_dtype
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", [*SCANS, "last"])
def test_scan(op, axis, reverse, dtype):
    x = randn(8, 16).sign().to(dtype) if op == "cumprod" else (randn(8, 16) * 4).round().to(dtype)  # exact in any order
    scan = SCANS.get(op, lambda x, axis: x)
    expected = scan(x.flip(axis), axis).flip(axis) if reverse else scan(x, axis)
    out = torch.empty_like(x)
    scan_kernel[(1,)](x, out, op, axis, reverse)
    equal(out, expected)


@triton.jit
def linear_recurrence_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    _, out = tl.associative_scan((tl.load(a_ptr + i), tl.load(b_ptr + i)), 0, linear_combine)
    tl.store(out_ptr + i, out)


def test_scan_of_a_tuple():
    a, b, out = torch.rand(N, generator=torch.Generator().manual_seed(0)), randn(N), torch.empty(N)
    linear_recurrence_kernel[(1,)](a, b, out, N)
    expected = [b[0]]
    for i in range(1, N):
        expected.append(a[i] * expected[-1] + b[i])
    torch.testing.assert_close(out, torch.stack(expected))


# Histograms


@triton.jit
def histogram_kernel(x_ptr, out_ptr, n, MASKED: tl.constexpr, BINS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    counts = tl.histogram(tl.load(x_ptr + i), BINS, mask=i < n if MASKED else None)
    tl.store(out_ptr + tl.arange(0, BINS), counts)


@not_on_ascend("tl.histogram takes no mask")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_histogram(dtype, masked):
    """Its elements have 4 bytes: a store of others would be outside of `out`. A bin counts more than an int8 can."""
    x = torch.randint(2, 8, (1024,), generator=torch.Generator().manual_seed(0)).to(dtype)
    n, out = 1000, torch.full((8,), -1, dtype=torch.int32)
    histogram_kernel[(1,)](x, out, n, masked, 8, 1024)
    equal(out, torch.bincount(x[: n if masked else None].long(), minlength=8).int())


# Atomics


@triton.jit
def atomic_kernel(x_ptr, index_ptr, out_ptr, before_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    index = tl.load(index_ptr + i, mask=i < n, other=0)
    before = tl.atomic_add(out_ptr + index, tl.load(x_ptr + i, mask=i < n), mask=i < n)
    tl.store(before_ptr + i, before, mask=i < n)


@each_dtype
def test_atomic_add(dtype):
    x = (randn(N) * 8).round().to(dtype)
    index = torch.randint(5, (N,), generator=torch.Generator().manual_seed(0))
    out, before = torch.ones(5, dtype=dtype), torch.zeros_like(x)
    n = N - 7
    atomic_kernel[(1,)](x, index, out, before, n, N)
    expected, expected_before = torch.ones(5), torch.zeros(N)
    for i in range(n):
        expected_before[i] = expected[index[i]]
        expected[index[i]] += x[i]
    equal(out, expected.to(dtype))
    equal(before, expected_before.to(dtype))


# Mathematical functions


@triton.jit
def math_kernel(x_ptr, out_ptr, MODULE: tl.constexpr, NAME: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, getattr(MODULE, NAME)(tl.load(x_ptr + i)))


MATH = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "cos": torch.cos,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "sigmoid": torch.sigmoid,
}
LIBDEVICE = {name: function for name, function in MATH.items() if name != "sigmoid"} | {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "asinh": torch.asinh,
    "cosh": torch.cosh,
    "sinh": torch.sinh,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "exp10": lambda x: 10**x,
    "expm1": torch.expm1,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "finitef": torch.isfinite,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "lgamma": torch.lgamma,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "normcdf": torch.special.ndtr,
    "rint": torch.round,
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
    "saturatef": lambda x: x.clamp(0, 1),
    "signbit": torch.signbit,
    "trunc": torch.trunc,
}
APPROXIMATED_ON_ASCEND = ["acos", "asin", "asinh", "lgamma"]  # by its libdevice, in Triton's language


@pytest.mark.filterwarnings("error")  # of numpy, for the values where a function isn't defined
@pytest.mark.parametrize(
    ("module", "name"),
    [(tl, name) for name in MATH]
    + [
        (module, name)
        for module in LIBDEVICES
        for name in LIBDEVICE
        if not ASCEND or (hasattr(module, name) and name not in APPROXIMATED_ON_ASCEND)
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__.removeprefix("triton."),
)
def test_math(module, name):
    function = (MATH | LIBDEVICE)[name]
    x = torch.cat([torch.tensor([0.5, -0.5, 1.5, 2.5, math.inf, -math.inf, math.nan, 0.0]), randn(120)])
    if name == "saturatef":
        x = x.nan_to_num()
    expected = function(x)
    out = torch.empty_like(expected)
    math_kernel[(1,)](x, out, module, name, 128)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-7, equal_nan=True)


def test_erf_is_not_computed_per_element(monkeypatch):
    monkeypatch.setattr(triton.runtime.interpreter, "np_erf_fp32", None)
    x, out = randn(N), torch.empty(N)
    math_kernel[(1,)](x, out, tl, "erf", N)
    torch.testing.assert_close(out, x.erf())


@triton.jit
def math_of_two_kernel(x_ptr, y_ptr, out_ptr, NAME: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, getattr(libdevice, NAME)(tl.load(x_ptr + i), tl.load(y_ptr + i)))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("pow", torch.pow),
        pytest.param("atan2", torch.atan2, marks=not_on_ascend("its atan2(y, x) is that of x and y")),
        pytest.param("fmod", torch.fmod, marks=not_on_ascend("it has none")),
        ("hypot", torch.hypot),
        ("copysign", torch.copysign),
        ("div_rn", torch.div),
    ],
)
def test_math_of_two(name, function):
    x, y, out = randn(N).abs() + 0.1, randn(N, seed=1), torch.empty(N)
    math_of_two_kernel[(1,)](x, y, out, name, N)
    torch.testing.assert_close(out, function(x, y), rtol=2e-6, atol=1e-6)


@triton.jit
def math_by_name_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tanh_by_name(exp_by_name(tl.load(x_ptr + i))))


def test_math_imported_by_name():
    x, out = randn(N), torch.empty(N)
    math_by_name_kernel[(1,)](x, out, N)
    torch.testing.assert_close(out, x.exp().tanh())


@not_on_ascend("it compiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("module", "name"), [(tl, "exp"), (tl, "sigmoid"), (libdevice, "tanh")], ids=str)
def test_math_that_does_not_compile_raises(module, name, dtype):
    x = randn(N, dtype=dtype)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"Expected dtype|KeyError|does not match"):
        math_kernel[(1,)](x, x, module, name, N)


def test_unknown_libdevice_function_is_named():
    x = randn(N)
    name, symbol = ("ilogb", "__hmf_ilogbf") if ASCEND else ("j0", "__nv_j0f")
    with pytest.raises(triton.runtime.errors.InterpreterError, match=symbol):
        math_kernel[(1,)](x, x, libdevice, name, N)


# Types of arguments and loop variables


@triton.jit
def scalar_arguments_kernel(x_ptr, out_ptr, scale, flag, N: tl.constexpr):
    i = tl.arange(0, N)
    product = tl.load(x_ptr + i) * scale
    tl.static_assert(product.dtype == tl.float32)
    tl.static_assert(scale.dtype == tl.float32)
    tl.static_assert(flag.dtype == tl.int1)
    if flag:
        product += scale.to(tl.float64).to(tl.float32)
    tl.store(out_ptr + i, product)


@each_dtype
@pytest.mark.parametrize("flag", [False, True])
def test_scalar_arguments(dtype, flag):
    x, out = randn(N, dtype=dtype), torch.empty(N)
    scalar_arguments_kernel[(1,)](x, out, 0.1, flag, N)
    scale = torch.tensor(0.1)
    equal(out, x.float() * scale + (scale if flag else 0))


@triton.jit
def loop_kernel(out_ptr, n, KIND: tl.constexpr):
    total = tl.zeros((1,), tl.int64)
    if KIND == "range":
        for i in range(1, n, 2):
            tl.static_assert(i.dtype == tl.int32)
            total += i.to(tl.int64)
    elif KIND == "tl.range":
        for i in tl.range(n, num_stages=2):
            tl.static_assert(i.dtype == tl.int32)
            total += i.to(tl.int64)
    elif KIND == "int64":
        for i in range(n.to(tl.int64)):
            tl.static_assert(i.dtype == tl.int64)
            total += i
    elif KIND == "program_id":
        for i in range(tl.program_id(0), n, tl.num_programs(0)):
            total += i.to(tl.int64)
    elif KIND == "backwards":
        for i in range(n, 0, -1):
            total += i * i
    elif KIND == "static_range":
        for i in tl.static_range(4):
            total += tl.arange(0, 2**i).numel.value
    tl.store(out_ptr + tl.arange(0, 1), total)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("range", sum(range(1, 10, 2))),
        ("tl.range", sum(range(10))),
        ("int64", sum(range(10))),
        ("program_id", sum(range(10))),
        ("backwards", sum(i * i for i in range(1, 11))),
        ("static_range", 15),
    ],
)
def test_loop_variables(kind, expected):
    out = torch.zeros(1, dtype=torch.int64)
    loop_kernel[(1,)](out, 10, kind)
    assert out.item() == expected


# Syntax


@triton.jit
def logical_kernel(out_ptr, low, high, OP: tl.constexpr, FLAG: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    above = i >= low
    if OP == "and":
        mask = above and i < high and i != 5
    elif OP == "or":
        mask = i < low or not i < high
    elif OP == "not":
        mask = not above
    elif OP == "constants":
        mask = (FLAG and above) or (not FLAG and i < high)
    elif OP == "return":
        mask = both(above, i < high)
    tl.store(out_ptr + i, mask.to(tl.int32))


@triton.jit
def both(a, b):
    return a and b


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("and", lambda i: (i >= 3) & (i < 20) & (i != 5)),
        ("or", lambda i: (i < 3) | (i >= 20)),
        ("not", lambda i: i < 3),
        ("constants", lambda i: i < 20),
        ("return", lambda i: (i >= 3) & (i < 20)),
    ],
)
def test_logical_operators_are_elementwise(op, expected):
    out = torch.zeros(N, dtype=torch.int32)
    logical_kernel[(1,)](out, 3, 20, op, False, N)
    equal(out, expected(torch.arange(N)).int())


@triton.jit
def truth_kernel(out_ptr, KIND: tl.constexpr, N: tl.constexpr):
    mask = tl.arange(0, N) < 3
    if KIND == "if":
        if mask:
            tl.store(out_ptr, 1)
    elif KIND == "while":
        while mask:
            tl.store(out_ptr, 1)
    else:
        tl.store(out_ptr, 1 if mask else 2)


@pytest.mark.parametrize("kind", ["if", "while", "ternary"])
def test_a_block_is_neither_true_nor_false(kind):
    with pytest.raises(triton.runtime.errors.InterpreterError, match="neither true nor false"):
        truth_kernel[(1,)](torch.zeros(1), kind, N)


@triton.jit
def chain_kernel(out_ptr, low, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, (low <= i < 20).to(tl.int32))


def test_chained_comparison():
    out = torch.zeros(N, dtype=torch.int32)
    if RELEASE < (3, 9):
        with pytest.raises(SyntaxError, match=r"doesn't compile a chained comparison: low <= i < 20"):
            chain_kernel[(1,)](out, 3, N)
    else:
        chain_kernel[(1,)](out, 3, N)
        i = torch.arange(N)
        equal(out, ((i >= 3) & (i < 20)).int())


# Launching


@triton.jit
def nested_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, N)), 0))


def test_triton_language_is_patched_once_per_launch_and_restored(monkeypatch):
    interpreter = triton.runtime.interpreter
    patch_builtin, patched = interpreter._patch_builtin, []

    def count(module, *arguments):
        patched.append(module)
        patch_builtin(module, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", count)
    x, out, load = randn(N), torch.empty(8), tl.load
    nested_kernel[(8,)](x, out, N)
    # tl and tl.core, from this module and that of tl.max: 4, 1 or 2 of which are also done for tl.math.
    assert len(patched) <= 10, "patched again at each call of tl.max"
    if RELEASE >= (3, 6):
        assert tl.load is load


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def autotuned_kernel(out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), BLOCK)


def test_autotune_takes_the_first_configuration():
    out = torch.zeros(N)
    autotuned_kernel[(1,)](out, N)
    equal(out, torch.cat([torch.full((32,), 32.0), torch.zeros(32)]))


@triton.jit
def offsets_kernel(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, (i * 3 + 1).to(tl.float32))


def test_overflow_of_offsets_is_not_computed_to_be_dropped(monkeypatch):
    casts = []
    builder = triton.runtime.interpreter.InterpreterBuilder
    create_int_cast = builder.create_int_cast
    monkeypatch.setattr(builder, "create_int_cast", lambda *args: casts.append(1) or create_int_cast(*args))
    offsets_kernel[(1,)](torch.empty(N), N)
    assert not casts


# Types


@triton.jit
def steps_kernel(x_ptr, out_ptr, STEPS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = x
    for _ in range(STEPS):
        y = y * 2 + x
    tl.store(out_ptr + i, y)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(tl.core.constexpr, "__init__", id="lengths-are-wrapped"),
        pytest.param(tl.core.dtype, "__hash__", id="a-table-of-dtypes-is-made"),
        pytest.param(
            getattr(tl.core, "tuple", None), "__eq__", id="shapes-are-compared", marks=not_on_ascend("shapes are lists")
        ),
    ],
)
def test_types_of_more_steps_are_those_of_one(owner, name, monkeypatch):
    calls, original = [], getattr(owner, name)

    def count(*arguments):
        calls.append(arguments)
        return original(*arguments)

    x, out = randn(N), torch.empty(N)
    steps_kernel[(1,)](x, out, 1, N)  # makes the types
    monkeypatch.setattr(owner, name, count)
    steps_kernel[(1,)](x, out, 1, N)
    once = len(calls)
    steps_kernel[(1,)](x, out, 9, N)
    assert len(calls) == 2 * once


def test_types_of_one_shape_keep_their_elements():
    """Blocks of pointers to tensors of other dtypes, and of their elements."""
    pointers = [tl.core.pointer_type(dtype) for dtype in (tl.float32, tl.float16)]
    blocks = [tl.core.block_type(element, [N]) for element in (*pointers, tl.float32, tl.float16)]
    assert [block.element_ty for block in blocks] == [*pointers, tl.float32, tl.float16]
    assert all(list(block.shape) == [N] and block.numel == N for block in blocks)
    assert len(set(map(str, blocks))) == 4
    assert blocks[2] == tl.core.block_type(tl.float32, [tl.core.constexpr(N)])
    assert blocks[2] != tl.core.block_type(tl.float32, [N, 1])
    with pytest.raises(TypeError, match="0d block_type"):
        tl.core.block_type(tl.float32, [])


@not_on_ascend("it compares types as shipped")
def test_a_dtype_is_equal_to_itself_without_a_look_at_its_name(monkeypatch):
    assert tl.float32 == tl.core.dtype("fp32")
    assert tl.float32 != tl.float16
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", None)
    assert tl.float32 == tl.float32


def test_builtins_are_looked_for_once(monkeypatch):
    x, out = randn(N), torch.empty(1)
    nested_kernel[(1,)](x, out, N)
    monkeypatch.setattr(triton.runtime.interpreter.inspect, "getmembers", None)
    nested_kernel[(1,)](x, out, N)
    equal(out, x.max()[None])


# Bounds


@triton.jit
def copy_kernel(x_ptr, out_ptr, n_read, n_written, shift, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i + shift, mask=i < n_read)
    tl.store(out_ptr + i, x, mask=i < n_written)


def test_access_in_bounds():
    x, out = randn(50), torch.zeros(50)
    copy_kernel[(1,)](x, out, 50, 50, 0, N)
    equal(out, x)


@pytest.mark.parametrize(
    ("n_read", "n_written", "shift", "message"),
    [
        (
            51,
            50,
            0,
            r"copy_kernel, program \(0, 0, 0\): load .*\nin 1 of 51 lanes.*\n.*'x_ptr': element 50, 4 bytes past",
        ),
        (
            50,
            52,
            0,
            r"copy_kernel, program \(0, 0, 0\): store .*\nin 2 of 52 lanes.*\n.*'out_ptr': element 50, 4 bytes past",
        ),
        (50, 50, -1, r"load .*\nin 1 of 50 lanes.*\n.*'x_ptr': element -1, 4 bytes before"),
        (50, 50, 2**40, r"load .*\nin 50 of 50 lanes"),
        (50, 50, -(2**61), r"load .*\nin 50 of 50 lanes"),
    ],
    ids=["load past the end", "store past the end", "before the start", "far away", "wrapped around"],
)
def test_access_out_of_bounds(n_read, n_written, shift, message):
    x, out = randn(50), torch.zeros(50)
    with pytest.raises(IndexError, match=message) as raised:
        copy_kernel[(1,)](x, out, n_read, n_written, shift, N)
    assert "x_ptr: float32[50], strides [1], 200 bytes at 0x" in str(raised.value)
    assert "out_ptr: float32[50]" in str(raised.value)


def test_out_of_bounds_of_a_slice_is_within_its_storage():
    storage = torch.zeros(3, 50)
    with pytest.raises(IndexError, match="'out_ptr': element 50"):
        copy_kernel[(1,)](randn(50), storage[1], 50, 51, 0, N)
    equal(storage, torch.zeros(3, 50))


@triton.jit
def column_kernel(x_ptr, out_ptr, stride, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i * stride, mask=i < n), mask=i < n)


def test_bounds_of_a_strided_tensor():
    x, out = randn(50, 4), torch.zeros(50)
    column_kernel[(1,)](x[:, 3], out, 4, 50, N)
    equal(out, x[:, 3])
    column_kernel[(1,)](x[0, 0].expand(50), out, 0, 50, N)
    equal(out, x[0, 0].expand(50))
    with pytest.raises(
        IndexError, match=r"'x_ptr': element 200, 16 bytes past.*\n  x_ptr: float32\[50\], strides \[4\]"
    ):
        column_kernel[(1,)](x[:, 0], torch.zeros(51), 4, 51, N)


def test_bounds_of_an_empty_tensor():
    column_kernel[(1,)](torch.empty(0), torch.empty(0), 1, 0, N)
    with pytest.raises(IndexError, match="load outside"):
        column_kernel[(1,)](torch.empty(0), torch.empty(0), 1, 1, N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bounds_of_an_atomic(dtype):
    x, out = torch.ones(N, dtype=dtype), torch.zeros(5, dtype=dtype)
    with pytest.raises(IndexError, match="'out_ptr': element 5"):
        atomic_kernel[(1,)](x, torch.arange(N) % 6, out, torch.zeros(N, dtype=dtype), N, N)


@triton.jit
def load_one(x_ptr, index):
    return tl.load(x_ptr + index)


@triton.jit
def scalar_kernel(x_ptr, out_ptr, index):
    tl.store(out_ptr, load_one(x_ptr, index))


def test_bounds_in_a_device_function():
    x, out = randn(3), torch.zeros(1)
    scalar_kernel[(1,)](x, out, 2)
    equal(out, x[2:])
    with pytest.raises(IndexError, match=r"scalar_kernel.*\n.*1 lanes"):
        scalar_kernel[(1,)](x, out, 3)


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, rows, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, N], [N, 1], [8, N])
    tl.make_tensor_descriptor(out_ptr, [rows, N], [N, 1], [8, N]).store([0, 0], x.load([0, 0]))


@not_on_ascend("its interpreter has no descriptors")
def test_bounds_of_a_descriptor():
    x, out = randn(5, 16), torch.zeros(5, 16)
    descriptor_kernel[(1,)](x, out, 5, 16)
    equal(out, x)
    with pytest.raises(IndexError, match="'x_ptr': element 80"):
        descriptor_kernel[(1,)](x, out, 6, 16)


def test_bounds_check_is_optional():
    storage, out = randn(3, 50), torch.zeros(51)
    repair(check_bounds=False)
    try:
        copy_kernel[(1,)](storage[1], out, 51, 51, 0, N)
    finally:
        repair()
    equal(out, storage.reshape(-1)[50:101])


# Which kernels ran


def test_launches():
    x, out = randn(50), torch.zeros(50)
    with launches() as outer:
        copy_kernel[(1,)](x, out, 50, 50, 0, N)
        with launches() as inner:
            nested_kernel[lambda arguments: (2, 3)](randn(N), out, N)
        copy_kernel.run(x, out, 50, 50, 0, N, grid=(1,), warmup=True)
    copy_kernel[(1,)](x, out, 50, 50, 0, N)
    assert inner == [Launch("nested_kernel", __name__, (2, 3, 1))]
    assert outer == [Launch("copy_kernel", __name__, (1, 1, 1)), *inner]


def test_launches_of_autotuned_kernels():
    with launches() as recorded:
        autotuned_kernel[(1,)](torch.zeros(N), N)
    assert recorded == [Launch("autotuned_kernel", __name__, (1, 1, 1))]


# The module itself


def test_repair_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before triton is imported"):
        repair()


def test_repair_is_idempotent():
    interpreter = triton.runtime.interpreter
    before = (interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.binary_op, interpreter._interpreter)
    repair()
    after = (interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.binary_op, interpreter._interpreter)
    assert before == after


def test_repair_after_triton_was_imported_too_early():
    code = """
import os, triton
os.environ["TRITON_INTERPRET"] = "1"
from liger_conformance.interpreters.triton import repair
repair()
"""
    finished = run_python(code)
    assert "RuntimeError: triton was imported before TRITON_INTERPRET=1 was set" in finished.stderr


def test_import_does_not_import_triton():
    code = "import sys, liger_conformance.interpreters.triton; print('triton' in sys.modules)"
    finished = run_python(code)
    assert finished.stdout == "False\n", finished.stderr


UNREPAIRED = """
import sys, torch, triton
import triton.language as tl

@triton.jit
def add(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x + x)

x = torch.ones(4, dtype=torch.bfloat16)
add[(1,)](x, 4)
print(x.tolist())
"""


def test_unrepaired_bf16_is_wrong(tmp_path):
    """When this fails, upstream has mended bf16: look through triton_values for what can go."""
    (tmp_path / "unrepaired.py").write_text(UNREPAIRED)  # a kernel's source must be in a file
    finished = run_python(f"import runpy; runpy.run_path({str(tmp_path / 'unrepaired.py')!r})", TRITON_INTERPRET="1")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout != "[2.0, 2.0, 2.0, 2.0]\n"
