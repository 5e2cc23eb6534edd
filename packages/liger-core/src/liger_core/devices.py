"""Devices by their types, in torch's words."""

from __future__ import annotations

import re

import torch
from torch._C import _get_privateuse1_backend_name  # pyright: ignore[reportPrivateUsage]

from liger_core.backend import backends
from liger_core.torch_state import constant_in_graphs

ACCELERATORS = ("cuda", "npu", "xpu", "hpu")


def accelerators() -> tuple[str, ...]:
    """The types of accelerators that a process may have: `ACCELERATORS`, and the one that a plug-in gives torch's
    PrivateUse1, such as ``"mlu"``. No kernel package is imported for it.
    """
    return tuple(dict.fromkeys((*ACCELERATORS, _get_privateuse1_backend_name())))


def infer_device() -> str:
    """The accelerator of this process: ``"cuda"`` (also ROCm), ``"npu"``, ``"xpu"``, ``"hpu"``, or one that torch knows
    by a plug-in, such as ``"mlu"``; else ``"cpu"``.
    """
    for device in accelerators():
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            return device
    return "cpu"


@constant_in_graphs
def type_of(device: str | torch.device | None) -> str:
    """The type of a device: ``"cuda"`` for ``"cuda:1"``, `infer_device()` for None."""
    if device is None:
        return infer_device()
    try:
        return torch.device(device).type
    except RuntimeError:
        # A device type that torch knows only with a plug-in, such as torch-npu for "npu", may be requested without it.
        known = sorted({"cpu", *accelerators(), *(d for b in backends() for d in b.devices)} - {"privateuseone"})
        match = re.fullmatch(r"(\w+)(:\d+)?", str(device))
        if match and match[1] in known:
            return match[1]
        raise ValueError(f"device is {device!r}; it takes a torch device or its type: {', '.join(known)}") from None
