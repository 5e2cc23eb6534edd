"""Whether this machine can run triton-ascend kernels, and what to do when it can't."""

import functools
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

import torch

from liger_core.backend import install_command

INSTALL = install_command("triton-ascend")
ALONE = 'uv pip uninstall triton triton-ascend && uv pip install --no-deps "triton-ascend==3.2.*"'


def refuses(device: str) -> str | None:
    """Why triton-ascend kernels can't run on `device` here, and how to fix it."""
    return _clash() or (_npu() if device == "npu" else None)


def _npu() -> str | None:
    if find_spec("torch_npu") is None:
        return 'torch_npu is not installed: uv pip install "liger-triton-ascend[npu]"'
    npu = getattr(torch, "npu", None)
    if npu is None:
        return "torch_npu is installed and not loaded: import torch_npu, or unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    if not npu.is_available():
        return "torch_npu finds no NPU: source CANN's set_env.sh, and see what npu-smi info lists"
    return None


@functools.cache
def _clash() -> str | None:
    """Why the `triton` on disk is not all triton-ascend's.

    triton and triton-ascend share 34 paths, `triton/__init__.py` and `libtriton.so` among them. If both are installed, either
    can win, file by file. So neither `triton.__version__` nor `triton/backends/ascend` proves anything. The file sizes that
    triton-ascend recorded do.
    """
    try:
        ours = distribution("triton-ascend")
    except PackageNotFoundError:
        newest = "; it has wheels for Python 3.11 and older" if sys.version_info >= (3, 12) else ""
        return f"triton-ascend is not installed{newest}: {INSTALL}"
    try:
        return f"triton {version('triton')} is installed beside triton-ascend and overwrites it: {ALONE}"
    except PackageNotFoundError:
        pass
    for path in ours.files or ():
        if path.parts[0] == "triton" and path.size is not None:
            installed = Path(path.locate())
            if not installed.exists() or installed.stat().st_size != path.size:
                return f"{installed} is not the one that triton-ascend installed: {ALONE}"
    return None
