"""cuTile's compiler without a GPU: host code runs on tensors without data, and each launch is compiled and not run.

NVIDIA's front end writes the bytecode, tileiras makes it a program for a chip, and says which instructions it chose.

Importing this module does not import cuda.tile; calling its functions does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from liger_conformance import sources
from liger_conformance.compilers import alignment, chips, results
from liger_conformance.compilers.chips import (
    CHIPS,
    Chip,
    half_addresses,
    misaligned,
    overwritten,
    resource_usage,
    starved,
    torch_on,
    unawaited,
)
from liger_conformance.compilers.compiler import Compiled
from liger_conformance.interpreters.tileir import capture
from liger_conformance.interpreters.tileir.bytecode import Module, Op
from liger_conformance.reach import untraced

CACHE: Path | None = None
"""Where what tileiras made is kept, for other processes, runs and checkouts: a file for each bytecode, chip and version of it."""

DAYS = 30
"""After which what nobody has read leaves `CACHE`."""

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "int32": "i32", "int64": "i64"}

_NEVER_BULK = (
    "leading tile dimension not 16-byte aligned",
    "no contiguous dimension found",
    "unsupported element type for TMA operations",
)
"""Why a single element, a column or booleans are no bulk copy, whatever the kernel and its host code do."""


class CutileCompiler:
    """A `Compiler` of cuTile kernels for NVIDIA's chips."""

    chips = ("sm_90", "sm_80", "sm_100", "sm_120")
    slow = True

    def obstacle(self) -> str | None:
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.tile") is None:
            return "cuda-tile is not installed"
        if importlib.util.find_spec("triton") is None:
            return "triton, whose cuobjdump reads what is compiled, is not installed"
        if os.environ.get("CUTILE_INTERPRET") == "1":
            return "CUTILE_INTERPRET=1 is set, so that kernels are interpreted: unset it"
        capture.stand_in_for_libcuda()
        from cuda.tile import _compile

        try:
            _compile._find_compiler_bin()
        except FileNotFoundError as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def compiling(self, chip: str) -> Generator[tuple[str, list[Compiled]], None, None]:
        capture.stand_in_for_libcuda()
        import cuda.tile
        from torch._subclasses.fake_tensor import FakeTensorMode

        compiled: list[Compiled] = []

        @untraced
        def launch(stream: Any, grid: Any, kernel: Any, arguments: tuple[Any, ...], /, **options: Any) -> None:
            capture.check_grid(grid)
            compiled.append(_compile_once(kernel, capture.signature(kernel, arguments), chip))

        # A device for each chip, so that what host code remembers of one device is not taken for another's.
        device = self.chips.index(chip)
        with (
            mock.patch.object(cuda.tile, "launch", launch),
            mock.patch.object(torch._C, "_cuda_getDevice", return_value=device, create=True),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0)),
            torch_on(CHIPS[chip]),
            FakeTensorMode(),
        ):
            yield f"cuda:{device}", compiled


class Resources(NamedTuple):
    """Resources that a launch takes of its chip, and the compiler's words on what it could not use."""

    registers: int
    stack: int
    """Bytes of a thread."""
    shared: int
    """Bytes of a block."""
    bulk_copies: int
    products: int
    lost: list[str]
    lines: str = ""
    """A digest of the lines that `lost` names, if it names any."""


_made: dict[tuple[Any, str, str], Compiled] = {}


def _compile_once(kernel: Any, signature: Any, chip: str) -> Compiled:
    key = kernel, signature.symbol, chip
    if key not in _made:
        _made[key] = _describe(kernel, signature, CHIPS[chip], _look_up(kernel, signature, chip))
    return _made[key]


def _look_up(kernel: Any, signature: Any, chip: str) -> Resources:
    """Resources of a launch: as `results.current` has them, or else compiled."""
    if results.current is None:
        return _compile(kernel, signature, chip)
    try:
        source, placed = (sources.digest(kernel._pyfunc, lines) for lines in (False, True))
    except sources.NoDigest:
        return _compile(kernel, signature, chip)

    def compile() -> Resources:
        resources = _compile(kernel, signature, chip)
        return resources._replace(lines=placed[: results.DIGITS] if resources.lost else "")

    def is_current(result: list[Any]) -> bool:
        return Resources(*result).lines in ("", placed[: results.DIGITS])

    options = repr(kernel._compiler_options)
    launch = "\0".join((_compiler(), source, options, signature.symbol, chip))
    return Resources(*results.current.of(chip, _name(kernel._pyfunc), launch, compile, is_current))


@functools.cache
def _compiler() -> str:
    """Versions of what compiles, and a digest of what reads the result here."""
    reads = sources.of_modules(sys.modules[__name__], chips, alignment, capture)
    return f"{_version().decode()} cuda-tile {version('cuda-tile')} Tile IR {capture.bytecode_version()} {reads}"


def _name(function: Any) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _describe(kernel: Any, signature: Any, chip: Chip, resources: Resources) -> Compiled:
    """Variant that a launch was compiled for, and its resources."""
    over = [f"{resources.shared} bytes of shared memory, of {chip.shared}"] if resources.shared > chip.shared else []
    return Compiled(
        _name(kernel._pyfunc),
        _variant(kernel._pyfunc, signature),
        {
            "registers": resources.registers,
            "bytes of stack": resources.stack,
            "bytes shared": resources.shared,
            "bulk copies": resources.bulk_copies,
            "matrix products": resources.products,
        },
        -(-resources.stack // 4),
        tuple(over),
        tuple(resources.lost),
    )


def _compile(kernel: Any, signature: Any, chip: str) -> Resources:
    """Compile a kernel for a chip, and read what it takes.

    Raises:
        RuntimeError: tileiras fails, with what it says; or what it makes would fail with a misaligned address, compute with
            addresses or with what hasn't arrived, store what was written after it, or never end.
    """
    with capture.without_folders():
        code = capture.bytecode(kernel, signature, chip)
    name = kernel._pyfunc.__name__
    made, said = _run_tileiras(code, chip, name)
    registers, stack, shared = resource_usage(made)
    # Errors of tileiras 13.4. Disassembly takes longer than compilation, so only suspect programs are disassembled.
    # A small tile that it splits, or repeats, as it loads it; and tiles beside those of a tensor that lies on its side.
    ops = tuple(_ops(code))
    if _splits(ops) and (wrong := misaligned(made)):
        raise RuntimeError(f"tileiras compiled {name} for {chip} to accesses that aren't aligned: {'; '.join(wrong)}")
    if _holds_few(ops) and (wrong := half_addresses(made)):
        raise RuntimeError(
            f"tileiras compiled {name} for {chip} to take elements from half of an address: {'; '.join(wrong)}; ct.gather"
            " for a tile of so few elements mends it"
        )
    if _bulk_stores(said) > 1 and (wrong := overwritten(made)):  # some loops with two of them
        raise RuntimeError(
            f"tileiras compiled {name} for {chip} to bulk stores whose shared memory is handed back before they have read"
            f" it: {'; '.join(wrong)}; allow_tma=False for one of them mends it"
        )
    if _loads_scattered(ops) and (wrong := unawaited(made)):
        raise RuntimeError(
            f"tileiras compiled {name} for {chip} to bulk loads whose barrier is set up anew before they have arrived:"
            f" {'; '.join(wrong[:4])}; allow_tma=False, or a view of which tiles can be loaded, mends it"
        )
    bulk_copies, products = _instructions(said)
    if bulk_copies and (wanted := starved(made, registers)):  # some whose copies hang on a condition
        raise RuntimeError(
            f"tileiras compiled {name} for {chip} to a program that never ends: its warps wait for {wanted};"
            " allow_tma=False for one of its copies mends it"
        )
    return Resources(registers, stack, shared, bulk_copies, products, _lost(said, CHIPS[chip]))


def _run_tileiras(code: bytes, chip: str, name: str) -> tuple[bytes, str]:
    """The program that tileiras makes of bytecode, and its remarks; from `CACHE` where it has made it before."""
    kept = None
    if CACHE is not None:
        kept = CACHE / hashlib.sha256(b"\0".join((_version(), chip.encode(), code))).hexdigest()
        if kept.exists():
            os.utime(kept)
            with zipfile.ZipFile(kept) as archive:
                return archive.read("cubin"), archive.read("remarks").decode()
    with tempfile.TemporaryDirectory() as folder:
        program, cubin, remarks = (Path(folder, file) for file in ("kernel.tileirbc", "kernel.cubin", "remarks.yaml"))
        program.write_bytes(code)
        path, environment = _tileiras()
        command = [path, program, "-o", cubin, "--gpu-name", chip]
        command += ["--remarks=all", "--remark-format=yaml", f"--remarks-output-file={remarks}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"tileiras can't compile {name} for {chip}:\n{done.stderr}")
        made, said = cubin.read_bytes(), remarks.read_text()
    if kept is not None:
        part = kept.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("cubin", made)
            archive.writestr("remarks", said)
        part.replace(kept)
    return made, said


def swept(folder: Path) -> Path:
    """A folder for `CACHE`, made if there is none, without the files that nobody has read for `DAYS`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
            if file.stat().st_mtime < time.time() - DAYS * 24 * 3600:
                file.unlink()
    return folder


@functools.cache
def _version() -> bytes:
    path, environment = _tileiras()
    return subprocess.run([path, "--version"], env=environment, capture_output=True, check=True).stdout


def _ops(code: bytes) -> Iterator[Op]:
    """The operations of a program; those of an operation's regions come later."""
    blocks = [function.body for function in Module(code).functions]
    for block in blocks:
        for op in block.ops:
            blocks += op.regions
            yield op


def _splits(ops: Iterable[Op]) -> bool:
    """Whether a program may have accesses that aren't aligned.

    It takes parts of tiles, or repeats the elements of a tile as it was loaded along the last axis, or takes tiles of a tensor
    whose elements lie side by side along another axis than the last.
    """
    loaded: dict[int, tuple[Any, ...]] = {}
    for op in ops:
        if op.name == "extract":
            return True
        if op.name == "make_tensor_view" and 1 in op.types[0].strides[:-1] and op.types[0].strides[-1] != 1:
            return True
        if op.name in ("load_view", "load_ptr"):
            loaded[op.results[0]] = op.types[0].shape
        elif op.name not in ("reduce", "scan", "mma") and (from_ := [loaded[v] for v in op.operands if v in loaded]):
            repeats = op.name == "broadcast" and from_[0][-1:] == (1,) != op.types[0].shape[-1:]
            if repeats and math.prod(from_[0]) > 1:
                return True
            loaded |= {v: t.shape for v, t in zip(op.results, op.types, strict=True)}
    return False


def _holds_few(ops: Iterable[Op]) -> bool:
    """Whether a program loads a tile of so few 16-bit elements that a thread may hold all of it."""
    loads = [op.types[0] for op in ops if op.name in ("load_view", "load_ptr")]
    return any(tile.element in ("f16", "bf16") and 1 < math.prod(tile.shape) <= 32 for tile in loads)


def _loads_scattered(ops: Iterable[Op]) -> bool:
    """Whether a program loads or stores tiles of which each row may lie anywhere."""
    return any(made.kind == "gather" for op in ops for made in op.types)


@functools.cache
def _tileiras() -> tuple[str, dict[str, str]]:
    """The compiler that cuda.tile would run, and its environment, in which no CUDA toolkit is named."""
    from cuda.tile import _compile

    found = _compile._find_compiler_bin()
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    return found.path, environment | ({"PATH": found.bin_path} if found.bin_path else {})


def _variant(function: Any, signature: Any) -> str:
    """Variant that a kernel was compiled for: its constants, and the types of the other arguments."""
    constants, types = list[str](), list[str]()
    for name, found in zip(inspect.signature(function).parameters, signature.parameters, strict=True):
        if hasattr(found, "value"):
            constants.append(f"{name}={found.value}")
        elif hasattr(found, "ndim"):
            # Lengths and strides divisible by 16 bytes, all but the constant 1.
            aligned = all(
                constant == 1 or by * _bits(found.dtype) % 128 == 0
                for constant, by in zip(found.stride_constant, found.stride_divisible_by, strict=True)
            )
            types.append(f"{found.ndim}D {_short(found.dtype)}" + ":16" * aligned)
        elif hasattr(found, "items"):
            types.append("None" if not found.items else "tuple")
        else:
            types.append(_short(found.dtype) if hasattr(found, "dtype") else "list")
    return f"{', '.join(constants)}; {', '.join(types)}"


def _short(dtype: Any) -> str:
    name: str = dtype.name
    return _SHORT.get(name, name)


def _bits(dtype: Any) -> int:
    return int(re.sub(r"\D", "", dtype.name) or 8)


def _remarks(text: str) -> Iterator[SimpleNamespace]:
    """Remarks of tileiras on each load, store and matrix product: kind, name, place and the rest, by its own words."""
    for part in text.split("--- !")[1:]:
        kind, _, rest = part.partition("\n")
        place = re.search(r"File: '([^']*)', Line: (\d+)", rest)
        yield SimpleNamespace(
            kind=kind.strip(),
            name=next(iter(re.findall(r"^Name: +(\S+)", rest, re.M)), ""),
            place=f"{Path(place[1]).name}:{place[2]}" if place else "?",
            instruction=next(iter(re.findall(r"- Instruction: +(.*)", rest)), ""),
            reasons=sorted({r.rsplit("): ", 1)[-1].strip("' ") for r in re.findall(r"- Reason: +(.*)", rest)}),
        )


def _instructions(text: str) -> tuple[int, int]:
    """Places that load or store with the tensor memory accelerator, and places that multiply on tensor cores."""
    chosen = {(remark.place, remark.name, remark.instruction) for remark in _remarks(text) if remark.kind == "Passed"}
    bulk = sum(instruction.startswith("TMA") for _, _, instruction in chosen)
    cores = sum("TensorCore" in name for _, name, _ in chosen)
    return bulk, cores


def _bulk_stores(text: str) -> int:
    """Places that store with the tensor memory accelerator."""
    return len({remark.place for remark in _remarks(text) if remark.instruction.startswith("TMA Store")})


def _lost(text: str, chip: Chip) -> list[str]:
    """Loads and stores that could be bulk copies, and products that could be on tensor cores, and are not."""
    found = set[str]()
    for remark in _remarks(text):
        if remark.kind != "Failure":
            continue
        reasons = [reason for reason in remark.reasons if reason not in _NEVER_BULK]
        if "Tma" in remark.name and (chip.capability < (9, 0) or not reasons):
            continue
        found.add(f"{remark.name.removeprefix('Remark')} at {remark.place}: {', '.join(reasons) or remark.instruction}")
    return sorted(found)
