"""`mhc_pre`'s host code: a language adds its kernels.

Backward reaches x and weight through a plan, r · G: the factors of each row of weight in the gradient of a row of x. The
gradient of a stream is then plan · weight + pre · dh − c · x, and that of the weight planᵀ · x. Products of float32 are made of
three bfloat16 parts on tensor cores. The plan is written in parts, since each block of columns reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.ops.mhc_pre import MHCPre


class Coefficients(NamedTuple):
    """The options of the op, in its order."""

    iterations: int
    norm_eps: float
    sinkhorn_eps: float
    pre_eps: float
    post_multiplier: float


class MHCPreKernels:
    """The kernels that a language launches. M is the number of weight's rows, n the number of streams, and K = n · C."""

    def forward(
        self,
        results: MHCPre,
        m: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        alpha: Tensor,
        options: Coefficients,
    ) -> None:
        """Write the results, and `m`, which backward needs.

        Args:
            results: the op's, contiguous and with rows in place of the leading dimensions.
            m: float32 ``[rows, M + 1]``, contiguous: the products of a row, and its inverse root mean square; or None.
            x: ``[..., n, C]``.
            weight: ``[M, K]``.
            bias, alpha: contiguous.
            options: the op's.
        """
        raise NotImplementedError

    def dot(self, dots: Tensor, dh: Tensor, x: Tensor) -> None:
        """Write dh · x of each stream.

        Args:
            dots: float32 ``[rows, n]``, contiguous.
            dh: ``[..., C]``.
            x: ``[..., n, C]``.
        """
        raise NotImplementedError

    def plan(
        self,
        plan: Tensor,
        rest: Tensor,
        dots: Tensor | None,
        dpre: Tensor | None,
        dpost: Tensor | None,
        dres: Tensor | None,
        m: Tensor,
        bias: Tensor,
        alpha: Tensor,
        columns: int,
        options: Coefficients,
    ) -> Tensor:
        """Write the numbers of each row from which the gradients are made.

        Args:
            plan: bfloat16 ``[rows, 3, P]``, contiguous, zeros: three parts of each number, whose sum it is, the largest first.
                P is a power of two, at least M and 16.
            rest: float32 ``[rows, n + 1]``, contiguous: pre, and c.
            dots: float32 ``[rows, n]``, contiguous: what h adds to dpre; or None.
            dpre, dpost, dres: the incoming gradients, contiguous; or None.
            m, bias, alpha, options: as in `forward`.
            columns: K.

        Returns:
            float32 ``[parts, M + 3]``: parts of the sums over rows of dbias and, behind them, of dalpha.
        """
        raise NotImplementedError

    def gradients(
        self, dx: Tensor | None, dweight: bool, dh: Tensor | None, x: Tensor, weight: Tensor, plan: Tensor, rest: Tensor
    ) -> Tensor | None:
        """Write the gradient of x.

        Args:
            dx: ``[..., n, C]``, contiguous; or None.
            dweight: whether the result is wanted.
            dh: ``[..., C]``, or None.
            x: ``[..., n, C]``.
            weight: ``[M, K]``.
            plan, rest: what `plan` wrote.

        Returns:
            float32 ``[parts, M, K]``: parts of the gradient of weight.
        """
        raise NotImplementedError


def _padded(count: int) -> int:
    """The least power of two that is at least `count` and 16."""
    power = 16
    while power < count:
        power *= 2
    return power


class MHCPreHost:
    """The op in a language."""

    def __init__(self, kernels: MHCPreKernels) -> None:
        self.kernels = kernels

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        alpha: Tensor,
        *,
        iterations: int = 20,
        norm_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        pre_eps: float = 0.0,
        post_multiplier: float = 2.0,
    ) -> tuple[MHCPre, Saved]:
        leading, (streams, width), count = x.shape[:-2], x.shape[-2:], weight.shape[0]
        head, rows = count == streams, x.numel() // (streams * width)
        h = x.new_empty((*leading, width))
        pre = x.new_empty((*leading, streams), dtype=torch.float32)
        post = None if head else torch.empty_like(pre)
        res = None if head else x.new_empty((*leading, streams, streams), dtype=torch.float32)
        m = x.new_empty((rows, count + 1), dtype=torch.float32) if True in needs else None
        results = MHCPre(
            h.view(rows, width),
            pre.view(rows, streams),
            None if post is None else post.view(rows, streams),
            None if res is None else res.view(rows, streams, streams),
        )
        options = Coefficients(iterations, norm_eps, sinkhorn_eps, pre_eps, post_multiplier)
        self.kernels.forward(results, m, x, weight, bias.contiguous(), alpha.contiguous(), options)
        return MHCPre(h, pre, post, res), () if m is None else (x, weight, bias, alpha, m)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dh: Tensor | None,
        dpre: Tensor | None,
        dpost: Tensor | None,
        dres: Tensor | None,
        *,
        iterations: int,
        norm_eps: float,
        sinkhorn_eps: float,
        pre_eps: float,
        post_multiplier: float,
    ) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, needs_alpha = needs
        x, weight, bias, alpha, m = saved
        streams, width, count = *x.shape[-2:], weight.shape[0]
        rows = x.numel() // (streams * width)
        dots = None
        if dh is not None:
            dots = x.new_empty((rows, streams), dtype=torch.float32)
            self.kernels.dot(dots, dh, x)
        # A whole number of vectors, the last elements zero, so that no element has to be masked.
        plan = x.new_zeros((rows, 3, _padded(count)), dtype=torch.bfloat16)
        rest = x.new_empty((rows, streams + 1), dtype=torch.float32)
        dpre, dpost, dres = (None if d is None else d.contiguous() for d in (dpre, dpost, dres))
        small = self.kernels.plan(
            plan, rest, dots, dpre, dpost, dres, m.contiguous(), bias.contiguous(), alpha.contiguous(), streams * width,
            Coefficients(iterations, norm_eps, sinkhorn_eps, pre_eps, post_multiplier),
        )  # fmt: skip
        dbias = small[:, :count].sum(0).to(bias.dtype) if needs_bias else None
        dalpha = small[:, count : count + alpha.numel()].sum(0).to(alpha.dtype) if needs_alpha else None
        if not (needs_x or needs_weight):
            return None, None, dbias, dalpha
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        parts = self.kernels.gradients(dx, needs_weight, dh, x, weight, plan, rest)
        return dx, None if parts is None else parts.sum(0).to(weight.dtype), dbias, dalpha
