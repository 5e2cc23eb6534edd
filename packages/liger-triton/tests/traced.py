"""Trace the host code of ops as torch.compile does, with sizes that vary, and print what can't be traced.

    python traced.py rms_norm fused_linear_jsd@chunks fused_linear_logit_statistics@frozen

There is no GPU, and nothing is launched: Dynamo takes launches into its graph, and a backend in place of Inductor returns
tensors of the graph's shapes.
"""

import operator
import sys
from collections.abc import Callable
from itertools import compress
from typing import Any
from unittest import mock

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._higher_order_ops.triton_kernel_wrap import (
    get_mutated_tensors,
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)

import liger_triton
from liger_conformance.case import cases_of
from liger_conformance.compilers.triton import TritonCompiler
from liger_conformance.evaluate import complete, kept_gradients, present
from liger_conformance.layouts import LAYOUTS
from liger_conformance.traces import GRADIENTS, as_traced, backward_operators, check_copies_no_gradient
from liger_core.contract import ops

TARGETS: list[str] = []
"""Names of the functions that the graphs call."""


def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., tuple[Any, ...]]:
    """A backend that runs nothing, and refuses a graph that writes to its inputs."""
    for node in graph.graph.nodes:
        TARGETS.append(str(node.target))
        if node.target is triton_kernel_wrapper_mutation:
            check_writes(**node.kwargs)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    shapes = [node.meta["example_value"] for node in output.args[0]]
    return lambda *inputs: tuple(map(as_traced, shapes))


def check_writes(
    kernel_idx: int, constant_args_idx: int, tma_descriptor_metadata: Any, kwargs: dict[str, Any], **others: Any
) -> None:
    """A launch writes to no input, for all torch.compile sees: it copies what it believes to be written.

    Nor to rows of a tensor: torch.compile copies them, and reads behind them where they aren't the first (torch 2.11).
    Nor to a tensor with an inner size that may be 0 for all that is known: a stride is then at least 1 for torch, and a product
    of sizes for Inductor, which takes them for different strides, and fails at the copy that it makes (torch 2.11).
    """
    values = {name: node.meta["example_value"] for name, node in kwargs.items()}
    says = f"{kernel_side_table.get_kernel(kernel_idx).fn.__name__} writes to"
    for name in get_mutated_tensors(kernel_idx, constant_args_idx, values, tma_descriptor_metadata):
        if kwargs[name].op == "placeholder":
            raise RuntimeError(f"{says} {name}, as torch.compile reads it, which is an input")
        if kwargs[name].target is operator.getitem and isinstance(kwargs[name].args[1], (slice, tuple)):
            raise RuntimeError(f"{says} {name}, which is a part of a tensor")
        for size in values[name].shape[1:]:
            if isinstance(size, torch.SymInt) and size.node.shape_env.bound_sympy(size.node.expr).lower < 1:
                raise RuntimeError(f"{says} {name}, of which a size, {size}, may be 0 as far as torch.compile can tell")


CHUNKS = "@chunks"
"""Behind an op: a case of padded chunks, for a teacher parts of them."""
FROZEN = "@frozen"
"""Behind an op: x alone wants a gradient."""
PRODUCTS = "@products"
"""Behind fused_moe: a case whose products PyTorch makes on Hopper."""


def trace(name: str, dtype: torch.dtype) -> None:
    """Forward of a case, for every gradient, then its backward."""
    name, _, variant = name.partition("@")
    frozen, chunks, products = (f"@{variant}" == each for each in (FROZEN, CHUNKS, PRODUCTS))
    op, kernel, op_cases = ops[name], liger_triton.backend.kernel(name), cases_of(name)
    chosen = "padded-chunks" if chunks else "dropped" if products else op_cases.cases[0].id
    case = next(case for case in op_cases.cases if case.id == chosen)
    arguments = complete(op, op_cases.build(case, dtype, "cpu"))
    there = present(op, arguments)
    needs = tuple(tensor in there and (tensor == "x" or not frozen) for tensor in op.differentiable)
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
    TARGETS.clear()
    run(lambda saved, incoming: kernel.backward(needs, saved, *incoming, **options), saved, incoming)
    if products and not any("_grouped_product" in target for target in TARGETS):
        raise RuntimeError(f"{name}: PyTorch makes no product in backward")


def _always(device: torch.device) -> bool:
    return True


def main() -> int:
    with TritonCompiler().compiling("sm_90"):
        pass  # from here on Triton's driver is that of a machine which isn't there
    failed = 0
    # Without a GPU, Dynamo would look into Triton instead of taking a launch as one step.
    with mock.patch("torch.utils._triton.has_triton", return_value=True), torch.no_grad():
        for name in sys.argv[1:]:
            op, _, layout = name.partition("@")
            try:
                if name.endswith(GRADIENTS):
                    check_copies_no_gradient(op, liger_triton.backend)
                elif layout in LAYOUTS:
                    backward_operators(op, liger_triton.backend, layout, dynamic=True)
                elif name.endswith(PRODUCTS):
                    with mock.patch("liger_triton.ops.fused_moe.is_hopper", _always):
                        trace(name, torch.bfloat16)
                else:
                    for dtype in (torch.float32, torch.bfloat16):
                        trace(name, dtype)
            except (TorchDynamoException, AssertionError) as error:  # Dynamo of torch 2.11 asserts
                failed += 1
                print(f"{name}: {error}")
    print(f"{len(sys.argv) - 1 - failed} traced")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
