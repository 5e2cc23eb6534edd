"""Runs adapter MLIR on the CPU, with another compiler's back end: LLVM's, in place of CANN's.

So the lowering of Triton to tiles is checked for what it computes: it is real, and the rest isn't. Needs mlir-opt and
mlir-translate 19 (Debian's mlir-19-tools) on PATH, and llvmlite. Programs run one after another.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from liger_conformance.compilers.compiler import CannotExecute

TO_BUFFERS = (
    "--inline",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
)
TO_LLVM = (
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
_NUMBERS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_FUNCTIONS = {
    "tanhf": "tanhf",
    "log1pf": "log1pf",
    "tanf": "tanf",
    "atanf": "atanf",
    "powf": "powf",
    "roundf": "roundf",
}
"""Names of functions in libm, by their names in Ascend's libdevice."""


def obstacle() -> str | None:
    """Why this machine can't execute, and what mends that; or None."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    missing = [name for name in ("mlir-opt", "mlir-translate") if _tool(name) is None]
    return f"{missing[0]} is not on PATH: install mlir-19-tools" if missing else None


def _tool(name: str) -> str | None:
    return shutil.which(f"{name}-19") or shutil.which(name)


def _llvm() -> Any:
    """llvmlite.binding, which declares no types."""
    return importlib.import_module("llvmlite.binding")


class Executable:
    """A kernel that can be launched with tensors on the CPU.

    Args:
        mlir: as triton-ascend prints it.
        generic: the same in MLIR's generic form, which MLIR's own tools read.

    Raises:
        CannotExecute: MLIR's own tools don't lower it, such as an operation of Ascend's dialects.
    """

    def __init__(self, mlir: str, generic: str) -> None:
        llvm = _llvm()
        name, arguments = re.findall(r"func\.func @(\w+)\((%arg0: .*?)\) attributes", mlir, re.S)[-1]
        # Two pointers to workspaces come first, and the sizes of the grid and the program's place in it last.
        self.kinds = re.findall(r"%arg\d+: ([\w<>?]+)", arguments)[2:-6]
        generic = re.sub(r'^\s*"annotation\.mark".*$', "", generic, flags=re.M)  # hints
        buffers = _run(_tool("mlir-opt"), "-", "--allow-unregistered-dialect", *TO_BUFFERS, text=generic)
        # Copies as loops: else each is a call of a function of MLIR's runtime.
        buffers = re.sub(
            r"memref\.copy (%\S+), (%\S+) : (.*) to (.*)", r"linalg.copy ins(\1 : \3) outs(\2 : \4)", buffers
        )
        llvm_dialect = _run(_tool("mlir-opt"), "-", "--allow-unregistered-dialect", *TO_LLVM, text=buffers)
        module = llvm.parse_assembly(_run(_tool("mlir-translate"), "-", "--mlir-to-llvmir", text=llvm_dialect))
        _prepare()
        declared = {function.name for function in module.functions if function.is_declaration}
        if unknown := {f for f in declared if f.startswith("__hmf_") and f[6:] not in _FUNCTIONS}:
            raise CannotExecute(f"no function for {', '.join(sorted(unknown))}")
        # The engine owns its target machine: each has its own.
        target = llvm.Target.from_default_triple().create_target_machine(opt=2)
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self._address = self._engine.get_function_address(name)

    def __call__(self, grid: Sequence[int], values: Sequence[Any]) -> None:
        """Run each program, with the values of the arguments that aren't constants."""
        types, passed = list[Any](), list[Any]()
        for kind, value in zip(["memref", "memref", *self.kinds], [None, None, *values], strict=True):
            if kind.startswith("memref"):
                pointer, size = (0, 0) if value is None else (value.data_ptr(), _extent(value))
                types += [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
                passed += [pointer, pointer, 0, size, 1]
            else:
                types.append(_NUMBERS[kind])
                passed.append(value)
        function = ctypes.CFUNCTYPE(None, *types, *[ctypes.c_int32] * 6)(self._address)
        sizes = (*grid, 1, 1)[:3]
        for x, y, z in itertools.product(*map(range, sizes)):
            function(*passed, *sizes, x, y, z)


def _extent(tensor: torch.Tensor) -> int:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return steps + 1 if tensor.numel() else 0


def _run(*command: str | None, text: str) -> str:
    done = subprocess.run([str(part) for part in command], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = re.search(r"error: (.*)", done.stderr)
        raise CannotExecute(reason[1] if reason else done.stderr.strip()[:200])
    return done.stdout


_kept: list[Callable[..., Any]] = []


@functools.cache
def _prepare() -> None:
    """LLVM for this machine, and the functions that compiled kernels call."""
    llvm = _llvm()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    llvm.load_library_permanently(libm._name)
    for theirs, ours in _FUNCTIONS.items():
        llvm.add_symbol(f"__hmf_{theirs}", ctypes.cast(getattr(libm, ours), ctypes.c_void_p).value)

    # It returns bf16, in the low bits of the register of a float.
    @ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)
    def narrow(value: float) -> float:
        bits = int(torch.tensor(value).bfloat16().view(torch.int16).item()) & 0xFFFF
        return np.uint32(bits).view(np.float32).item()

    _kept.append(narrow)
    llvm.add_symbol("__truncsfbf2", ctypes.cast(narrow, ctypes.c_void_p).value)
