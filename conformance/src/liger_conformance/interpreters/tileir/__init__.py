"""cuTile kernels on the CPU: the bytecode that cuda.tile's front end writes, decoded and run on CPU tensors.

    from liger_conformance.interpreters import tileir

    tileir.install()
    ct.launch(stream, grid, kernel, arguments)  # on CPU tensors; nothing else changes

A kernel's types, its constants and what it compiles to are those of a GPU, since they come from NVIDIA's own front end.
Blocks run one after another. A `KernelBug` says what a GPU would not: that a tile lies outside of its array, that padding
is undetermined, that a promise to the compiler is broken, that two blocks touch an element in no order, or, in a
`tracking` context, that nothing has written to what is read. `checking` switches checks.

From bytes to values: `opcodes` and `bytecode` decode; `control` turns operations into Python functions, by `integers`,
`floats`, `shapes` and `accesses`; `memory` holds arrays and checks each access; `program` launches; `capture` gets the
bytecode. Importing this package does not import cuda.tile.
"""

from __future__ import annotations

from liger_conformance.interpreters.tileir.capture import launch, signature, stand_in_for_libcuda
from liger_conformance.interpreters.tileir.checks import Checks, KernelBug, checking
from liger_conformance.interpreters.tileir.uninitialised import tracking

__all__ = ["Checks", "KernelBug", "checking", "install", "launch", "signature", "tracking"]


def install() -> None:
    """Make `cuda.tile.launch` run kernels here, in this process. Before `from cuda.tile import launch` runs."""
    import cuda.tile

    stand_in_for_libcuda()
    cuda.tile.launch = launch
