"""Less memory for what autograd keeps."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from liger_core import modes, remade


@contextmanager
def lean() -> Generator[None]:
    """Keep less for backward: cheap results of ops, such as a norm's, are made again instead of kept by their users.

    What a linear layer, an attention or any other code saves of such a result in here is not the result: when backward
    wants it, the op's forward kernel runs once more. Gradients are equal to the bit. Other tensors are kept as always.

    It changes what autograd saves in this thread; backward may run anywhere. Ops say how their results are made again in
    their declaration (`Op.remade`). It works inside of what activation checkpointing runs again, and inside of other
    hooks of saved tensors, such as `torch.autograd.graph.save_on_cpu`; where such hooks are innermost, only they run.

    Raises:
        RuntimeError: in backward, if a tensor that is kept was changed in place.

    >>> import liger_core
    >>> x, w = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    >>> with lean():
    ...     y = torch.nn.functional.linear(liger_core.rms_norm(x, w), torch.ones(1, 4, requires_grad=True))
    >>> y.sum().backward()
    """
    before, remade.state.lean = remade.state.lean, True
    try:
        if modes.compiling():
            yield
            return
        outer = remade.innermost()
        if remade.keeper_of(outer) is not None:
            yield
            return
        keeper = remade.Keeper(outer)
        try:
            with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
                yield
        finally:
            # Results know their keeper: a cycle, which would hold tensors until Python looks for cycles. An exception comes by
            # here whenever a checkpointed region has run again as far as backward needs it.
            keeper.results.clear()
    finally:
        remade.state.lean = before
