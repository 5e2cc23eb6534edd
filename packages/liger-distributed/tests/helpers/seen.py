"""Collectives that are sent, and tensors that are allocated, while code runs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IN_STEP = [] if os.environ.get("LIGER_TEST_DEVICE") else [("all_gather_into_tensor", 24)]
"""Collectives of `in_step`: on the CPU alone, and under LIGER_KERNEL_CHECK=1."""


class Sent(TorchDispatchMode):
    """Collectives, by name, with the bytes that this process puts into each."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")
        if name[0] in ("_c10d_functional", "c10d") and name[2] not in ("wait_tensor", "_wrap_tensor_autograd"):
            size = sum(a.numel() * a.element_size() for a in tree_leaves(args) if isinstance(a, Tensor))
            self.collectives.append((name[2], size))
        return function(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(outputs) if isinstance(t, torch.Tensor))])
        return outputs
