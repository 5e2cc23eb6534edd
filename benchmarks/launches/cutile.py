"""y = a + b + c · eps + offset + rows, in cuTile."""

from collections.abc import Callable

import cuda.tile as ct
import torch

from liger_cutile.ops._launch import ConstInt, launch


@ct.kernel
def _add(y, a, b, c, rows, eps, offset, ROWS: ConstInt, BLOCK: ConstInt):
    at, size = (ct.bid(0), 0), (ROWS, BLOCK)
    ct.store(y, at, ct.load(a, at, size) + ct.load(b, at, size) + ct.load(c, at, size) * eps + offset + rows)


def launches(device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A launch through liger_cutile, and one through `ct.launch` on a stream looked up before."""
    y, a, b, c = (torch.ones(8, 128, device=device) for _ in range(4))
    arguments = (y, a, b, c, 8, 1e-6, 0.5, 1, 128)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0  # the interpreter has none

    def by_package() -> torch.Tensor:
        launch(_add, (8,), *arguments)
        return y

    def by_language() -> torch.Tensor:
        ct.launch(stream, (8,), _add, arguments)
        return y

    return by_package, by_language
