"""NVIDIA's libdevice and Ascend's in terms of numpy and torch, for Triton's interpreter.

Keyed by the symbol that Triton would link, `__nv_tanhf` or `__hmf_tanhDh`, without its prefix and without the suffix
of its float32 or float16 variant. Functions that round towards something else than nearest, and bit tricks on integers,
are left out: an error names them when a kernel needs one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

_Function = Callable[..., np.ndarray]
_Unary = Callable[[np.ndarray], np.ndarray]
_Binary = Callable[[np.ndarray, np.ndarray], np.ndarray]
_Ternary = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def function_of(symbol: str) -> _Function:
    """The function that computes `symbol` on arrays of its argument types. NotImplementedError when there is none."""
    name = symbol.removeprefix("__nv_").removeprefix("__hmf_").removesuffix("Dh")
    for candidate in (
        name,
        name.removesuffix("f"),
        name.removeprefix("fast_"),
        name.removeprefix("fast_").removesuffix("f"),
    ):
        if candidate in _FUNCTIONS:
            return _FUNCTIONS[candidate]
    raise NotImplementedError(f"libdevice's {symbol} has no numpy version yet: add {name!r} to {__name__}")


def erf(x: np.ndarray) -> np.ndarray:
    return _of_torch("erf")(x)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x·y + z, rounded once. In float64 the product of two float32 is exact; the sum's own rounding is 2^29 times finer
    than the result's.
    """
    dtype = np.result_type(x, y, z)
    if dtype == np.float64:
        return x * y + z
    return (x.astype(np.float64) * y + z).astype(dtype)


def _of_torch(name: str) -> _Function:
    """A function of torch.special, which declares no types."""
    function = getattr(torch.special, name)

    def apply(array: np.ndarray) -> np.ndarray:
        # Waking another thread took 12 ms on two busy cores. One thread alone does 4096 erf in 7 µs.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            # A copy: a broadcast array can't be written, and torch warns when it shares the memory of such.
            return function(torch.from_numpy(np.array(array))).numpy()
        finally:
            torch.set_num_threads(threads)

    return apply


def _round_half_away(x: np.ndarray) -> np.ndarray:
    truncated = np.trunc(x)
    return truncated + np.where(np.abs(x - truncated) >= 0.5, np.copysign(x.dtype.type(1), x), x.dtype.type(0))


def _root_of_squares(*arrays: np.ndarray) -> np.ndarray:
    return np.sqrt(sum(np.square(array.astype(np.float64)) for array in arrays)).astype(arrays[0].dtype)


def _reciprocal(function: _Function) -> _Function:
    return lambda *arrays: np.reciprocal(function(*arrays))


_FUNCTIONS: dict[str, _Unary | _Binary | _Ternary] = {
    # exponentials and powers
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "pow": np.power,
    "powi": lambda x, y: np.power(x, y.astype(x.dtype)),
    "sqrt": np.sqrt,
    "rsqrt": _reciprocal(np.sqrt),
    "cbrt": np.cbrt,
    "rcbrt": _reciprocal(np.cbrt),
    "ldexp": np.ldexp,
    "scalbn": np.ldexp,
    # trigonometric and hyperbolic
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x.astype(np.float64), 2)),
    "cospi": lambda x: np.cos(np.pi * np.fmod(x.astype(np.float64), 2)),
    # special
    "erf": erf,
    "erfc": _of_torch("erfc"),
    "erfcx": _of_torch("erfcx"),
    "erfinv": _of_torch("erfinv"),
    "normcdf": _of_torch("ndtr"),
    "normcdfinv": _of_torch("ndtri"),
    "lgamma": _of_torch("gammaln"),
    "cyl_bessel_i0": _of_torch("i0"),
    "cyl_bessel_i1": _of_torch("i1"),
    # rounding and sign
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": _round_half_away,
    "rint": np.rint,
    "nearbyint": np.rint,
    "llrint": np.rint,
    "llround": _round_half_away,
    "abs": np.abs,
    "llabs": np.abs,
    "fabs": np.abs,
    "copysign": np.copysign,
    "nextafter": np.nextafter,
    "relu": lambda x: np.fmax(x, x.dtype.type(0)),
    "saturate": lambda x: np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)),
    # arithmetic
    "fma": fma,
    "fma_rn": fma,
    "fmaf_rn": fma,
    "fmod": np.fmod,
    "fdim": lambda x, y: np.where(x > y, x - y, x.dtype.type(0)),
    "fdivide": np.divide,
    "hypot": np.hypot,
    "rhypot": _reciprocal(np.hypot),
    "norm3d": _root_of_squares,
    "norm4d": _root_of_squares,
    "rnorm3d": _reciprocal(_root_of_squares),
    "rnorm4d": _reciprocal(_root_of_squares),
    "fadd_rn": np.add,
    "dadd_rn": np.add,
    "fsub_rn": np.subtract,
    "dsub_rn": np.subtract,
    "fmul_rn": np.multiply,
    "dmul_rn": np.multiply,
    "fdiv_rn": np.divide,
    "ddiv_rn": np.divide,
    "recip": np.reciprocal,
    "frcp_rn": np.reciprocal,
    "drcp_rn": np.reciprocal,
    "fsqrt_rn": np.sqrt,
    "dsqrt_rn": np.sqrt,
    "frsqrt_rn": _reciprocal(np.sqrt),
    # classification: libdevice returns int32
    "isnan": np.isnan,
    "isnand": np.isnan,
    "isinf": np.isinf,
    "isinfd": np.isinf,
    "finite": np.isfinite,
    "isfinited": np.isfinite,
    "signbit": np.signbit,
    "signbitd": np.signbit,
}
