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
from typing import Any

import cuda.tile as ct
from torch import Tensor

from liger_cutile._stream import current_stream

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

MOST_BLOCKS = (1 << 24) - 1
MOST_DOWN = (1 << 16) - 1

# The interpreter has no streams: it runs a kernel at once.
_INTERPRETED = os.environ.get("CUTILE_INTERPRET") == "1"


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None) -> None:
    """Launch a kernel on the current stream of the current device. core has made the tensors' device current.

    Args:
        kernel: a `ct.kernel`.
        grid: numbers of blocks, 1 to 3.
        arguments: the kernel's, in order.
    """
    stream = 0 if _INTERPRETED else current_stream()
    ct.launch(stream, grid, kernel, tuple(() if argument is None else argument for argument in arguments))


@ct.function
def given(argument):
    """Whether an argument is a tensor or a number, not None; known when the kernel is compiled."""
    return ct.static_eval(not isinstance(argument, tuple))
