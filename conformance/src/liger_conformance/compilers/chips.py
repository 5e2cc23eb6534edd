"""Chips that kernels are compiled for, and what a program for one takes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Generator
from types import SimpleNamespace
from unittest import mock

import torch

from liger_conformance.compilers.alignment import misread, unaligned


@dataclasses.dataclass(frozen=True)
class Chip:
    """Properties of a device that host code reads, and what a kernel may take of it.

    Attributes:
        backend: of Triton: ``"cuda"`` or ``"hip"``.
        arch: as Triton names it.
        warp: threads of a warp.
        capability: as torch gives it.
        multiprocessors: of the machine named.
        shared: bytes of shared memory that a program can have.
        machine: one that has the chip.
    """

    backend: str
    arch: int | str
    warp: int
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    machine: str

    @property
    def properties(self) -> SimpleNamespace:
        """Properties that `torch.cuda.get_device_properties` would return, of those that depend on the chip alone."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.machine,
            major=major,
            minor=minor,
            gcnArchName=self.arch if self.backend == "hip" else None,
            multi_processor_count=self.multiprocessors,
            warp_size=self.warp,
            shared_memory_per_block_optin=self.shared,
        )


CHIPS = {
    "sm_90": Chip("cuda", 90, 32, (9, 0), 132, 227 << 10, "NVIDIA H200"),
    "sm_80": Chip("cuda", 80, 32, (8, 0), 108, 163 << 10, "NVIDIA A100"),
    "sm_100": Chip("cuda", 100, 32, (10, 0), 148, 227 << 10, "NVIDIA B200"),
    "sm_120": Chip("cuda", 120, 32, (12, 0), 170, 99 << 10, "NVIDIA GeForce RTX 5090"),
    "gfx942": Chip("hip", "gfx942", 64, (9, 4), 304, 64 << 10, "AMD Instinct MI300X"),
}


@contextlib.contextmanager
def torch_on(chip: Chip) -> Generator[None, None, None]:
    """Machine as torch describes it to host code. It has none of the GPUs that this machine may have."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=chip.properties),
        mock.patch.object(torch.version, "hip", "7.0" if chip.backend == "hip" else None),
    ):
        yield


def resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers of a thread, bytes of its stack, and bytes of shared memory of an NVIDIA program of one kernel."""
    text = _cuobjdump(cubin, "-res-usage")
    registers, stack, shared = (int(re.findall(rf"\b{name}:(\d+)", text)[-1]) for name in ("REG", "STACK", "SHARED"))
    return registers, stack, shared


def misaligned(cubin: bytes) -> tuple[str, ...]:
    """Loads and stores that go wrong in some thread, at an address that no access of their size can have."""
    return unaligned(_cuobjdump(cubin, "-sass"))


def half_addresses(cubin: bytes) -> tuple[str, ...]:
    """Where an element is taken from half of an address."""
    return misread(_cuobjdump(cubin, "-sass"))


def overwritten(cubin: bytes) -> tuple[str, ...]:
    """Bulk stores whose shared memory is handed back, to be written again, before they have read it.

    That is a barrier's arrival after the store, with no wait (``DEPBAR``) between.
    """
    return _too_early(cubin, "UTMASTG", r"SYNCS\.ARRIVE", "DEPBAR|EXIT")


def unawaited(cubin: bytes) -> tuple[str, ...]:
    """Bulk loads whose barrier is set up anew, for another load, before they have arrived.

    That is after the load, with no wait for a phase of the barrier between.
    """
    return _too_early(cubin, "UTMALDG", r"SYNCS\.CCTL\.IV", "PHASECHK")


def _too_early(cubin: bytes, first: str, second: str, between: str) -> tuple[str, ...]:
    """Two instructions, one after the other, with none between that there should be. Expressions say which they are."""
    found, begun = set[str](), None
    for line in _cuobjdump(cubin, "-sass").splitlines():
        if instruction := re.search(rf"\b({first}|{second}|{between})\b[^;]*", line):
            text = instruction[0].strip()
            if re.match(first, text):
                begun = text
            elif re.match(second, text) and begun:
                found.add(f"{begun}, {text}")
            else:
                begun = None
    return tuple(sorted(found))


def starved(cubin: bytes, registers: int) -> str | None:
    """Registers that the warps of a program wait for forever, more than its launch holds; or None.

    Warps exchange registers (``USETMAXREG``), four warps at a time: some take more than each has at the launch, once the
    others have given up as many.

    Args:
        cubin: of one kernel.
        registers: of a thread at the launch.
    """
    text = _cuobjdump(cubin, "-elf")
    if "EIATTR_REG_RECONFIG" not in text:
        return None
    threads = math.prod(int(n, 16) for n in re.findall(r"EIATTR_REQNTID\n.*\n\s*Value:\s*(.*)", text)[0].split())
    held, group = registers * threads, 4 * 32
    # To disassemble takes long. Of two groups, tileiras has always given one what the other has too much. Nor can it
    # matter where the launch holds what all groups but one can take.
    if threads <= 2 * group or held >= 232 * (threads - group) + 32 * group:
        return None
    changes = re.findall(r"\bUSETMAXREG\.(\w+)[^;]*?(0x[0-9a-f]+)\s*;", _cuobjdump(cubin, "-sass"))
    taken = [int(n, 16) for kind, n in changes if kind == "TRY_ALLOC"]
    left = min((int(n, 16) for kind, n in changes if kind == "DEALLOC"), default=registers)
    least = group * sum(taken) + (threads - group * len(taken)) * left
    return f"{least} of {held} registers, with {threads} threads" if least > held else None


@functools.lru_cache(maxsize=3)  # what is asked of one program
def _cuobjdump(cubin: bytes, option: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
