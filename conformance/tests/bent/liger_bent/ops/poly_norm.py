"""Nothing is wrong. The kernel is autotuned."""

import torch
import triton
import triton.language as tl

from liger_bent.ops._row import load_and_store


@triton.autotune([triton.Config({"BLOCK": 1024}, num_warps=warps) for warps in (2, 4)], key=["columns"])
@triton.jit
def _row(y, x, columns, BLOCK: tl.constexpr):
    load_and_store(y, x, columns, BLOCK)


def forward(needs, x, **others):
    y = torch.empty_like(x)
    _row[lambda chosen: (x.shape[-1] // chosen["BLOCK"],)](y, x, x.shape[-1])
    return y, ()


def backward(needs, saved, dy, **options):
    return ()
