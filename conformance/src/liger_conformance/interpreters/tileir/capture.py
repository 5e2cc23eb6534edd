"""Launches taken over: from `cuda.tile.launch` and CPU tensors to the program that a GPU would run.

The signature that a kernel is compiled for and the bytecode are cuda.tile's own. Two obstacles are removed. Its extension
loads libcuda: it is given a stand-in, of which it calls what says the version. And it takes no CPU tensors: it gets what looks
like tensors of a device.

Private to cuda.tile are the module `cuda.tile._load_libcuda` with one attribute, `kernel._pyfunc` and
`cuda.tile._compile.parse_bytecode_version`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import io
import os
import sys
import types
import weakref
import zlib
from collections.abc import Generator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from liger_conformance import sources
from liger_conformance.interpreters.tileir.bytecode import Module
from liger_conformance.interpreters.tileir.opcodes import VERSIONS
from liger_conformance.interpreters.tileir.program import Program

ARCHITECTURE = "sm_100"
"""What kernels are written to bytecode for: it has every element type."""
MOST_BLOCKS = ((1 << 24) - 1, 65535, 65535)
"""In the dimensions of a grid."""

_TYPESTR = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bool: "|b1",
    torch.int8: "|i1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8",
    torch.uint8: "|u1", torch.uint16: "<u2", torch.uint32: "<u4", torch.uint64: "<u8",
    torch.bfloat16: "<f2", torch.float8_e4m3fn: "|u1", torch.float8_e5m2: "|u1", torch.float8_e8m0fnu: "|u1",
}  # fmt: skip
_WITHOUT_TYPESTR = {
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e8m0fnu: "float8_e8m0fnu",
}
"""The array interface has no name for these. They are declared as another type of their size, then put right."""

CACHE: Path | None = None
"""Where bytecode that is interpreted is kept, for other processes, runs and checkouts: a file for each kernel and signature."""

_SOMEWHERE = 1 << 32
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_CUDA_VERSION = 13040


@functools.cache
def stand_in_for_libcuda() -> tuple[Any, ...]:
    """Let cuda.tile work without a driver, or beside one, in this process.

    Its extension finds every function of the driver through cuGetProcAddress_v2, which is ours. cuInit and
    cuDriverGetVersion succeed; all else says that it is not supported, so nothing can reach a GPU.

    Returns:
        What has to stay alive.

    Raises:
        RuntimeError: it has the real one already.
    """
    name = "cuda.tile._load_libcuda"
    if name in sys.modules:
        raise RuntimeError("cuda.tile has loaded libcuda: interpret kernels in a process that launches none on a GPU")
    callbacks: list[Any] = []
    any_function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def function(symbol: bytes) -> int | None:
        def call(argument: int) -> int:
            if symbol == b"cuDriverGetVersion":
                ctypes.cast(argument, ctypes.POINTER(ctypes.c_int))[0] = _CUDA_VERSION
            return 0 if symbol in (b"cuInit", b"cuDriverGetVersion") else _NOT_SUPPORTED

        callbacks.append(any_function(call))
        return ctypes.cast(callbacks[-1], ctypes.c_void_p).value

    @ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_int),
    )
    def get_address(symbol: bytes, address: Any, version: int, flags: int, status: Any) -> int:
        address[0] = function(symbol)
        if status:
            status[0] = 0
        return 0

    pointer = ctypes.cast(get_address, ctypes.c_void_p)
    module = types.ModuleType(name)
    module.__dict__["cuGetProcAddress_v2_ptrptr"] = ctypes.addressof(pointer)
    sys.modules[name] = module
    return callbacks, get_address, pointer


def _address(tensor: Tensor) -> int:
    """Where a tensor's elements lie; without any, where they would in memory as it is allocated, which is aligned."""
    if isinstance(tensor, FakeTensor):
        return _SOMEWHERE + int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


class _OnDevice:
    """A tensor, of the CPU or without data, that looks like one on a device."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        if tensor.dtype not in _TYPESTR:
            raise TypeError(f"cuda.tile has no type for {tensor.dtype}")
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (_address(tensor), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _TYPESTR[tensor.dtype],
        }


def signature(kernel: Any, arguments: Sequence[Any]) -> Any:
    """The KernelSignature that `cuda.tile.launch` compiles for, of tensors of the CPU or without data."""
    from cuda.tile.compilation import CallingConvention, KernelSignature

    stand_in_for_libcuda()
    disguised = tree_map_only(Tensor, _OnDevice, tuple(arguments))
    # With a symbol, since to make the one that is replaced below takes half the time of all this.
    name = kernel._pyfunc.__name__
    inferred = KernelSignature.from_kernel_args(kernel, disguised, CallingConvention.cutile_python_v2(), symbol=name)
    constraints = [_with_dtype(c, a) for c, a in zip(inferred.parameters, arguments, strict=True)]
    return KernelSignature(constraints, inferred.calling_convention).with_mangled_symbol(name)


def _with_dtype(constraint: Any, argument: Any) -> Any:
    """Put right the dtype of what was declared as another."""
    import cuda.tile as ct
    from cuda.tile.compilation import ListConstraint, TupleConstraint

    if isinstance(argument, Tensor) and argument.dtype in _WITHOUT_TYPESTR:
        return dataclasses.replace(constraint, dtype=getattr(ct, _WITHOUT_TYPESTR[argument.dtype]))
    if isinstance(constraint, TupleConstraint):
        return TupleConstraint([_with_dtype(c, a) for c, a in zip(constraint.items, argument, strict=True)])
    if isinstance(constraint, ListConstraint) and argument:
        return ListConstraint(
            _with_dtype(constraint.element, argument[0]),
            alias_groups=constraint.alias_groups,
            elements_may_alias=constraint.elements_may_alias,
        )
    return constraint


def _without_divisibility(constraint: Any) -> Any:
    """The constraint, without numbers by which addresses, sizes and strides can be divided.

    The front end makes assumptions of them, which hold for the arguments that they are read from. Without them, more launches
    run the same program. Assumptions that a kernel makes itself stay.
    """
    from cuda.tile.compilation import ArrayConstraint, ListConstraint, TupleConstraint

    if isinstance(constraint, ArrayConstraint):
        return dataclasses.replace(constraint, stride_divisible_by=1, shape_divisible_by=1, base_addr_divisible_by=1)
    if isinstance(constraint, TupleConstraint):
        return TupleConstraint([_without_divisibility(item) for item in constraint.items])
    if isinstance(constraint, ListConstraint):
        return ListConstraint(
            _without_divisibility(constraint.element),
            alias_groups=constraint.alias_groups,
            elements_may_alias=constraint.elements_may_alias,
        )
    return constraint


@functools.cache
def bytecode_version() -> str:
    """The newest format that both this decoder and the installed cuda.tile know."""
    from cuda.tile._compile import parse_bytecode_version

    for version in VERSIONS:
        try:
            parse_bytecode_version(version)
        except ValueError:
            continue
        return version
    raise NotImplementedError(f"the installed cuda-tile writes no Tile IR {' or '.join(VERSIONS)}")


@functools.cache
def _keep_signatures() -> None:
    """The front end asks inspect for the signature of each function that a kernel calls, each time: a twelfth of its time."""
    from cuda.tile._passes import hir2ir

    front_end: Any = hir2ir
    front_end.get_signature = functools.cache(front_end.get_signature)


@contextlib.contextmanager
def without_folders() -> Generator[None, None, None]:
    """Bytecode names the files of operations without their folders, so that a kernel is the same program in every checkout."""
    from cuda.tile._bytecode import debug_info

    table: Any = debug_info.DebugAttrTable
    file, place = table.file, table.loc

    def file_alone(self: Any, name: str, folder: str) -> Any:
        return file(self, name, "")

    def place_alone(self: Any, program: Any, path: str, line: int, column: int) -> Any:
        return place(self, program, os.path.basename(path), line, column)

    with mock.patch.object(table, "file", file_alone), mock.patch.object(table, "loc", place_alone):
        yield


def bytecode(kernel: Any, signature: Any, architecture: str = ARCHITECTURE) -> bytes:
    """Bytecode that cuda.tile's front end makes of a kernel. Its hints may differ between architectures."""
    from cuda.tile import compilation

    _keep_signatures()
    buffer = io.BytesIO()
    compilation.export_kernel(
        kernel,
        [signature],
        buffer,
        gpu_code=architecture,
        output_format="tileir_bytecode",
        bytecode_version=bytecode_version(),
    )
    return buffer.getvalue()


def _kept_bytecode(kernel: Any, signature: Any) -> bytes:
    """Bytecode of a kernel for the interpreter, from `CACHE` if the front end has made it before."""
    if CACHE is None:
        return bytecode(kernel, signature)
    try:
        source = sources.digest(kernel._pyfunc, lines=True)
    except sources.NoDigest:
        return bytecode(kernel, signature)
    parts = (_front_end(), source, repr(kernel._compiler_options), signature.symbol)
    cached = CACHE / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if cached.exists():
        os.utime(cached)
        return zlib.decompress(cached.read_bytes())
    with without_folders():
        code = bytecode(kernel, signature)
    part = cached.with_suffix(f".{os.getpid()}")
    part.write_bytes(zlib.compress(code))
    part.replace(cached)
    return code


@functools.cache
def _front_end() -> str:
    """Versions of what makes bytecode here, and a digest of how it is called."""
    return f"{metadata.version('cuda-tile')} {bytecode_version()} {sources.of_modules(sys.modules[__name__])}"


_programs: weakref.WeakKeyDictionary[Any, dict[str, Program]] = weakref.WeakKeyDictionary()


def program(kernel: Any, arguments: Sequence[Any]) -> Program:
    """The program that a launch with these arguments runs, made once."""
    wanted = signature(kernel, arguments)
    wanted = type(wanted)(map(_without_divisibility, wanted.parameters), wanted.calling_convention)
    wanted = wanted.with_mangled_symbol(kernel._pyfunc.__name__)
    programs = _programs.setdefault(kernel, {})
    if wanted.symbol not in programs:
        (function,) = Module(_kept_bytecode(kernel, wanted)).functions
        programs[wanted.symbol] = Program(function, wanted.parameters)
    return programs[wanted.symbol]


def launch(stream: Any, grid: tuple[int, ...], kernel: Any, arguments: tuple[Any, ...], /, **options: Any) -> None:
    """`cuda.tile.launch` for CPU tensors. The stream and the options are ignored: the kernel has run on return."""
    with torch.autocast("cpu", enabled=False):  # it would round the operands of the interpreter's own products
        program(kernel, arguments).launch(check_grid(grid), arguments)


def check_grid(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """A grid in three dimensions, or ValueError when one of them is more than cuda.tile takes."""
    x, y, z = (*grid, *(1,) * (3 - len(grid)))
    for axis, (blocks, most) in enumerate(zip((x, y, z), MOST_BLOCKS, strict=True)):
        if not 0 <= blocks <= most:
            raise ValueError(f"axis {axis} of the grid has {blocks} blocks; it takes 0 to {most}")
    return x, y, z
