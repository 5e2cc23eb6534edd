"""Traces by torch.compile of a kernel's backward, without a device to run it on."""

from __future__ import annotations

import faulthandler
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from liger_conformance import layouts
from liger_conformance.case import Make, cases_of
from liger_conformance.evaluate import complete, incoming_for, kept_gradients, name_results, present, with_leaves
from liger_core import BackendInfo, torch_state
from liger_core.autograd import differentiable
from liger_core.contract import ops
from liger_core.custom_op import DEFINED

CPU_SECONDS = 600
"""CPU time of its own, after which a process that traces is ended: it hangs in a loop."""


def run_tracing(command: Sequence[str | os.PathLike[str]], environment: Mapping[str, str]) -> str:
    """Run a program that traces; what it prints.

    It is ended after `CPU_SECONDS` of its own, however long it has to wait for others on this machine. The test that calls is not
    ended by the clock of ``faulthandler_timeout``.

    Raises:
        AssertionError: the program fails.
    """
    faulthandler.cancel_dump_traceback_later()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, preexec_fn=_limit_cpu_time
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def _limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": Tensor.contiguous,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads last": layouts.channels_last,
    "with gaps": lambda x: torch.cat((x, x), 3)[..., : x.shape[3]],
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
}
"""How the gradients of heads, ``[B, heads, S, D]``, may lie in memory."""


def check_memory_of_gradients(rope: Any, device: str, of_q: str, of_k: str, trace: Callable[[], object]) -> None:
    """Whatever memory torch.compile gives to gradients, a kernel's backward of rope gives the bits that it gives eagerly.

    Args:
        rope: the kernel's module.
        device: to run on.
        of_q, of_k: of `LAYOUTS`.
        trace: makes the module take what follows for traced code.
    """
    make = Make(torch.bfloat16, device)
    dq, dk = LAYOUTS[of_q](make.randn(2, 4, 6, 16)), LAYOUTS[of_k](make.randn(2, 2, 6, 16))
    saved = make.randn(2, 6, 16), make.randn(2, 6, 16)
    expected = rope.backward((True, True), saved, dq, dk)
    trace()
    for gradient, wanted in zip(rope.backward((True, True), saved, dq, dk), expected, strict=True):
        assert gradient is not None
        assert wanted is not None
        assert torch.equal(gradient, wanted)


GRADIENTS = "@gradients"
"""Behind the name of an op: its backward as autograd calls it. There Dynamo doesn't know a gradient's strides."""


def check_copies_no_gradient(name: str, backend: BackendInfo) -> None:
    """Compile the first case of an op. Its results may have any strides, and so may their gradients.

    Raises:
        RuntimeError: the backward copies a gradient.
    """
    if "aten.clone.default" in backward_operators(name, backend):
        raise RuntimeError(f"{name}: backward copies a gradient, as Dynamo does where its strides are asked for")


def backward_operators(
    name: str, backend: BackendInfo, layout: str | None = None, dynamic: bool | None = None
) -> list[str]:
    """The operators of the graph that torch.compile makes of the backward, of all gradients, in order.

    Args:
        name: of an op, of which the first case is compiled.
        backend: whose kernel it is.
        layout: of `layouts.LAYOUTS`, of all arguments and gradients that it fits.
        dynamic: torch.compile's.
    """
    op, op_cases = ops[name], cases_of(name)
    arguments = complete(op, op_cases.build(op_cases.cases[0], torch.float32, "cpu"))
    arguments |= {tensor: _laid_out(arguments[tensor], layout) for tensor in op.tensors}
    names = present(op, arguments)
    arguments = with_leaves(op, arguments, names)
    needs = tuple(tensor in names for tensor in op.differentiable)
    run = differentiable(op, backend.kernel(name), backend.language)
    graphs: list[list[str]] = []

    def call(*tensors: Tensor | None) -> Any:
        values = arguments | dict(zip(op.tensors, tensors, strict=True))
        return run(values, needs, {option: values[option] for option in op.options})

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        returned: Any = output.args[0]
        results = [None if node is None else as_traced(node.meta["val"]) for node in returned]

        def run_nothing(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return results

        run_nothing._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run_nothing

    torch.compiler.reset()
    with torch.enable_grad():
        engine = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        compiled = torch.compile(call, backend=engine, fullgraph=True, dynamic=dynamic)
        results = name_results(op, compiled(*[arguments[tensor] for tensor in op.tensors]))
        flowing = incoming_for(op, arguments, results)
        outputs = [result for name, result in results.items() if name in flowing and result is not None]
        torch.autograd.backward(outputs, [_laid_out(gradient, layout) for gradient in flowing.values()])
    _, backward = graphs
    return backward


def _laid_out(tensor: Tensor | None, layout: str | None) -> Tensor | None:
    if tensor is None or layout is None or not layouts.LAYOUTS[layout].fits(tensor):
        return tensor
    return layouts.LAYOUTS[layout].apply(tensor)


def as_traced(value: Any) -> Any:
    """A value that a graph returns: a tensor without values, or a size, in the sizes that the trace was made with."""
    if isinstance(value, torch.SymInt):
        return cast("Any", value).node.hint
    if not isinstance(value, Tensor):
        return value
    sizes = ([*map(as_traced, numbers)] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(*sizes, dtype=value.dtype)


class Writes(TorchDispatchMode):
    """Runs `opaque` launches as custom ops, and looks at what they write to.

    Attributes:
        ran: the custom ops, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "liger":
            return func(*args, **(kwargs or {}))
        before = [each.clone() if isinstance(each, Tensor) else None for each in args]
        name = func.name().removeprefix("liger::")
        with self:  # one op may run others
            result = DEFINED[name](*args, **(kwargs or {}))
        self.ran.add(name)
        for argument, old, new in zip(func._schema.arguments, before, args, strict=True):
            if old is None or (argument.alias_info is not None and argument.alias_info.is_write):
                continue
            if not torch.equal(_bytes(old), _bytes(new)):
                raise AssertionError(f"{func.name()} writes to {argument.name}, and doesn't say so")
        return result


def _traces() -> bool:
    return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def custom_ops(
    name: str,
    backend: BackendInfo,
    monkeypatch: Any,
    case_id: str | None = None,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
) -> set[str]:
    """The custom ops that traced calls of an op run: one of its cases, or a few, run eagerly.

    Args:
        name: of the op.
        backend: whose kernel it is.
        monkeypatch: to make host code take this for a trace.
        case_id: a case; by default, the first ones.
        dtype: of the case.
        frozen: whether the first tensor alone wants a gradient.

    Raises:
        AssertionError: one writes to a tensor that torch.compile isn't told of.
    """
    op, op_cases, kernel = ops[name], cases_of(name), backend.kernel(name)
    compiling = torch_state.compiling
    for module in list(sys.modules.values()):
        if getattr(module, "compiling", None) is compiling:
            monkeypatch.setattr(module, "compiling", _traces)
    cases = [case for case in op_cases.cases if case.id == (case_id or "padded-chunks")]
    with torch.no_grad(), Writes() as writes:
        for case in cases if case_id else [*op_cases.cases[:3], *cases]:
            arguments = complete(op, op_cases.build(case, dtype, "cpu"))
            there = present(op, arguments)
            needs = tuple(tensor in there and not (frozen and place) for place, tensor in enumerate(op.differentiable))
            result, saved = kernel.forward(needs, **arguments)
            if True in needs:
                results: list[Any] = [*result] if isinstance(result, tuple) else [result]
                with_gradient = compress(results, kept_gradients(op, arguments, len(results)))
                incoming = [r if r is None else torch.ones_like(r) for r in with_gradient]
                kernel.backward(needs, saved, *incoming, **{option: arguments[option] for option in op.options})
    return writes.ran
