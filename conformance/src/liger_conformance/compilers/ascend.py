"""triton-ascend's compiler without an NPU: each launch is lowered to the adapter MLIR, and nothing is launched.

That is as far as triton-ascend goes by itself: its front end and its lowering of Triton to tiles in the Unified Buffer.
The rest, from there to a binary, is in CANN. What the tiles take is estimated.

Importing this module does not import triton; calling its functions does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import subprocess
import warnings
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from liger_conformance.compilers import ascend_execute
from liger_conformance.compilers.ascend_buffers import bytes_taken
from liger_conformance.compilers.ascend_execute import Executable
from liger_conformance.compilers.compiler import Compiled
from liger_conformance.compilers.triton import pointers
from liger_conformance.reach import untraced

MOST_PROGRAMS = 65535
"""Programs of a launch; more raise."""

TRIES = 5
"""Attempts to lower a kernel, if triton-adapter-opt dies. 3.2.0 at times reads freed memory in triton-to-unstructure:
of llama4_rope's launches 10 in 760 died, and passed when run again; of those of all ops 3 in 4044, all of rope."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Properties of a device that host code reads, and what a kernel may take of it.

    Attributes:
        arch: as triton-ascend names it.
        cores: vector cores.
        unified_buffer: bytes that one of them has.
    """

    arch: str
    cores: int
    unified_buffer: int


_CHIPS = {"ascend910b": Chip("Ascend910B2", 48, 192 << 10)}


class TritonAscendCompiler:
    """A `Compiler` of triton-ascend kernels, as far as to the adapter MLIR."""

    chips = tuple(_CHIPS)
    slow = False

    def obstacle(self) -> str | None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            return "TRITON_INTERPRET=1 is set, so that Triton interprets kernels: unset it"
        if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.triton_patch") is None:
            return "triton-ascend is not installed"
        return None

    def obstacle_to_execution(self) -> str | None:
        return self.obstacle() or ascend_execute.obstacle()

    @contextlib.contextmanager
    def executing(self, chip: str) -> Generator[str, None, None]:
        from triton import compiler
        from triton.runtime import driver

        driver.set_active(cast("Any", _Driver(_CHIPS[chip])))
        with mock.patch.object(compiler, "compile", _Lowered), _with_unified_buffer_of(_CHIPS[chip]):
            yield "cpu"

    @contextlib.contextmanager
    def compiling(self, chip: str) -> Generator[tuple[str, list[Compiled]], None, None]:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from triton import compiler
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        compiled: list[Compiled] = []
        compile = cast("Any", JITFunction).run

        @untraced
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            arguments = {**dict(zip(self.arg_names, args, strict=False)), **named}
            sizes = cast("Any", grid)(arguments) if callable(grid) else grid
            named = {name: pointers(value) for name, value in named.items()}
            lowered = compile(self, *pointers(args), grid=grid, warmup=True, **named)
            compiled.append(lowered.describe(_CHIPS[chip], math.prod(sizes)))

        driver.set_active(cast("Any", _Driver(_CHIPS[chip])))  # for good: there is no driver to go back to
        _name_npu()
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(compiler, "compile", _Lowered),
            _with_unified_buffer_of(_CHIPS[chip]),
            FakeTensorMode(),
        ):
            yield f"npu:{self.chips.index(chip)}", compiled


def _with_unified_buffer_of(chip: Chip) -> Any:
    """Unified Buffer that host code sizes its tiles for."""
    return mock.patch.dict(os.environ, {"ASCEND_UB_CAPACITY_BITS": str(chip.unified_buffer * 8)})


@functools.cache
def _name_npu() -> None:
    """Let torch know a device type "npu", as torch_npu does where it is loaded."""
    from torch.utils import backend_registration

    if not hasattr(torch, "npu"):
        backend_registration._setup_privateuseone_for_python_backend("npu")


class _Driver:
    """Driver that answers what Triton asks before it launches."""

    def __init__(self, chip: Chip) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("npu", chip.arch, 0)
        properties = {"max_shared_mem": 1, "num_aicore": chip.cores // 2, "num_vectorcore": chip.cores}

        def get_device_properties(device: int) -> dict[str, int]:
            return properties

        self.utils = SimpleNamespace(get_device_properties=get_device_properties, get_arch=lambda: chip.arch)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        """Benchmarker, which an autotuned kernel asks for when it is defined."""


class _Lowered:
    """A kernel as `triton.compiler.compile` would compile it, but lowered to the adapter MLIR only."""

    def __init__(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        from triton.compiler.compiler import make_backend

        self.source = source
        ir = importlib.import_module("triton._C.libtriton").ir  # of which there are no types
        backend = cast("Any", make_backend(target))
        parsed = backend.parse_options(options)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        metadata = {"hash": source.hash(), "target": target, **dataclasses.asdict(parsed)}
        codegen = backend.get_codegen_implementation()
        module = source.make_ir(parsed, codegen, backend.get_module_map(), context)
        module = stages["ttir"](module, metadata)
        for tried in range(1, TRIES + 1):
            try:
                self.mlir: str = stages["ttadapter"](module, metadata)
                break
            except subprocess.CalledProcessError as error:
                if error.returncode >= 0 or tried == TRIES:
                    raise RuntimeError(f"{source.name} can't be lowered:\n{error.stderr.decode()}") from error
                warnings.warn(f"triton-adapter-opt died of {source.name} and is run again", stacklevel=1)

    @functools.cached_property
    def generic(self) -> str:
        """The same in MLIR's generic form."""
        import triton

        tool = Path(triton.__file__).parent / "backends" / "ascend" / "triton-adapter-opt"
        command = [tool, "-", "--mlir-print-op-generic"]
        return subprocess.run(command, input=self.mlir, check=True, capture_output=True, text=True).stdout

    @functools.cached_property
    def bytes_taken(self) -> tuple[int, int]:
        return bytes_taken(self.generic)

    @functools.cached_property
    def executable(self) -> Executable:
        return Executable(self.mlir, self.generic)

    # Attributes that Triton asks of a compiled kernel to launch it.

    function = packed_metadata = None

    def launch_metadata(self, grid: Any, stream: Any, *values: Any) -> None:
        pass

    def _init_handles(self) -> None:
        pass

    def run(
        self,
        x: int,
        y: int,
        z: int,
        stream: Any,
        function: Any,
        packed: Any,
        metadata: Any,
        enter: Any,
        exit: Any,
        *values: Any,
    ) -> None:
        """Launch: on the CPU."""
        passed = [v for name, v in zip(self.source.signature, values, strict=True) if name not in self.source.constants]
        self.executable((x, y, z), passed)

    def describe(self, chip: Chip, programs: int) -> Compiled:
        """Variant that the kernel was lowered for, and the resources that it takes."""
        function, types = self.source.fn, dict(self.source.signature)
        aligned = self.source.attrs.divisibility_16
        named = [f"{p.name}={self.source.constants[p.name]}" for p in function.params if p.is_constexpr]
        given = [
            str(self.source.constants[p.name])
            if p.name in self.source.constants
            else f"{types[p.name]}{':16' if p.num in aligned else ''}"
            for p in function.params
            if not p.is_constexpr
        ]
        single, double = self.bytes_taken
        over, close = list[str](), list[str]()
        if single > chip.unified_buffer:
            over.append(f"about {single} bytes of Unified Buffer, of {chip.unified_buffer}")
        elif double > chip.unified_buffer:
            close.append(f"about {double} bytes of Unified Buffer with double buffers, of {chip.unified_buffer}")
        if programs > MOST_PROGRAMS:
            over.append(f"{programs} programs, of {MOST_PROGRAMS}")
        return Compiled(
            f"{function.module.rpartition('.')[2]}.{function.__name__}",
            f"{', '.join(named)}; {', '.join(given)}",
            {"bytes": single, "bytes with double buffers": double, "programs": programs},
            spills=0,
            over=tuple(over),
            close=tuple(close),
        )
