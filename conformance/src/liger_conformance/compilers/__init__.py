"""Compilers of each language's kernels for chips that this machine doesn't have. Nothing is launched."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import cast

from liger_conformance.compilers.ascend import TritonAscendCompiler
from liger_conformance.compilers.compiler import CannotExecute, Compiled, Compiler, Executor
from liger_conformance.compilers.cutile import CutileCompiler
from liger_conformance.compilers.triton import TritonCompiler
from liger_core.backend import BackendInfo

__all__ = ["CannotExecute", "Compiled", "Compiler", "Executor", "compiler_of", "executor_of"]

_TRITON = TritonCompiler()
_TRITON_ASCEND = TritonAscendCompiler()
_CUTILE = CutileCompiler()


@functools.cache
def _brought() -> dict[str, Compiler]:
    """The compilers that packages bring: entry points of the group ``liger.compilers``, named by language."""
    return {entry.name: entry.load() for entry in entry_points(group="liger.compilers")}


def compiler_of(backend: BackendInfo) -> Compiler | None:
    """The compiler of a language's kernels, or None when there is none here.

    The one that a package brings comes first.
    """
    if (brought := _brought().get(backend.language)) is not None:
        return brought
    if backend.requires == "triton" and "cuda" in backend.devices:
        return _TRITON
    if backend.requires == "triton" and "npu" in backend.devices:
        return _TRITON_ASCEND
    if backend.requires == "cuda":
        return _CUTILE
    return None


def executor_of(backend: BackendInfo) -> Executor | None:
    """Executor of a language's compiled kernels on the CPU, or None if there is none here."""
    compiler = compiler_of(backend)
    return cast("Executor", compiler) if hasattr(compiler, "executing") else None
