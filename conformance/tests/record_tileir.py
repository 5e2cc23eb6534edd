"""Record what a GPU makes of single operations of cuTile, for test_interpreter_tileir_records.py to compare with.

    python conformance/tests/record_tileir.py

On a machine with a GPU this launches each of `CASES` and writes tileir_records.npz, the bits of all tensors after the launch,
and tileir_records.json: the machine, and for each case the signature and the program that were compiled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature
from torch import Tensor

from liger_conformance.interpreters import tileir
from liger_conformance.interpreters.tileir import bytecode, capture

FOLDER = Path(__file__).parent
COUNT = 256

ConstInt = ct.Constant[int]
Build = Callable[[torch.Generator], list[Tensor]]


class Case(NamedTuple):
    """A kernel of one block, and its arguments but for constants."""

    kernel: Any
    build: Build
    constants: tuple[int, ...]
    error: float = 0.0
    """Relative, of what the interpreter computes; 0: the same bits. Operations that a GPU approximates have some."""


def unary(function: Any) -> Any:
    """A kernel of one operation."""

    @ct.kernel
    def kernel(x, y, COUNT: ConstInt):
        ct.store(y, (0,), ct.astype(function(ct.load(x, (0,), (COUNT,))), y.dtype))

    return kernel


def binary(function: Any) -> Any:
    """A kernel of one operation on two operands."""

    @ct.kernel
    def kernel(x, y, z, COUNT: ConstInt):
        ct.store(z, (0,), ct.astype(function(ct.load(x, (0,), (COUNT,)), ct.load(y, (0,), (COUNT,))), z.dtype))

    return kernel


def unchanged(t):
    return t


def running_sum(t):
    return ct.cumsum(t, axis=0)


def difference_from_maximum(t):
    return t - ct.max(t, axis=0, keepdims=True)


def share_of_sum(t):
    return t / ct.sum(t, axis=0, keepdims=True)


def highest(t):
    return t * 0 + ct.argmax(t, axis=0, keepdims=True)


def sigmoid(t):
    return 1.0 / (1.0 + ct.exp(-t))


def floor_divided(a, b):
    return a // b


def modulo(a, b):
    return a % b


def shifted(a, b):
    return (a << 3) ^ (a >> 2) ^ (ct.astype(ct.astype(a, ct.uint32) >> 5, ct.int32) + b)


def higher_or_equal(a, b):
    return a >= b


def different(a, b):
    return a != b


@ct.kernel
def product(a, b, c, SIDE: ConstInt):
    left, right = ct.load(a, (0, 0), (SIDE, SIDE)), ct.load(b, (0, 0), (SIDE, SIDE))
    ct.store(c, (0, 0), ct.mma(left, right, ct.zeros((SIDE, SIDE), ct.float32)))


@ct.kernel
def product_of_tf32(a, b, c, SIDE: ConstInt):
    left = ct.astype(ct.load(a, (0, 0), (SIDE, SIDE)), ct.tfloat32)
    right = ct.astype(ct.load(b, (0, 0), (SIDE, SIDE)), ct.tfloat32)
    ct.store(c, (0, 0), ct.mma(left, right, ct.zeros((SIDE, SIDE), ct.float32)))


@ct.kernel
def padded(x, y, BLOCK: ConstInt):
    ct.store(y, (0, 0), ct.load(x, (0, 0), (1, BLOCK), padding_mode=ct.PaddingMode.ZERO))
    ct.store(y, (1, 0), ct.load(x, (0, 0), (1, BLOCK), padding_mode=ct.PaddingMode.NEG_INF))
    columns = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    ct.store(y, (2, 0), ct.gather(x, (0, columns * 2), padding_value=5.0))
    ct.scatter(y, (3, columns * 2), ct.load(x, (0, 0), (1, BLOCK), padding_mode=ct.PaddingMode.ZERO))


def numbers(generator: torch.Generator, dtype: torch.dtype, *, positive: bool = False, special: bool = False) -> Tensor:
    """Numbers of all magnitudes, infinities and NaN among them if `special`."""
    exponents = torch.randint(-8, 8, (COUNT,), generator=generator)
    values = torch.randn(COUNT, generator=generator) * 2.0**exponents
    values = values.abs() + 0.01 if positive else values
    if special:
        values[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -3e38])
    return values.to(dtype)


def integers(generator: torch.Generator, *, zero: bool = True) -> Tensor:
    values = torch.randint(-(2**31), 2**31 - 1, (COUNT,), generator=generator) >> torch.randint(
        0, 31, (COUNT,), generator=generator
    )
    values[:4] = torch.tensor([0, 1, -1, 2**31 - 1])
    return (values if zero else torch.where(values == 0, 3, values)).int()


def one(dtype: torch.dtype, result: torch.dtype | None = None, **options: bool) -> Build:
    return lambda g: [numbers(g, dtype, **options), torch.zeros(COUNT, dtype=result or dtype)]


def two(dtype: torch.dtype, result: torch.dtype | None = None, **options: bool) -> Build:
    return lambda g: [*(numbers(g, dtype, **options) for _ in range(2)), torch.zeros(COUNT, dtype=result or dtype)]


def two_integers(g: torch.Generator) -> list[Tensor]:
    return [integers(g), integers(g, zero=False), torch.zeros(COUNT, dtype=torch.int32)]


def matrices(dtype: torch.dtype) -> Build:
    return lambda g: [*(torch.randn(32, 32, generator=g).to(dtype) for _ in range(2)), torch.zeros(32, 32)]


def short_row(g: torch.Generator) -> list[Tensor]:
    return [torch.randn(1, 27, generator=g), torch.full((4, 32), -1.0)]


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZE = (COUNT,)

CASES: dict[str, Case] = {
    **{
        f"{f.__name__}-{d}": Case(unary(f), one(d, special=True), SIZE) for f in (ct.floor, ct.ceil) for d in (F32, F16)
    },
    **{
        f"{f.__name__}-{d}": Case(unary(f), one(d, special=True), SIZE)
        for f in (ct.abs, ct.negative)
        for d in (F32, BF16)
    },
    **{
        f"{f.__name__}-{d}": Case(binary(f), two(d, special=True), SIZE)
        for f in (ct.add, ct.sub, ct.mul, ct.maximum, ct.minimum)
        for d in (F32, BF16, F16)
    },
    **{f"{f.__name__}-{F32}": Case(unary(f), one(F32), SIZE, 1e-5) for f in (ct.sin, ct.cos, ct.tanh, sigmoid)},
    **{
        f"{f.__name__}-{F32}": Case(unary(f), one(F32, positive=True), SIZE, 1e-5)
        for f in (ct.exp2, ct.log, ct.log2, ct.sqrt, ct.rsqrt, running_sum, share_of_sum)
    },
    "exp": Case(unary(ct.exp), lambda g: [torch.randn(COUNT, generator=g) * 10, torch.zeros(COUNT)], SIZE, 1e-5),
    "truediv": Case(binary(ct.truediv), two(F32, positive=True), SIZE, 2e-7),
    "difference_from_maximum": Case(unary(difference_from_maximum), one(F32), SIZE),
    "highest": Case(unary(highest), lambda g: [integers(g), torch.zeros(COUNT, dtype=torch.int32)], SIZE),
    **{f.__name__: Case(binary(f), two_integers, SIZE) for f in (floor_divided, modulo, shifted)},
    **{f.__name__: Case(binary(f), two(F32, torch.bool, special=True), SIZE) for f in (higher_or_equal, different)},
    **{f"{F32}-to-{d}": Case(unary(unchanged), one(F32, d, special=True), SIZE) for d in (BF16, F16)},
    f"{F32}-to-{torch.int32}": Case(unary(unchanged), one(F32, torch.int32), SIZE),
    **{
        f"{torch.int32}-to-{d}": Case(unary(unchanged), lambda g, d=d: [integers(g), torch.zeros(COUNT, dtype=d)], SIZE)
        for d in (F32, torch.int8, torch.int64)
    },
    **{f"product-{d}": Case(product, matrices(d), (32,), 1e-5) for d in (F32, BF16, F16)},
    "product-tf32": Case(product_of_tf32, matrices(F32), (32,), 1e-5),
    "padded": Case(padded, short_row, (32,)),
}


def arguments_of(case: Case) -> list[Tensor]:
    """The tensors of a case, on the CPU, the same each time."""
    return case.build(torch.Generator().manual_seed(0))


def program_of(kernel: Any, signature: Any) -> str:
    """A digest of what is compiled, but for where its source lies."""
    (function,) = bytecode.Module(capture.bytecode(kernel, signature)).functions
    text = re.sub(r" +// .*", "", bytecode.dump(function))
    return hashlib.sha256(text.encode()).hexdigest()


def bits_of(tensor: Tensor) -> np.ndarray:
    """A tensor that numpy may have no dtype for."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


def record(folder: Path, device: str = "cuda") -> None:
    """Launch every case on a device and write what comes of it."""
    results, cases = {}, {}
    for name, case in CASES.items():
        tensors = [tensor.to(device) for tensor in arguments_of(case)]
        arguments = (*tensors, *case.constants)
        if device == "cpu":
            signature, stream = tileir.signature(case.kernel, arguments), 0
        else:
            kernel_signature = KernelSignature.from_kernel_args(
                case.kernel, arguments, CallingConvention.cutile_python_v2()
            )
            signature = kernel_signature.with_mangled_symbol(case.kernel._pyfunc.__name__)
            stream = torch.cuda.current_stream().cuda_stream
        ct.launch(stream, (1,), case.kernel, arguments)
        results |= {f"{name}/{position}": bits_of(tensor) for position, tensor in enumerate(tensors)}
        cases[name] = {"symbol": signature.symbol, "program": program_of(case.kernel, signature)}
    machine = torch.cuda.get_device_name() if device == "cuda" else device
    about = {"machine": machine, "cuda-tile": version("cuda-tile"), "torch": torch.__version__, "cases": cases}
    (folder / "tileir_records.json").write_text(json.dumps(about, indent=1) + "\n")
    np.savez_compressed(folder / "tileir_records.npz", **results)


if __name__ == "__main__":
    record(FOLDER)
