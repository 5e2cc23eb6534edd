"""Running an op in one language, and proving that this language ran it."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import BIG
from liger_core.backend import BackendInfo, backends
from liger_core.contract import Op, ops

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What a test is about: one op in one language on one device."""

    op: Op[..., Any]
    language: str
    device: str
    backend: BackendInfo | None
    """None for the reference, whose language is ``torch``."""
    lane: str
    """What success is called: ``passed``, or ``interpreted`` where no hardware was involved."""

    @property
    def kernel(self) -> ModuleType | None:
        return self.backend.kernel(self.op.name) if self.backend else None

    def __str__(self) -> str:
        return f"{self.op.name}-{self.language}-{self.device}"


class WrongRoute(AssertionError):
    """Another implementation ran than the one that was asked for."""


@dataclass
class Observed:
    """What was seen of a kernel while it ran: the `saved` of each forward, and what each backward returned."""

    saved: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)


def require(holds: bool, message: str) -> None:
    """Assert what is about tensors: of an ``assert`` on them, pytest would show all their elements."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(message)


@contextlib.contextmanager
def only(target: Target) -> Iterator[Observed]:
    """Run ops in the target's language, and in no other: every reference and every other kernel raises `WrongRoute`.

    Raises:
        WrongRoute: also when nothing of the target ran.
    """
    observed = Observed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(liger_core.use(target.language))
        stack.enter_context(interpreters.checking(target.backend, target.device))
        if target.backend is None:
            ran: list[bool] = []
            reference = target.op.reference
            stack.enter_context(_replaced(target.op, "reference", lambda **kw: (ran.append(True), reference(**kw))[1]))
        else:
            for op in ops.values():
                stack.enter_context(_replaced(op, "reference", _forbid(f"the reference of {op.name}", target)))
            ran = observed.saved
            _watch(stack, target.kernel, observed)
        for module in _other_kernels(target):
            what = f"{module.__name__}.forward"
            stack.enter_context(_replaced(module, "forward", _forbid(what, target)))
        yield observed
    if not ran:
        raise WrongRoute(f"{target} was asked for, and didn't run")


def _other_kernels(target: Target) -> list[ModuleType]:
    """The kernels of other languages that are imported: only those could be called past the dispatcher."""
    others = [f"{b.package}.ops.{op}" for b in backends() if b.language != target.language for op in ops]
    modules = [sys.modules[name] for name in others if name in sys.modules]
    return [module for module in modules if hasattr(module, "forward")]


def _forbid(what: str, target: Target) -> Callable[..., Any]:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise WrongRoute(f"{what} ran where {target} was asked for")

    return forbidden


def _watch(stack: contextlib.ExitStack, kernel: ModuleType, observed: Observed) -> None:
    forward, backward = kernel.forward, kernel.backward
    # cuda.tile keeps what a kernel's module held when it was compiled, so these functions; not what they saw.
    watching = [observed]
    stack.callback(watching.clear)

    def watched_forward(needs: Any, **arguments: Any) -> Any:
        result, saved = forward(needs, **arguments)
        watching[0].saved.append(saved)
        return result, saved

    def watched_backward(*args: Any, **options: Any) -> Any:
        gradients = backward(*args, **options)
        watching[0].gradients.append(gradients)
        return gradients

    stack.enter_context(_replaced(kernel, "forward", watched_forward))
    stack.enter_context(_replaced(kernel, "backward", watched_backward))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass
class Outcome:
    """An op's results by name, and the gradients of the arguments that wanted one."""

    results: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]

    def items(self) -> dict[str, Tensor | None]:
        """Results and gradients in one."""
        return self.results | {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}


def name_results(op: Op[..., Any], returned: Any) -> dict[str, Tensor | None]:
    """What a call returned, by name; a bare tensor is called ``result``."""
    if isinstance(returned, Tensor):
        return {"result": returned}
    names = getattr(returned, "_fields", None) or [f"result {i}" for i in range(len(returned))]
    return dict(zip(names, returned, strict=True))


def differentiable_results(op: Op[..., Any], results: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The results that have a gradient, by the contract."""
    kept = op.keeps_gradient if op.keeps_gradient and len(results) > 1 else (True,) * len(results)
    return {name: r for (name, r), keeps in zip(results.items(), kept, strict=True) if keeps and r is not None}


def present(op: Op[..., Any], arguments: Arguments) -> tuple[str, ...]:
    """The differentiable arguments that this call has."""
    return tuple(name for name in op.differentiable if arguments[name] is not None)


def incoming_for(op: Op[..., Any], results: dict[str, Tensor | None], draw: int = 0) -> dict[str, Tensor]:
    """An incoming gradient for each differentiable result, the same at each call of a draw: not one, and not uniform."""
    incoming = {}
    for name, result in differentiable_results(op, results).items():
        place = result.device if result.numel() > BIG else "cpu"
        seed = zlib.crc32(f"{op.name}/{name}/{draw}".encode() if draw else f"{op.name}/{name}".encode())
        generator = torch.Generator(place).manual_seed(seed)
        values = torch.randn(result.shape, generator=generator, device=place) if result.dim() else torch.tensor(-1.5)
        incoming[name] = values.to(device=result.device, dtype=result.dtype)
    return incoming


def complete(op: Op[..., Any], arguments: Arguments) -> Arguments:
    """A case's arguments with the contract's defaults filled in."""
    return op.bind((), arguments)


def has_rows(value: Any, rows: int) -> bool:
    """Whether an argument or a result is a tensor of so many rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def refusal(target: Target, arguments: Arguments) -> str | None:
    """Why the target's kernel can't take a call, or None."""
    refuses = getattr(target.kernel, "refuses", None)
    return refuses(**complete(target.op, arguments)) if refuses else None


def with_leaves(op: Op[..., Any], arguments: Arguments, wanted: tuple[str, ...]) -> Arguments:
    """The arguments, detached but with their strides, the `wanted` ones requiring a gradient."""
    return {
        name: value.detach().requires_grad_(name in wanted) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def evaluate(
    op: Op[..., Any],
    call: Callable[..., Any],
    arguments: Arguments,
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
) -> Outcome:
    """Call, then differentiate.

    Args:
        op: the contract.
        call: the op, or its reference.
        arguments: by name, detached.
        wanted: the arguments to differentiate by; None: all that are there.
        incoming: gradients of the results; None: those of `incoming_for`.
    """
    arguments = complete(op, arguments)
    wanted = present(op, arguments) if wanted is None else wanted
    arguments = with_leaves(op, arguments, wanted)
    results = name_results(op, call(**arguments))
    incoming = incoming_for(op, results) if incoming is None else incoming
    outputs = {n: r for n, r in differentiable_results(op, results).items() if n in incoming and r.requires_grad}
    gradients: dict[str, Tensor | None] = {}
    if wanted:
        assert outputs, f"no result has a gradient, though {', '.join(wanted)} want one"
        found = torch.autograd.grad(
            list(outputs.values()), [arguments[n] for n in wanted], [incoming[n] for n in outputs], allow_unused=True
        )
        gradients = dict(zip(wanted, found, strict=True))
    for name, result in results.items():
        if name not in differentiable_results(op, results):
            require(result is None or not result.requires_grad, f"{name} must not have a gradient")
    return Outcome({n: r if r is None else r.detach() for n, r in results.items()}, gradients)


WITHOUT_FLOAT64 = ("npu",)
"""Device types where much of PyTorch refuses float64: there the truth is computed on the CPU."""


def widen(value: Any) -> Any:
    """A tensor in double precision, on a device that has it; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type in WITHOUT_FLOAT64:
        value = value.cpu()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def baseline_and_truth(
    op: Op[..., Any],
    arguments: Arguments,
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
    draw: int = 0,
) -> tuple[Outcome, Outcome]:
    """The reference on these arguments in their own dtype, and in float64; without `incoming`, on that of the draw.

    The latter is on the CPU where the arguments' device has no float64.
    """
    arguments = complete(op, arguments)
    if incoming is None:
        with torch.no_grad():
            incoming = incoming_for(op, name_results(op, op.reference(**arguments)), draw)
    baseline = evaluate(op, op.reference, arguments, wanted, incoming)
    wide = {name: widen(value) for name, value in arguments.items()}
    truth = evaluate(op, op.reference, wide, wanted, {name: widen(value) for name, value in incoming.items()})
    return baseline, truth


class Poison(TorchDispatchMode):
    """Fills what is allocated but not written with NaN (integers: their least value), so that an unwritten element shows."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in _EMPTY:
            if result.is_floating_point() or result.is_complex():
                result.fill_(float("nan"))
            else:
                result.fill_(True if result.dtype is torch.bool else torch.iinfo(result.dtype).min)
        return result


_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
