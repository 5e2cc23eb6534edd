"""Triton's part of linear layers: it scales gradients that were made before the gradient of the loss was known."""

import triton.language as tl
from torch import Tensor

from liger_core.host.linear import Linear
from liger_triton.ops._launch import kernel


@kernel
def _scale(y, x, dloss, totals, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss)
    if totals is not None:
        factor /= tl.load(totals)
    tl.store(y + offset, tl.load(x + offset, offset < size).to(tl.float32) * factor, offset < size)


class _Linear(Linear):
    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        _scale[((x.numel() + 4095) // 4096,)](y, x, dloss, divisor, x.numel(), BLOCK=4096, num_warps=4)


LINEAR = _Linear()
