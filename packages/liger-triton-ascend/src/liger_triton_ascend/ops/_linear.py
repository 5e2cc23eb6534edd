"""The NPU's part of linear layers: matrix products, and a kernel that scales gradients by that of the loss."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.linear import Linear
from liger_triton_ascend.ops._rows import element_tiles

TILES = 4
"""Float32 and bfloat16 tiles alive, by the estimate: one that is read and one that is written, each twice."""


@triton.jit
def _scale(y, x, factor, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor)
    blocks = tl.cdiv(tl.cast(size, tl.int64), BLOCK)
    if IN_PLACE:
        blocks = tl.where(factor == 1.0, 0, blocks)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offset = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + offset, tl.load(x + offset, offset < size).to(tl.float32) * factor, offset < size)


# torch_npu has a matmul of half-precision operands with a float32 result since 2.10. The one that adds to a float32 tensor can't
# be traced before pytorch#179634, so it is not used.
_FLOAT32_RESULT = torch.__version__ >= (2, 10)


class AscendLinear(Linear):
    aligned = 256
    """Columns, in a 2-byte dtype, of the 512 bytes that a cube unit's loads from memory are fastest at multiples of."""

    pads = False

    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        """As in other languages. In place, nothing is written if the factor is 1."""
        factor = dloss if divisor is None else dloss / divisor.view(-1)[0]
        programs, _, block = element_tiles(x, 1, x.numel(), TILES)
        _scale[(programs,)](y, x, factor, x.numel(), IN_PLACE=y is x, BLOCK=block)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype is not torch.float32 and a.device.type == "npu" and _FLOAT32_RESULT:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a.float(), b.float())

    def takes_memory(self, x: Tensor, dtype: torch.dtype) -> bool:
        return dtype is torch.float32 and x.dtype is not torch.float32

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, adds: bool = True) -> Tensor:
        (rows, columns), width = a.shape, b.shape[1]
        if self.takes_memory(a, dtype):
            if total is None:
                total = torch.zeros((columns, width), dtype=dtype, device=b.device)
            elif not adds:
                total.zero_()
            room = rows * columns * a.element_size() // 4
            if a.device.type == "npu" and _FLOAT32_RESULT:
                for first, last in self.chunks(columns, max(1, room // width)):
                    total[first:last] += torch.mm(a[:, first:last].t(), b, out_dtype=dtype)
            else:
                wide = b.float()
                for first, last in self.chunks(columns, max(self.aligned, room // rows - width)):
                    total[first:last].addmm_(a[:, first:last].float().t(), wide)
            return total
        if total is None:
            return torch.mm(a.t(), b).to(dtype)
        if not adds:
            return total.copy_(torch.mm(a.t(), b))
        return total.addmm_(a.t(), b) if a.dtype is dtype else total.add_(torch.mm(a.t(), b))


LINEAR = AscendLinear()
