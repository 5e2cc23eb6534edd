"""Matrix products of the linear losses: PyTorch's, with the gradient of a weight summed over chunks in another dtype."""

import torch
from torch import Tensor

ALIGNED = 256
"""Columns, in a 2-byte dtype, of the 512 bytes that a cube unit's loads from memory are fastest at multiples of."""


def chunks(size: int, most: int) -> list[tuple[int, int]]:
    """The ends of chunks of rows or columns, all about as large. A dynamic size stays dynamic in a trace."""
    if size <= most:
        return [(0, size)]
    step = ALIGNED if most >= ALIGNED else 1
    most = most // step * step
    count = 1
    while count * most < size:
        count += 1
    each = ((size + count - 1) // count + step - 1) // step * step  # at most `most`, so that no chunk is empty
    return [(i * each, min(i * each + each, size)) for i in range(count)]


# A matmul of half-precision operands with a float32 result, which torch_npu registers since 2.10. Not its sum with a float32
# tensor, which can't be traced before pytorch#179634.
_FLOAT32_RESULT = torch.__version__ >= (2, 10)


def takes_memory(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `add_product` of tensors of x's dtype, in `dtype`, needs about as much memory as its `a`."""
    return dtype is torch.float32 and x.dtype is not torch.float32


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Total + aᵀ b, in `dtype`; written to total."""
    (rows, columns), width = a.shape, b.shape[1]
    if takes_memory(a, dtype):
        if total is None:
            total = torch.zeros((columns, width), dtype=dtype, device=b.device)
        room = rows * columns * a.element_size() // 4
        if a.device.type == "npu" and _FLOAT32_RESULT:
            for first, last in chunks(columns, max(1, room // width)):
                total[first:last] += torch.mm(a[:, first:last].t(), b, out_dtype=dtype)
        else:
            wide = b.float()
            for first, last in chunks(columns, max(ALIGNED, room // rows - width)):
                total[first:last].addmm_(a[:, first:last].float().t(), wide)
        return total
    if total is None:
        return torch.mm(a.t(), b).to(dtype)
    return total.addmm_(a.t(), b) if a.dtype is dtype else total.add_(torch.mm(a.t(), b))
