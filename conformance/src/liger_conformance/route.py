"""The route of a call: an op runs in one language, and this language is proved to have run it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from torch import Tensor

import liger_core
from liger_conformance import interpreters, reach
from liger_conformance.target import Target
from liger_core.backend import backends
from liger_core.contract import Op, ops


class WrongRoute(AssertionError):
    """Another implementation ran than the one that was asked for."""


@dataclass
class Observed:
    """Values that were seen of a kernel while it ran: the `saved` of each forward, and the gradients that each backward
    returned.

    The reference's values are those that autograd saves and returns.
    """

    saved: list[Any] = field(default_factory=list[Any])
    gradients: list[Any] = field(default_factory=list[Any])


def is_empty(arguments: Mapping[str, Any]) -> bool:
    """Whether a tensor of a call has no elements. Then there may be nothing to compute, and so nothing to launch."""
    return any(isinstance(value, Tensor) and value.numel() == 0 for value in arguments.values())


@contextlib.contextmanager
def only(target: Target) -> Generator[Observed, None, None]:
    """Run ops in the target's language, and in no other: every reference and every other kernel raises `WrongRoute`.

    Raises:
        WrongRoute: also when nothing of the target ran, or when its forward or its backward launched nothing.
    """
    observed = Observed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(liger_core.use(target.language))
        stack.enter_context(interpreters.checking(target.backend, target.device))
        stack.enter_context(watched(target))
        if target.backend is None:
            ran: list[bool] = []
            stack.enter_context(_replaced(target.op, "reference", _watched_reference(target.op, ran, observed)))
        else:
            for op in ops.values():
                # The code, not a name: a kernel may hold the function, as the op's `__wrapped__` does.
                stack.enter_context(_replaced(op.reference, "__code__", _forbidden_code(op, target)))
            ran = observed.saved
            _watch(stack, target, observed)
        for module in _other_kernels(target):
            stack.enter_context(_replaced(module, "forward", _forbid(f"{module.__name__}.forward", target)))
        yield observed
    if not ran:
        raise WrongRoute(f"{target} was asked for, and didn't run")


@contextlib.contextmanager
def watched(target: Target) -> Generator[None, None, None]:
    """See what is reached of the target's package, if this process is to."""
    if target.backend is None or reach.current is None:
        yield
        return
    # An import runs once: it would be seen by whichever test comes first, or by none that is watched.
    target.backend.kernel(target.op.name)
    _forget_before(target.op.name, target.backend.package)
    with interpreters.launches() as launches, reach.current.tracing():
        yield
    reach.current.launched |= {(target.backend.package, str(launch)) for launch in launches}


CACHED = type(functools.cache(len))


@functools.cache
def _forget_before(op: str, package: str) -> None:
    """Before an op is watched for the first time: what earlier calls left in caches of a package's host code."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.ops"):
            for value in vars(module).values():
                if isinstance(value, CACHED):
                    value.cache_clear()


def _watched_reference(op: Op[..., Any], ran: list[bool], observed: Observed) -> Callable[..., Any]:
    """The reference, which notes that it ran, and what autograd finds for its arguments: for those that autocast has cast,
    before these gradients are cast back.
    """
    reference = op.reference

    def watched(**arguments: Any) -> Any:
        ran.append(True)
        differentiable = [arguments[name] for name in op.differentiable]
        gradients: list[Tensor | None] = [None] * len(differentiable)
        for i, value in enumerate(differentiable):
            if value is not None and value.requires_grad:
                value.register_hook(functools.partial(gradients.__setitem__, i))
        if any(value is not None and value.requires_grad for value in differentiable):
            observed.gradients.append(gradients)
        return reference(**arguments)

    return watched


def _other_kernels(target: Target) -> list[ModuleType]:
    """The kernels of other languages that are imported: only those could be called past the dispatcher."""
    others = [f"{b.package}.ops.{op}" for b in backends() if b.language != target.language for op in ops]
    modules = [sys.modules[name] for name in others if name in sys.modules]
    return [module for module in modules if hasattr(module, "forward")]


def _forbid(what: str, target: Target) -> Callable[..., Any]:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise WrongRoute(f"{what} ran where {target} was asked for")

    return forbidden


def _forbidden_code(op: Op[..., Any], target: Target) -> CodeType:
    """Code that raises, for a function of any signature. It runs with that function's globals."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        from liger_conformance.route import WrongRoute

        raise WrongRoute("WHAT")

    message = f"the reference of {op.name} ran where {target} was asked for"
    constants = tuple(message if constant == "WHAT" else constant for constant in forbidden.__code__.co_consts)
    return forbidden.__code__.replace(co_consts=constants)


def _watch(stack: contextlib.ExitStack, target: Target, observed: Observed) -> None:
    kernel, backend = target.kernel, target.backend
    assert kernel is not None
    assert backend is not None
    # A compiler takes launches before they are seen; test_compiled counts what it made.
    counted = interpreters.counts_launches(backend) and target.lane in ("passed", "interpreted")
    launches = stack.enter_context(interpreters.launches())
    forward = kernel.forward
    # cuda.tile keeps what a kernel's module held when it was compiled, so these functions; not what they saw.
    watching = [observed]
    stack.callback(watching.clear)

    def launching(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nonlocal counted
        if is_empty(named):
            counted = False  # in backward neither
        before = len(launches)
        returned = function(*args, **named)
        # Where nothing flows into some result, what is left may be the identity, as of fused_add_rms_norm's sum.
        if counted and len(launches) == before and all(value is not None for value in args):
            raise WrongRoute(f"{function.__name__} of {target} launched no kernel: it computes by other means")
        return returned

    def watched_forward(needs: Any, **arguments: Any) -> Any:
        result, saved = launching(forward, needs, **arguments)
        watching[0].saved.append(saved)
        return result, saved

    backward: Any = kernel.backward if target.op.differentiable else None

    def watched_backward(*args: Any, **options: Any) -> Any:
        gradients = launching(backward, *args, **options)
        watching[0].gradients.append(gradients)
        return gradients

    stack.enter_context(_replaced(kernel, "forward", watched_forward))
    if backward is not None:
        stack.enter_context(_replaced(kernel, "backward", watched_backward))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
