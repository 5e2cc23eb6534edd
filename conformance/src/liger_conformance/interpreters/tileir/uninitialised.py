"""Which memory has been allocated and not written to since.

The interpreter can't see that from a tensor: torch.empty returns whatever was there. In a `tracking` context a record
is kept of what is allocated so, and of what is written since, by PyTorch or by an interpreted kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
_FRESH = ("aten::lift_fresh",)  # what torch.tensor returns, by its schema a view

# From a storage's address to whether each of its bytes has been written. Those that have all been are left out.
_written: dict[int, Tensor] = {}


def written_bytes(tensor: Tensor) -> Tensor | None:
    """A bool for each byte of a tensor's storage; None if all are known to be written, or nothing is known."""
    return _written.get(tensor.untyped_storage().data_ptr())


@contextlib.contextmanager
def tracking() -> Generator[None, None, None]:
    """Keep the record until the context ends. What was allocated before counts as written.

    PyTorch writing to a part of an allocation counts as writing to all of it.
    """
    with _Tracking():
        try:
            yield
        finally:
            _written.clear()


class _Tracking(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: PyTorch imports Dynamo for that at the first operation, which takes 3 s. Nothing is compiled in here."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        schema = function._schema
        if schema.name in _EMPTY:
            # Zeros of numpy's take no memory until they are written to.
            _written[_address(result)] = torch.from_numpy(np.zeros(result.untyped_storage().nbytes(), bool))
            return result
        for parameter, value in (*zip(schema.arguments, args, strict=False), *_named(schema, kwargs)):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                _forget(value)
        if schema.name in _FRESH or all(returned.alias_info is None for returned in schema.returns):
            _forget(result)  # a new tensor, perhaps at an old address
        return result


def _named(schema: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((parameter, kwargs[parameter.name]) for parameter in schema.arguments if parameter.name in kwargs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _forget(value: Any) -> None:
    for tensor in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, Tensor):
            _written.pop(_address(tensor), None)
