"""Liger ops in cuTile, for NVIDIA GPUs from sm_80 (Ampere) on. cuTile is opt-in.

Under CUTILE_INTERPRET=1 they run on the CPU, in an interpreter of Tile IR.
"""

import os

from liger_core import BackendInfo
from liger_cutile._machine import INSTALL, refuses

_interpreted = os.environ.get("CUTILE_INTERPRET") == "1"

backend = BackendInfo(
    "cutile",
    devices=("cuda", "cpu") if _interpreted else ("cuda",),
    requires="cuda",
    package=__name__,
    install=INSTALL,
    refuses=refuses,
    tells_launches=True,
)
