"""How kernels are launched. A kernel file of this package looks like this:

    @ct.kernel
    def _forward(y, inverse_rms, x, weight, eps, BLOCK: ConstInt):
        ...
        if given(inverse_rms):
            ct.store(inverse_rms, (row,), r)

    @opaque(writes=("y", "inverse_rms"))
    def _launch_forward(y: Tensor, inverse_rms: Tensor | None, x: Tensor, weight: Tensor | None, eps: float) -> None:
        x = as_rows(x)
        launch(_forward, (x.shape[0],), y, inverse_rms, x, weight, eps, power_of_2(x.shape[1]))

- Results are allocated before the launch function, where torch.compile sees them. All else happens inside it, on plain
  integers: views and copies of inputs, tile sizes, temporary tensors, several launches.
- A kernel's arguments are positional: what it writes, what it reads, numbers, constants in capitals. Integers and floats
  are 32 bits wide at run time; what is annotated `ConstInt` or `ConstBool` is compiled in.
- A tensor or a number that may be absent is None for `launch`, and `given` tells the kernel.
- Arrays are rows and columns, 2-D (`as_rows`), and indexed by tile. Tile IR computes addresses with 64 bits,
  from sizes and strides of 32: so a tensor may have more than 2^31 elements, and no dimension of it may.
- cuda.tile compiles a kernel as if its arguments didn't overlap: no kernel gets the same memory twice and writes to it.
- A grid has at most `MOST_BLOCKS` blocks in its first dimension, and `MOST_DOWN` in the others.
"""

import os
import threading
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import replay

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

MOST_BLOCKS = (1 << 24) - 1
MOST_DOWN = (1 << 16) - 1

_INTERPRETED = os.environ.get("CUTILE_INTERPRET") == "1"  # the interpreter has no streams, and runs a kernel at once


class _Thread(threading.local):
    """Whether the running thread has a context of the driver."""

    has_context = False


_thread = _Thread()


def current_stream() -> int:
    """The current stream of the current device, whose context is then that of the thread.

    cuda.tile launches through the driver, in the thread's context, which PyTorch's first call of the runtime makes. With
    ``expandable_segments:True`` an allocation is no such call, and autograd's thread would launch without a context: an error.
    """
    if not _thread.has_context:
        torch.cuda.mem_get_info()  # a call of the runtime that neither waits for the device nor changes anything
        _thread.has_context = True
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None) -> None:
    """Launch a kernel on the current stream of the current device. core has made the tensors' device current.

    Args:
        kernel: a `ct.kernel`.
        grid: numbers of blocks, 1 to 3.
        arguments: the kernel's, in order.
    """
    values = tuple(() if argument is None else argument for argument in arguments)
    replay.launch(ct.launch, 0 if _INTERPRETED else replay.Each(current_stream), grid, kernel, values)


@ct.function
def given(argument):
    """Whether an argument is a tensor or a number, not None; known when the kernel is compiled."""
    return ct.static_eval(not isinstance(argument, tuple))


@ct.function
def block_number():
    """The number of the block's item. In a grid of several rows, the last blocks have no item."""
    return ct.bid(0) + ct.bid(1) * ct.num_blocks(0)


def one_each(items: int) -> tuple[int, int]:
    """A grid with a block for each item, in as few rows of blocks as possible: for kernels that don't loop over items.

    A block that does one thing needs all its inputs at once. With a loop, the compiler would read the loop's invariants before
    it, and a block that goes through it once would wait for memory twice.
    """
    return min(items, MOST_BLOCKS), (items + MOST_BLOCKS - 1) // MOST_BLOCKS


def within_grid(tile_rows: int, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Tensors with one number of rows: as they are, or, if their tiles exceed a grid's second dimension, some rows at a time."""
    rows, most = next(x.shape[0] for x in tensors if x is not None), MOST_DOWN * tile_rows
    if rows <= most:
        return [tensors]
    return [tuple(None if x is None else x[begin : begin + most] for x in tensors) for begin in range(0, rows, most)]
