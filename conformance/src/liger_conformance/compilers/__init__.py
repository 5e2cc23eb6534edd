"""What compiles each language's kernels for chips that this machine doesn't have. Nothing is launched."""

from __future__ import annotations

from liger_conformance.compilers.compiler import Compiled, Compiler
from liger_conformance.compilers.triton import TritonCompiler
from liger_core.backend import BackendInfo

__all__ = ["Compiled", "Compiler", "compiler_of"]

_TRITON = TritonCompiler()


def compiler_of(backend: BackendInfo) -> Compiler | None:
    """The compiler of a language's kernels, or None when there is none here."""
    if backend.requires == "triton" and "cuda" in backend.devices:
        return _TRITON
    return None
