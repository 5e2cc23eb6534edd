"""The same values, elsewhere in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def transposed(tensor: Tensor) -> Tensor:
    """The same values, the last two dimensions swapped in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else sliced(tensor)


def sliced(tensor: Tensor) -> Tensor:
    """The same values, every other element of a larger tensor, after an odd offset."""
    larger = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3)
    view = larger[..., 3::2]
    view.copy_(tensor)
    return view


def padded(tensor: Tensor) -> Tensor:
    """The same values, as the first columns of longer rows."""
    longer = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 5)
    view = longer[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def apart(tensor: Tensor) -> Tensor:
    """The same values, as the first columns of rows whose length keeps each of them aligned."""
    columns = tensor.shape[-1]
    longer = tensor.new_zeros(*tensor.shape[:-1], -(-columns // 16) * 16 + 16)
    view = longer[..., :columns]
    view.copy_(tensor)
    return view


def shifted(tensor: Tensor) -> Tensor:
    """The same values, contiguous, one element after the start of their memory."""
    view = tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def expanded(tensor: Tensor) -> Tensor:
    """The first row, seen as every row (stride 0)."""
    return tensor[:1].expand(tensor.shape) if tensor.dim() > 1 else tensor


def outermost_last(tensor: Tensor) -> Tensor:
    """The same values, the first dimension innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


def channels_last(tensor: Tensor) -> Tensor:
    """The same values, the second dimension innermost in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor


@dataclass(frozen=True)
class Layout:
    """A function that lays a tensor out, and for which tensors it does something of its own."""

    apply: Callable[[Tensor], Tensor]
    dims: int
    changes_values: bool = False

    def fits(self, tensor: Tensor) -> bool:
        return tensor.dim() >= self.dims and (tensor.is_floating_point() or not self.changes_values)


LAYOUTS = {
    "transposed": Layout(transposed, 2),
    "sliced": Layout(sliced, 1),
    "padded": Layout(padded, 1),
    "apart": Layout(apart, 1),
    "shifted": Layout(shifted, 1),
    "expanded": Layout(expanded, 2, changes_values=True),
    "outermost_last": Layout(outermost_last, 3),
    "channels_last": Layout(channels_last, 3),
}
"""By the name that a case's `CallMode` gives."""
