"""y = a + b + c · eps + offset + rows, in Triton."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from liger_triton.ops._launch import kernel


def _add(y, a, b, c, rows, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * ROWS * BLOCK + tl.arange(0, ROWS * BLOCK)
    tl.store(y + at, tl.load(a + at) + tl.load(b + at) + tl.load(c + at) * eps + offset + rows)


_ours, _own = kernel(_add), triton.jit(_add)


def launches(device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A launch through liger_triton and one through `triton.jit`."""
    y, a, b, c = (torch.ones(8, 128, device=device) for _ in range(4))

    def launch(jit) -> torch.Tensor:
        jit[(8,)](y, a, b, c, 8, 1e-6, 0.5, ROWS=1, BLOCK=128)
        return y

    return partial(launch, _ours), partial(launch, _own)
