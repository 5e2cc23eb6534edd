"""An op in one language on one device, which a test is about."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from liger_core.backend import BackendInfo
from liger_core.contract import Op


@dataclass(frozen=True)
class Target:
    """An op in one language on one device, which a test is about."""

    op: Op[..., Any]
    language: str
    device: str
    backend: BackendInfo | None
    """None for the reference, whose language is ``torch``."""
    lane: str
    """The word for success: ``passed``, or ``interpreted`` where no hardware was involved."""

    @property
    def kernel(self) -> ModuleType | None:
        return self.backend.kernel(self.op.name) if self.backend else None

    def is_lost(self) -> bool:
        """Whether this process can't use the device any more, as after a kernel's access to a wrong address."""
        if self.lane != "passed" or self.device == "cpu":
            return False
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            return True
        return False

    def __str__(self) -> str:
        return f"{self.op.name}-{self.language}-{self.device}"


def refusal(target: Target, arguments: dict[str, Any]) -> str | None:
    """Why the target's kernel can't take a call, or None."""
    refuses = getattr(target.kernel, "refuses", None)
    return refuses(**target.op.bind((), arguments)) if refuses else None
