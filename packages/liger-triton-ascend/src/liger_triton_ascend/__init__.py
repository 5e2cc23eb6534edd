"""Liger ops in triton-ascend, for Ascend NPUs. Under TRITON_INTERPRET=1 they run on the CPU, in Triton's interpreter."""

import os

from liger_core import BackendInfo
from liger_triton_ascend._machine import INSTALL, refuses

_interpreted = os.environ.get("TRITON_INTERPRET") == "1"

backend = BackendInfo(
    "triton-ascend",
    devices=("npu", "cpu") if _interpreted else ("npu",),
    default_devices=("npu",),
    requires="triton",
    package=__name__,
    install=INSTALL,
    refuses=refuses,
)
