"""The repairs of triton-ascend's interpreter that Triton's doesn't need; test_interpreter_triton.py has the others, for both."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from liger_conformance.interpreters.triton import repair

if find_spec("triton") is None or find_spec("triton.triton_patch") is None:
    pytest.skip("needs triton-ascend", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
repair()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra.ascend import libdevice  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

N = 64


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def tensor_kernel(x_ptr, out_ptr, first, OP: tl.constexpr):
    i = tl.arange(0, 8)
    at = i[:, None] * 8 + i[None, :]
    x = tl.load(x_ptr + at)
    if OP == "extract_slice":
        part = tl.extract_slice(x, (first, 2), (4, 2), (1, 2))
        tl.store(out_ptr + tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :], part)
    elif OP == "insert_slice":
        part = tl.zeros((2, 8), tl.float32)
        tl.store(out_ptr + at, tl.insert_slice(x, part, (first, 0), (2, 8), (1, 1)))
    elif OP == "get_element":
        tl.store(out_ptr, tl.get_element(x, (first, 5)))
    elif OP == "flip":
        tl.store(out_ptr + at, tl.flip(x, 1))
    elif OP == "sort":
        tl.store(out_ptr + at, tl.sort(x, 1, True))
    elif OP == "gather":
        tl.store(out_ptr + at, tl.gather(x, (at * 3) % 8, 1))
    elif OP == "hints":
        tl.multibuffer(x, 2)
        tl.compile_hint(x, "hint", 3)
        tl.sync_block_all("all", 1)
        tl.store(out_ptr + at, x)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("extract_slice", lambda x: x[3:7, 2:6:2]),
        ("insert_slice", lambda x: torch.cat([x[:3], torch.zeros(2, 8), x[5:]])),
        ("get_element", lambda x: x[3:4, 5:6]),
        ("flip", lambda x: x.flip(1)),
        ("sort", lambda x: x.sort(1, descending=True).values),
        ("gather", lambda x: x.gather(1, (torch.arange(64).view(8, 8) * 3) % 8)),
        ("hints", lambda x: x),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_language(op, expected):
    x = randn(8, 8)
    out = torch.empty(expected(x).shape)
    tensor_kernel[(1,)](x, out, 3, op)
    equal(out, expected(x))


@triton.jit
def parallel_kernel(out_ptr, n):
    for i in tl.parallel(0, n, bind_sub_block=True):
        tl.store(out_ptr + i, i.to(tl.float32))


def test_parallel_loops():
    out = torch.zeros(5)
    parallel_kernel[(1,)](out, 5)
    equal(out, torch.arange(5.0))


@triton.jit
def double_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i, i < n)
    tl.store(out_ptr + i, x + x, i < n)


def test_options_of_the_compiler_are_ignored():
    x, out = randn(N), torch.empty(N)
    double_kernel[(1,)](x, out, N, N, multibuffer=True, num_warps=8, compile_mode="simd")
    equal(out, x + x)
    with pytest.raises(TypeError, match="unknown"):
        double_kernel[(1,)](x, out, N, N, unknown=True)


@triton.jit
def invert_kernel(out_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, (~(i < n)).to(tl.int32))


def test_inverted_mask():
    out = torch.zeros(N, dtype=torch.int32)
    invert_kernel[(1,)](out, 3, N)
    equal(out, (torch.arange(N) >= 3).int())


@triton.jit
def small_dot_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x))


def test_dot_of_any_size():
    x, out = randn(2, 2), torch.empty(2, 2)
    small_dot_kernel[(1,)](x, out)
    torch.testing.assert_close(out, x @ x)


@triton.jit
def math_kernel(x_ptr, out_ptr, MODULE: tl.constexpr, NAME: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, getattr(MODULE, NAME)(tl.load(x_ptr + i)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["exp", "log", "rsqrt", "erf", "sigmoid"])
def test_math_of_16_bits(name, dtype):
    x, out = randn(N, dtype=dtype).abs() + 0.5, torch.empty(N, dtype=dtype)
    math_kernel[(1,)](x, out, tl, name, N)
    torch.testing.assert_close(out, getattr(torch, name)(x.float()).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", ["reciprocal", "relu", "tanh", "log1p"])
def test_libdevice_of_float16(name):
    x, out = randn(N, dtype=torch.float16).abs() + 0.5, torch.empty(N, dtype=torch.float16)
    math_kernel[(1,)](x, out, libdevice, name, N)
    torch.testing.assert_close(out, getattr(torch, name)(x), rtol=2e-3, atol=1e-6)


@triton.jit
def is_nan_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, libdevice.isnan(tl.load(x_ptr + i)).to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_isnan(dtype):
    x, out = randn(N, dtype=dtype), torch.zeros(N, dtype=torch.int32)
    x[::5] = torch.nan
    is_nan_kernel[(1,)](x, out, N)
    equal(out, x.isnan().int())


def test_bounds():
    x, out = randn(N), torch.zeros(N)
    with pytest.raises(IndexError, match="'x_ptr': element 50"):
        double_kernel[(1,)](x[:50], out, 51, N)


def test_errors_of_a_kernel_are_reported():
    with pytest.raises(InterpreterError):
        tensor_kernel[(1,)](randn(8, 8), torch.zeros(1), 9, "get_element")
