"""Whether this machine can compile and run cuTile kernels, and what to do when it can't."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from liger_core.backend import install_command

INSTALL = install_command("cutile")
HOMES = ("CUDA_HOME", "CUDA_PATH")
COMPILERS = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")

# A Tile IR program of format 13.1 without functions, as cuda.tile writes it.
EMPTY_PROGRAM = bytes.fromhex(
    "7f54696c654952000d010000820108cb00840808cbcbcbcb00cbcbcbcbcbcbcb831108cbcbcbcbcb00cbcbcb00"
    "cbcbcb01cbcbcb0000000000850e0402cbcbcb00000000010000000003810404cbcbcb00cbcbcb00"
)


@functools.cache
def refuses(device: str) -> str | None:
    """Why cuTile kernels can't run on `device` here, and how to fix it. The first answer is kept.

    An interpreter of Tile IR runs on the CPU, and needs neither a driver nor the compilers.
    """
    return _cuda_tile() or ((_gpu() or _compiler()) if device == "cuda" else None)


def _cuda_tile() -> str | None:
    # `cuda` has other packages of NVIDIA's as well, torch's among them.
    installed = find_spec("cuda") and find_spec("cuda.tile")
    return None if installed else f"cuda-tile is not installed: {INSTALL}"


def _gpu() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build that has it"
    driver = _driver()
    if driver is None:
        return "there is no NVIDIA driver (libcuda.so.1): install r580 or later"
    if driver < 13000:
        return (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10} and cuTile needs 13.0: "
            "install driver r580 or later"
        )
    if not torch.cuda.is_available():
        return "torch finds no GPU: see what nvidia-smi lists and what CUDA_VISIBLE_DEVICES hides"
    newest = max(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if newest < (8, 0):
        return f"cuTile needs sm_80 (Ampere) or later and this GPU is sm_{newest[0]}{newest[1]}: use liger-core[triton]"
    return None


def _driver() -> int | None:
    """The CUDA version that the driver supports, 13000 for r580. It starts no context.

    It asks the library that will load the kernels. NVML would give the version of the kernel module, which CUDA's compatibility
    package overrides. torch has the number under a private name, and not in every release.
    """
    try:
        query = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except OSError:
        return None
    number = ctypes.c_int()
    return number.value if query(ctypes.byref(number)) == 0 else None


def _compiler() -> str | None:
    """Why cuda.tile can't compile, or None.

    If the three packages share a minor version, cuda.tile takes tileiras from them. Otherwise it takes one from PATH or a CUDA
    toolkit.
    """
    installed = {name: _version(name) for name in COMPILERS}
    absent = [name for name, number in installed.items() if number is None]
    minors = {tuple(number.split(".")[:2]) for number in installed.values() if number}
    if not absent and len(minors) == 1 and _wheels_tileiras():
        return None
    if tileiras := _system_tileiras():
        return _trial(*tileiras)
    if absent:
        return f"{', '.join(absent)} not installed, and no tileiras on PATH: {INSTALL}"
    if len(minors) > 1:
        numbers = ", ".join(f"{name} {number}" for name, number in installed.items())
        return f"cuda.tile needs compilers of one minor version, not {numbers}: {INSTALL}"
    return f"{COMPILERS[0]} {installed[COMPILERS[0]]} has lost its tileiras: {INSTALL} --reinstall"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wheels_tileiras() -> str | None:
    spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    folders = (spec and spec.submodule_search_locations) or ()
    paths = (shutil.which("tileiras", path=f"{folder}/bin") for folder in folders)
    return next((path for path in paths if path), None)


def _system_tileiras() -> tuple[str, dict[str, str]] | None:
    """The tileiras that cuda.tile falls back on, and the environment in which cuda.tile runs it."""
    home = os.environ.get("CUDA_HOME")
    if path := shutil.which("tileiras") or (home and shutil.which("tileiras", path=f"{home}/bin")):
        return path, dict(os.environ)
    default = os.pathsep.join(f"{folder}/bin" for folder in sorted(glob("/usr/local/cuda*")))
    path = shutil.which("tileiras", path=default)
    return (path, _without(HOMES)) if path else None


def _trial(tileiras: str, environment: dict[str, str]) -> str | None:
    """Why a tileiras that isn't from the wheels fails, found by a trial run; or None.

    It loads the libnvvm of CUDA_HOME or CUDA_PATH instead of its own. If that one is older or missing, it fails with "Return
    code 5". cuda.tile hides the two variables from the wheels' tileiras.
    """
    error = _compile_nothing(tileiras, environment)
    if error is None:
        return None
    culprits = [name for name in HOMES if environment.get(name)]
    if culprits and _compile_nothing(tileiras, _without(HOMES)) is None:
        settings = " and ".join(f"{name}={environment[name]}" for name in culprits)
        return (
            f'{settings} makes {tileiras} load the libnvvm of another CUDA toolkit, and it fails with "Return code 5": '
            f"unset {' '.join(culprits)}"
        )
    return f"{tileiras} can't compile an empty program ({error}): {INSTALL}"


def _without(names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


def _compile_nothing(tileiras: str, environment: dict[str, str]) -> str | None:
    """tileiras's complaint about an empty program, or None. It takes 20 to 40 ms."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "empty.tileirbc")
        program.write_bytes(EMPTY_PROGRAM)
        command = [tileiras, str(program), "-o", f"{program}.cubin", "--gpu-name", "sm_80"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return f"{done.stderr.strip()}, return code {done.returncode}" if done.returncode else None
