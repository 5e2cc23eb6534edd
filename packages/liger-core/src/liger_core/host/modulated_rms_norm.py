"""The place of `modulated_rms_norm`'s scale and shift for each row: the host code, without kernels.

Dimensions before the last one are merged until three are left. A kernel finds a row's scale and shift by their strides there.
The stride is 0 in a dimension over which they are broadcast. The rows that share a scale are a group. The scale's gradient is a
sum over each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.rows import adjacent, without_gaps
from liger_core.torch_state import remembered

LEVELS = 3
"""The number of dimensions that a kernel goes over."""


class Places(NamedTuple):
    """A row's place is one number in each of three dimensions. The scale keeps a dimension, or is broadcast over it.

    Attributes:
        kept: sizes of the dimensions, with 1 for those that aren't kept.
        shared: sizes of the dimensions, with 1 for those that are kept.
        scale: strides of the scale.
        shift: strides of the shift.
        groups, members: the number of groups, and of rows of a group.
    """

    kept: tuple[int, ...]
    shared: tuple[int, ...]
    scale: tuple[int, ...]
    shift: tuple[int, ...]
    groups: int
    members: int

    @staticmethod
    def of(kept: tuple[int, ...], shared: tuple[int, ...], scale: tuple[int, ...], shift: tuple[int, ...]) -> Places:
        groups, members = kept[0] * kept[1] * kept[2], shared[0] * shared[1] * shared[2]
        return Places(kept, shared, scale, shift, groups, members)

    def sizes(self) -> tuple[int, ...]:
        return tuple([size * shared for size, shared in zip(self.kept, self.shared, strict=True)])


class Modulation(NamedTuple):
    """The scale and the shift of a call, each row's elements adjacent; and where they lie."""

    scale: Tensor
    shift: Tensor | None
    places: Places


def _sizes(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """The sizes of a tensor's dimensions before the last one, with a 1 for each that is missing."""
    return [1] * (len(shape) - tensor.dim()) + list(tensor.shape[:-1])


def _alike(scale: Tensor, shift: Tensor, shape: Sequence[int]) -> bool:
    return scale.shape == shift.shape or _sizes(scale, shape) == _sizes(shift, shape)


def _strides(shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of a tensor that is broadcast to `shape`; of a dimension of one element, 0."""
    return [0] * (len(shape) - len(sizes)) + [
        0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)
    ]


@remembered
def _places_of(
    shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    shift_sizes: Sequence[int] = (),
    shift_strides: Sequence[int] = (),
) -> Places | None:
    """The places of rows of a tensor of `shape`, from the sizes and strides of the scale and of the shift.

    None if more than three dimensions are left.
    """
    padded_sizes = [1] * (len(shape) - len(sizes)) + list(sizes)
    scales, shifts = _strides(shape, sizes, strides), _strides(shape, shift_sizes, shift_strides)
    merged: list[tuple[int, bool, int, int]] = []
    for dim, size in enumerate(shape[:-1]):
        if size == 1:
            continue
        keeps, a, b = True, scales[dim], shifts[dim]
        if padded_sizes[dim] == 1:  # a branch: in a trace of dynamic sizes the comparison itself would give a symbol
            keeps = False
        if merged:
            outer, keeps_outer, a_outer, b_outer = merged[-1]
            if keeps == keeps_outer and a_outer == size * a and b_outer == size * b:
                merged[-1] = outer * size, keeps, a, b
                continue
        merged.append((size, keeps, a, b))
    if len(merged) > LEVELS:
        return None
    merged = [(1, True, 0, 0)] * (LEVELS - len(merged)) + merged
    return Places.of(
        tuple([size if keeps else 1 for size, keeps, _, _ in merged]),
        tuple([1 if keeps else size for size, keeps, _, _ in merged]),
        tuple([a for _, _, a, _ in merged]),
        tuple([b for _, _, _, b in merged]),
    )


def modulation_of(x: Tensor, scale: Tensor, shift: Tensor | None) -> Modulation:
    """The modulation that kernels take. If dimensions alternate too often, scale and shift are expanded to x's size."""
    shape, scale_shape = x.shape, scale.shape
    shift_shape = () if shift is None else shift.shape
    scale, scale_strides = adjacent(scale)
    shift, shift_strides = (None, ()) if shift is None else adjacent(shift)
    places = _places_of(shape, scale_shape, scale_strides, shift_shape, shift_strides)
    if places is None:
        scale = scale.expand(shape).contiguous()
        shift = None if shift is None else shift.expand(shape).contiguous()
        strides = without_gaps(shape)
        places = _places_of(shape, shape, strides, *(() if shift is None else (shape, strides)))
        assert places is not None
    return Modulation(scale, shift, places)


def summed(gradient: Tensor, like: Tensor) -> Tensor:
    """A float32 gradient, summed over the dimensions in which `like` is broadcast, in the shape and dtype of `like`."""
    dims = [dim for dim, size in enumerate(_sizes(like, gradient.shape)) if size != gradient.shape[dim]]
    return gradient.sum(dims).reshape(like.shape).to(like.dtype)


class ModulatedRMSNormKernels:
    """The kernels that a language launches."""

    def forward(
        self,
        y: Tensor,
        inverse_rms: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        modulation: Modulation,
        eps: float,
        offset: float,
        casting_mode: str,
    ) -> None:
        """Write the result, and the inverse RMS of each row.

        Args:
            y: contiguous, of x's shape.
            inverse_rms: float32, one per row; or None.
            x: with any strides.
            weight: contiguous, or None.
            modulation: the scale and the shift.
            eps, offset, casting_mode: the op's.
        """
        raise NotImplementedError

    def backward(
        self,
        dx: Tensor | None,
        dweight: Tensor | None,
        dscale: Tensor | None,
        dshift: Tensor | None,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        modulation: Modulation,
        inverse_rms: Tensor | None,
        offset: float,
    ) -> None:
        """Write the gradients that aren't None; there is at least one.

        Args:
            dx: contiguous, of x's shape.
            dweight: contiguous ``[H]``.
            dscale: contiguous, a row of H elements for each group: the sum over the group.
            dshift: the same; the shift then has the scale's groups.
            dy: with any strides.
            x, weight, modulation, offset: as in `forward`. For `dshift` alone x is not read, and `modulation` may have the
                shift in place of the scale.
            inverse_rms: None if only `dshift` is wanted.
        """
        raise NotImplementedError


class ModulatedRMSNorm:
    """The op in a language."""

    def __init__(self, kernels: ModulatedRMSNormKernels) -> None:
        self.kernels = kernels

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        weight: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
    ) -> tuple[Tensor, Saved]:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        inverse_rms = None
        if needs[0] or needs[1] or needs[2]:
            inverse_rms = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        modulation = modulation_of(x, scale, shift)
        contiguous = None if weight is None else weight.contiguous()
        self.kernels.forward(y, inverse_rms, x, contiguous, modulation, eps, offset, casting_mode)
        if True not in needs:
            return y, ()
        inputs = (None, None, None) if inverse_rms is None else (x, weight, scale)
        return y, (*inputs, shift if needs[3] else None, inverse_rms)

    def backward(
        self, needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
    ) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_scale, needs_shift = needs
        x, weight, scale, shift, inverse_rms = saved
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        dscale = dshift = None
        if needs_x or needs_weight or needs_scale:
            modulation = modulation_of(x, scale, None)
            whole = modulation.scale.shape != scale.shape
            if needs_scale:
                dscale = _gradient_of(scale, modulation.scale.shape, whole)
            if needs_shift and not whole and _alike(scale, shift, x.shape):
                dshift = _gradient_of(shift, shift.shape, False)
            contiguous = None if weight is None else weight.contiguous()
            self.kernels.backward(dx, dweight, dscale, dshift, dy, x, contiguous, modulation, inverse_rms, offset)
            if dscale is not None and whole:
                dscale = summed(dscale, scale)
        if needs_shift and dshift is None:
            modulation = modulation_of(dy, shift, None)
            whole = modulation.scale.shape != shift.shape
            dshift = _gradient_of(shift, modulation.scale.shape, whole)
            self.kernels.backward(None, None, None, dshift, dy, dy, None, modulation, None, offset)
            if whole:
                dshift = summed(dshift, shift)
        return dx, dweight, dscale, dshift


def _gradient_of(tensor: Tensor, shape: Sequence[int], whole: bool) -> Tensor:
    return torch.empty(shape, dtype=torch.float32 if whole else tensor.dtype, device=tensor.device)
