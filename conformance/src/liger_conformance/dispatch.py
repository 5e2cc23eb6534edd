"""Modes that see every operation of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DispatchMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: PyTorch imports Dynamo for that at the first operation, which takes 3 s. Nothing is compiled in here."""
        return False


class Poison(DispatchMode):
    """Fills what is allocated but not written with NaN (integers: their least value), so that an unwritten element shows."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in _EMPTY:
            if result.is_floating_point() or result.is_complex():
                result.fill_(float("nan"))
            else:
                result.fill_(True if result.dtype is torch.bool else torch.iinfo(result.dtype).min)
        return result


class Allocated(DispatchMode):
    """Notes the operations that allocate, each with a reference to its memory that doesn't keep it."""

    def __init__(self, allocated: list[tuple[str, StorageWeakRef]]) -> None:
        mode: Any = super()
        mode.__init__()
        self.allocated = allocated

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not any(returned.alias_info is not None for returned in function._schema.returns):  # a view, or in place
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.allocated.append((function._schema.name, StorageWeakRef(tensor.untyped_storage())))
        return result


_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
