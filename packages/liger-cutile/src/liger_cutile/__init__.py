"""Liger ops in cuTile, for NVIDIA GPUs from sm_80 (Ampere) on. Chosen when asked for."""

from liger_core import BackendInfo
from liger_cutile._machine import INSTALL, refuses

backend = BackendInfo(
    "cutile",
    devices=("cuda",),
    requires="cuda",
    package=__name__,
    install=INSTALL,
    refuses=refuses,
)
