"""`attn_res`'s host code: a language adds its kernels.

query and weight are parameters of one product, so one sum over rows and sources gives both gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved


def as_sources(blocks: Tensor) -> Tensor:
    """Blocks as ``[N, rows, D]``, each row's elements adjacent. It is a view if their strides allow it."""
    sources = blocks if blocks.dim() == 3 else blocks.reshape(blocks.shape[0], -1, blocks.shape[-1])
    return sources if sources.stride(2) == 1 else sources.contiguous()


def _as_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class AttnResKernels:
    """The kernels that a language launches. Sources are the blocks and then, if there is one, partial."""

    def forward(
        self,
        y: Tensor,
        statistics: Tensor | None,
        blocks: Tensor,
        partial: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        eps: float,
    ) -> None:
        """Write the result, and the statistics that backward needs.

        Args:
            y: ``[rows, D]``, contiguous.
            statistics: float32 ``[2, rows, sources]``, contiguous: scores, and inverse root mean squares; or None.
            blocks: ``[N, rows, D]``, each row's elements adjacent.
            partial: ``[rows, D]``, each row's elements adjacent; or None.
            query, weight: contiguous.
            eps: the op's.
        """
        raise NotImplementedError

    def backward(
        self,
        dblocks: Tensor | None,
        dpartial: Tensor | None,
        sums: bool,
        dy: Tensor,
        blocks: Tensor,
        partial: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        statistics: Tensor,
    ) -> Tensor | None:
        """Write the gradients that aren't None.

        Args:
            dblocks, dpartial: contiguous, in the shapes of blocks and partial.
            sums: whether the result is wanted.
            dy: ``[rows, D]``, each row's elements adjacent.
            blocks, partial, query, weight, statistics: as in `forward`.

        Returns:
            float32 ``[D]``: the gradient of query · weight.
        """
        raise NotImplementedError


class AttnRes:
    """The op in a language."""

    def __init__(self, kernels: AttnResKernels) -> None:
        self.kernels = kernels

    def forward(
        self,
        needs: Needs,
        blocks: Tensor,
        partial: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        eps: float = 1e-6,
    ) -> tuple[Tensor, Saved]:
        sources = as_sources(blocks)
        count, rows, columns = sources.shape
        if partial is not None:  # not added as a bool: a trace of dynamic sizes can't do that
            count += 1
        y = torch.empty(blocks.shape[1:], dtype=blocks.dtype, device=blocks.device)
        statistics = None
        if True in needs:
            statistics = torch.empty((2, rows, count), dtype=torch.float32, device=blocks.device)
        w = None if weight is None else weight.contiguous()
        self.kernels.forward(
            y.view(rows, columns),
            statistics,
            sources,
            None if partial is None else _as_rows(partial),
            query.contiguous(),
            w,
            eps,
        )
        return y, () if statistics is None else (blocks, partial, query, weight, statistics)

    def backward(self, needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
        blocks, partial, query, weight, statistics = saved
        needs_blocks, needs_partial, needs_query, needs_weight = needs
        sources, dys = as_sources(blocks), _as_rows(dy)
        rows = None if partial is None else _as_rows(partial)
        dblocks = torch.empty_like(blocks, memory_format=torch.contiguous_format) if needs_blocks else None
        dpartial = None
        if partial is not None and needs_partial:
            dpartial = torch.empty_like(partial, memory_format=torch.contiguous_format)
        w = None if weight is None else weight.contiguous()
        sums = self.kernels.backward(
            None if dblocks is None else dblocks.view(sources.shape),
            dpartial if rows is None or dpartial is None else dpartial.view(rows.shape),
            needs_query or needs_weight, dys, sources, rows, query.contiguous(), w, statistics,
        )  # fmt: skip
        dquery = dweight = None
        if sums is not None and needs_query:
            dquery = (sums if w is None else sums * w).to(query.dtype)
        if sums is not None and weight is not None and needs_weight:
            dweight = (sums * query).to(weight.dtype)
        return dblocks, dpartial, dquery, dweight
