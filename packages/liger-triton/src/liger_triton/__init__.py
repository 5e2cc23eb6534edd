"""Liger ops in Triton, for CUDA, ROCm and XPU; on the CPU in Triton's interpreter, under TRITON_INTERPRET=1."""

import os

from liger_core import BackendInfo
from liger_core.backend import install_command

_interpreted = os.environ.get("TRITON_INTERPRET") == "1"

backend = BackendInfo(
    "triton",
    devices=("cuda", "xpu", "cpu") if _interpreted else ("cuda", "xpu"),
    default_devices=("cuda", "xpu"),
    requires="triton",
    package=__name__,
    install=install_command("triton"),
    tells_launches=True,
)
