"""Trace the host code of ops as torch.compile does, with sizes that vary, and print what can't be traced.

    python traced.py rms_norm rope

There is no GPU, and nothing is launched: a launch is a custom op to Dynamo, and a backend in place of Inductor returns tensors
of the graph's shapes.
"""

import sys
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

import liger_cutile
from liger_conformance.case import cases_of
from liger_conformance.evaluate import complete, kept_gradients, present
from liger_conformance.traces import GRADIENTS, as_traced, check_copies_no_gradient
from liger_core.contract import ops


def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., tuple[Any, ...]]:
    """A backend that runs nothing."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    shapes = [node.meta["example_value"] for node in output.args[0]]
    return lambda *inputs: tuple(map(as_traced, shapes))


def trace(name: str, dtype: torch.dtype) -> None:
    """Forward of the first case, for every gradient, then its backward."""
    op, kernel, op_cases = ops[name], liger_cutile.backend.kernel(name), cases_of(name)
    arguments = complete(op, op_cases.build(op_cases.cases[0], dtype, "cpu"))
    there = present(op, arguments)
    needs = tuple(tensor in there for tensor in op.differentiable)
    options = {option: arguments[option] for option in op.options}

    def run(function: Callable[..., Any], *given: Any) -> Any:
        torch.compiler.reset()
        return torch.compile(function, backend=look, fullgraph=True, dynamic=True)(*given)

    result, saved = run(lambda arguments: kernel.forward(needs, **arguments), arguments)
    if not op.differentiable:
        return
    results = result if isinstance(result, tuple) else (result,)
    with_gradient = kept_gradients(op, arguments, len(results))
    incoming = [r if r is None else torch.empty_like(r) for r in compress(results, with_gradient)]
    run(lambda saved, incoming: kernel.backward(needs, saved, *incoming, **options), saved, incoming)


def main() -> int:
    failed = 0
    with torch.no_grad():
        for name in sys.argv[1:]:
            try:
                if name.endswith(GRADIENTS):
                    check_copies_no_gradient(name.removesuffix(GRADIENTS), liger_cutile.backend)
                    continue
                for dtype in (torch.float32, torch.bfloat16):
                    trace(name, dtype)
            except TorchDynamoException as error:
                failed += 1
                print(f"{name}: {error}")
    print(f"{len(sys.argv) - 1 - failed} traced")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
