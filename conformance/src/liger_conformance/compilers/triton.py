"""Triton's compiler without a GPU: a driver of a machine that has every chip, on which nothing is launched.

The machine has one device for each chip, so that what host code remembers of one device is not taken for another's.
Its tensors have a device, a dtype, a shape and strides, and no data.

Importing this module does not import triton; calling its functions does.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor

from liger_conformance import sources
from liger_conformance.compilers import chips, results
from liger_conformance.compilers.chips import CHIPS, Chip, resource_usage, torch_on
from liger_conformance.compilers.compiler import Compiled
from liger_conformance.reach import untraced

THREADS = 1024
"""The most of a program, on each chip."""

TENSOR_MEMORY = 512
"""Columns, on the chips that have it."""

REGISTERS = 1 << 16
"""Of a multiprocessor of NVIDIA's, which a program's threads share; up to 255 a thread."""

FEW = 8
"""Registers that ptxas may keep in memory by its own choice."""


class TritonCompiler:
    """A `Compiler` of Triton kernels for NVIDIA's and AMD's chips."""

    chips = tuple(CHIPS)
    slow = False

    def obstacle(self) -> str | None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            return "TRITON_INTERPRET=1 is set, so that Triton interprets kernels: unset it"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
            return f"triton {triton.__version__} is older than 3.4"
        return None

    @contextlib.contextmanager
    def compiling(self, chip: str) -> Generator[tuple[str, list[Compiled]], None, None]:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from triton.runtime import driver
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        compiled: list[Compiled] = []
        compile = cast("Any", JITFunction).run

        @untraced
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            named = {name: pointers(value) for name, value in named.items()}
            launch = compile(self, *pointers(args), grid=grid, warmup=True, **named)
            compiled.append(_describe(launch, CHIPS[chip]))

        device = self.chips.index(chip)
        # For good: there is no driver to go back to.
        driver.set_active(cast("Any", _Driver(CHIPS[chip], device)))
        _measure_launches()
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(Autotuner, "run", _every_configuration),
            torch_on(CHIPS[chip]),
            FakeTensorMode(),
        ):
            yield f"cuda:{device}", compiled


class _Driver:
    """Driver that answers what Triton asks before it launches."""

    def __init__(self, chip: Chip, device: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target, self.device = GPUTarget(chip.backend, chip.arch, chip.warp), device
        properties = {
            "max_shared_mem": chip.shared,
            "multiprocessor_count": chip.multiprocessors,
            "warpSize": chip.warp,
        }

        def get_device_properties(device: int) -> dict[str, int]:
            return properties

        self.utils = SimpleNamespace(get_device_properties=get_device_properties)

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.device)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _every_configuration(self: Any, *args: Any, **named: Any) -> None:
    """In place of `Autotuner.run`: which configuration is the fastest is not known without the chip."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(named):
        chosen = {**named, **config.all_kwargs()}
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **chosen})
        self.fn.run(*args, **chosen)


class _Pointer:
    """A tensor as Triton sees it: a kernel is compiled for its dtype and alignment and, on AMD, for memory below 2 GiB."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride
        self.offset = int(tensor.storage_offset()) * tensor.element_size()
        self.size = tensor.untyped_storage().size()

    def data_ptr(self) -> int:
        """Relative to memory as it is allocated, which is aligned."""
        return self.offset

    def ptr_range(self) -> int:
        return self.size


def pointers(value: Any) -> Any:
    """Arguments of a launch, with pointers for tensors."""
    if isinstance(value, Tensor):
        return _Pointer(value)
    if isinstance(value, tuple):
        make = getattr(cast("Any", value), "_make", tuple)  # of a NamedTuple
        return make(map(pointers, cast("tuple[Any, ...]", value)))
    return value


class Resources(NamedTuple):
    """Resources that a launch takes of its chip, and what may be wrong with its code."""

    registers: int
    stack: int
    """Bytes of a thread."""
    spilled: int
    """Registers that the compiler says are kept in memory; ptxas doesn't say."""
    shared: int
    """Bytes of a program."""
    tensor_memory: int
    """Columns of a program."""
    warps: int
    stages: int
    scattered: int
    """See `scattered_reductions`."""


class _Launch(NamedTuple):
    """In place of a triton.compiler.CompiledKernel, of which nothing else is read where nothing runs."""

    src: Any
    resources: Resources


@functools.cache
def _measure_launches() -> None:
    """Let Triton return a `_Launch` for what it compiles, from `results.current` where that has it. For good, in this process."""
    from triton import compiler

    triton: Any = compiler
    compile = triton.compile

    def measure(src: Any, target: Any, options: dict[str, Any], **named: Any) -> _Launch:
        def resources() -> Resources:
            return _resources(compile(src, target=target, options=options, **named))

        if results.current is None:
            return _Launch(src, resources())
        try:
            launch = _key(src, target, options)
        except sources.NoDigest:
            return _Launch(src, resources())
        chip = next(name for name, chip in CHIPS.items() if (chip.backend, chip.arch) == (target.backend, target.arch))
        return _Launch(src, Resources(*results.current.of(chip, _name(src.fn), launch, resources)))

    triton.compile = measure


def _key(src: Any, target: Any, options: dict[str, Any]) -> str:
    """All that decides what Triton compiles a launch to: what its own cache goes by, but for line numbers and folders."""
    from triton import compiler
    from triton._C import libtriton

    backend: Any = cast("Any", compiler).make_backend(target)
    variables: dict[str, str] = cast("Any", libtriton).get_cache_invalidating_env_vars()
    chosen = cast("dict[str, Any]", vars(backend.parse_options({**options, **src.parse_options()})))
    libraries = [(name, _digest(path)) for name, path in chosen["extern_libs"]]
    constants = {place: _constant(value) for place, value in src.constants.items()}
    parts: tuple[object, ...] = (
        _compiler(),
        backend.hash(),
        sources.digest(src.fn.fn),
        [*src.signature.items()],
        sorted(src.attrs.items()),
        sorted(constants.items()),
        sorted((name, str(value)) for name, value in chosen.items() if name != "extern_libs"),
        libraries,
        sorted(variables.items()),
    )
    return repr(parts)


def _constant(value: Any) -> str:
    function = getattr(value, "fn", None)
    return str(value) if function is None else sources.digest(function)


@functools.cache
def _compiler() -> str:
    """Triton's version, and a digest of what reads the result here. A digest of its library would take each process a second."""
    import triton

    return f"triton {triton.__version__} {sources.of_modules(sys.modules[__name__], chips)}"


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _name(function: Any) -> str:
    return f"{function.module.rpartition('.')[2]}.{function.__name__}"


def _describe(launch: _Launch, chip: Chip) -> Compiled:
    """Variant that a launch was compiled for, and its resources."""
    src, resources = launch
    constants = {path[0]: value for path, value in src.constants.items()}
    # Divisible by 16; on AMD also an address range of 32 bits.
    facts = {path[0]: [f":{value}" for _, value in attributes] for path, attributes in src.attrs.items()}
    named, types = list[str](), list[str]()
    for parameter, kind in zip(src.fn.params, src.signature.values(), strict=True):
        if parameter.is_constexpr:
            named.append(f"{parameter.name}={constants[parameter.num]}")
        elif kind == "constexpr":  # None, or an integer of 1
            types.append(str(constants[parameter.num]))
        else:
            types.append("".join([str(kind), *facts.get(parameter.num, ())]))
    named += [f"num_warps={resources.warps}", f"num_stages={resources.stages}"]
    over = list[str]()
    if resources.shared > chip.shared:
        over.append(f"{resources.shared} bytes of shared memory, of {chip.shared}")
    if resources.warps * chip.warp > THREADS:
        over.append(f"{resources.warps} warps of {chip.warp} threads, of {THREADS} threads")
    if resources.tensor_memory > TENSOR_MEMORY:
        over.append(f"{resources.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY}")
    if resources.scattered:
        over.append(
            f"{resources.scattered} reductions over lanes that don't follow each other, which Triton up to 3.6 gets wrong"
        )
    return Compiled(
        _name(src.fn),
        f"{', '.join(named)}; {', '.join(types)}",
        {"registers": resources.registers, "bytes of stack": resources.stack, "bytes shared": resources.shared},
        _spills(resources, chip),
        tuple(over),
    )


_LINEAR = re.compile(r"^#(\w+) = #ttg\.linear<\{.*?lane = (\[.*?\]), warp = ", re.M)
_REDUCTION = re.compile(r"\"tt\.reduce\"\(.*?<\{axis = (\d+) : i32\}>.*?^ *\}\) : \(tensor<[^#]*#(\w+)>", re.M | re.S)


def scattered_reductions(ttgir: str) -> int:
    """Reductions whose elements lie in lanes of a warp with other ones' between them.

    Triton 3.5 and 3.6 combine as many lanes that follow each other, so those of other reductions. A tensor gets such a
    layout where dimensions that aren't adjacent in a warp are reshaped to one.
    """
    lanes = {name: ast.literal_eval(bases) for name, bases in _LINEAR.findall(ttgir)}
    count = 0
    for axis, layout in _REDUCTION.findall(ttgir):
        bits = [bit for bit, base in enumerate(lanes.get(layout, ())) if base[int(axis)]]
        count += bool(bits) and bits[-1] - bits[0] >= len(bits)
    return count


def _resources(kernel: Any) -> Resources:
    """Resources that a triton.compiler.CompiledKernel takes."""
    if "amdgcn" in kernel.asm:
        fields = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        numbers = [re.search(rf"^\s*\.{field}: +(\d+)", kernel.asm["amdgcn"], re.M) for field in fields]
        registers, stack, spilled = (int(found[1]) for found in numbers if found)
    else:
        (registers, stack, _), spilled = resource_usage(kernel.asm["cubin"]), 0
    metadata = kernel.metadata
    return Resources(
        registers,
        stack,
        spilled,
        metadata.shared,
        getattr(metadata, "tmem_size", None) or 0,
        metadata.num_warps,
        metadata.num_stages,
        scattered_reductions(kernel.asm["ttgir"]),
    )


def _spills(resources: Resources, chip: Chip) -> int:
    """Registers of a thread that are kept in memory for want of others.

    ptxas keeps some in memory although there are more, where a multiprocessor then holds one more program. A few of
    them are not for want of others.
    """
    in_memory = -(-resources.stack // 4)
    if chip.backend == "hip":
        return max(resources.spilled, in_memory)
    most = min(255, REGISTERS // (resources.warps * 32))
    chosen = in_memory <= FEW and resources.registers <= most - 8  # they are given out by eight
    return 0 if chosen else in_memory
