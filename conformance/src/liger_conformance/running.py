"""Running an op in one language, and proving that this language ran it."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import liger_core
from liger_conformance import interpreters, reach
from liger_conformance.case import BIG
from liger_conformance.compare import DRAWS, largest_error
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
    """What was seen of a kernel while it ran: the `saved` of each forward, and what each backward returned.

    Of the reference it is what autograd returned.
    """

    saved: list[Any] = field(default_factory=list[Any])
    gradients: list[Any] = field(default_factory=list[Any])


def is_empty(arguments: Mapping[str, Any]) -> bool:
    """Whether a tensor of a call has no elements. Then there may be nothing to compute, and so nothing to launch."""
    return any(isinstance(value, Tensor) and value.numel() == 0 for value in arguments.values())


def require(holds: bool, message: str) -> None:
    """Assert what is about tensors: of an ``assert`` on them, pytest would show all their elements."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(message)


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
        stack.enter_context(_watched(target))
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
            what = f"{module.__name__}.forward"
            stack.enter_context(_replaced(module, "forward", _forbid(what, target)))
        yield observed
    if not ran:
        raise WrongRoute(f"{target} was asked for, and didn't run")


@contextlib.contextmanager
def _watched(target: Target) -> Generator[None, None, None]:
    """See what is reached of the target's package, if this process is to."""
    if target.backend is None or reach.current is None:
        yield
        return
    # What runs once, such as an import, would be seen by whichever test comes first, or by none that is watched.
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
        found: list[Tensor | None] = [None] * len(differentiable)
        for i, value in enumerate(differentiable):
            if value is not None and value.requires_grad:
                value.register_hook(functools.partial(found.__setitem__, i))
        if any(value is not None and value.requires_grad for value in differentiable):
            observed.gradients.append(found)
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
        from liger_conformance.running import WrongRoute

        raise WrongRoute("WHAT")

    what = f"the reference of {op.name} ran where {target} was asked for"
    constants = tuple(what if constant == "WHAT" else constant for constant in forbidden.__code__.co_consts)
    return forbidden.__code__.replace(co_consts=constants)


def _watch(stack: contextlib.ExitStack, target: Target, observed: Observed) -> None:
    kernel, backend = target.kernel, target.backend
    assert kernel is not None
    assert backend is not None
    # A compiler takes launches before they are seen; test_compiled counts what it made.
    counted = interpreters.counts_launches(backend) and target.lane in ("passed", "interpreted")
    launches = stack.enter_context(interpreters.launches())
    forward, backward = kernel.forward, kernel.backward
    # cuda.tile keeps what a kernel's module held when it was compiled, so these functions; not what they saw.
    watching = [observed]
    stack.callback(watching.clear)

    def launching(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nonlocal counted
        if is_empty(named):
            counted = False  # in backward neither
        before = len(launches)
        found = function(*args, **named)
        # Where nothing flows into some result, what is left may be the identity, as of fused_add_rms_norm's sum.
        if counted and len(launches) == before and all(value is not None for value in args):
            raise WrongRoute(f"{function.__name__} of {target} launched no kernel: it computes by other means")
        return found

    def watched_forward(needs: Any, **arguments: Any) -> Any:
        result, saved = launching(forward, needs, **arguments)
        watching[0].saved.append(saved)
        return result, saved

    def watched_backward(*args: Any, **options: Any) -> Any:
        gradients = launching(backward, *args, **options)
        watching[0].gradients.append(gradients)
        return gradients

    stack.enter_context(_replaced(kernel, "forward", watched_forward))
    stack.enter_context(_replaced(kernel, "backward", watched_backward))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
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


def kept_gradients(op: Op[..., Any], arguments: Arguments, results: int) -> tuple[bool, ...]:
    """For each of so many results of a call, whether it has a gradient, by the contract."""
    return (op.has_gradient(arguments) if results > 1 else None) or (True,) * results


def differentiable_results(
    op: Op[..., Any], arguments: Arguments, results: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """The results of a call that have a gradient."""
    kept = kept_gradients(op, arguments, len(results))
    return {name: r for (name, r), keeps in zip(results.items(), kept, strict=True) if keeps and r is not None}


def present(op: Op[..., Any], arguments: Arguments) -> tuple[str, ...]:
    """The differentiable arguments that this call has."""
    return tuple(name for name in op.differentiable if arguments[name] is not None)


def incoming_for(op: Op[..., Any], arguments: Arguments, results: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """An incoming gradient for each differentiable result, the same at each call: not one, and not uniform."""
    incoming: dict[str, Tensor] = {}
    for name, result in differentiable_results(op, arguments, results).items():
        place = result.device if result.numel() > BIG else "cpu"
        generator = torch.Generator(place).manual_seed(zlib.crc32(f"{op.name}/{name}".encode()))
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
    incoming = incoming_for(op, arguments, results) if incoming is None else incoming
    outputs = {
        n: r for n, r in differentiable_results(op, arguments, results).items() if n in incoming and r.requires_grad
    }
    gradients: dict[str, Tensor | None] = {}
    if wanted:
        assert outputs, f"no result has a gradient, though {', '.join(wanted)} want one"
        found = torch.autograd.grad(
            list(outputs.values()), [arguments[n] for n in wanted], [incoming[n] for n in outputs], allow_unused=True
        )
        gradients = dict(zip(wanted, found, strict=True))
    for name, result in results.items():
        if name not in differentiable_results(op, arguments, results):
            require(result is None or not result.requires_grad, f"{name} must not have a gradient")
    return Outcome({n: r if r is None else r.detach() for n, r in results.items()}, gradients)


def is_lost(target: Target) -> bool:
    """Whether this process can't use the target's device any more, as after a kernel's access to a wrong address."""
    if target.lane != "passed" or target.device == "cpu":
        return False
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False


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


def incoming_of(op: Op[..., Any], arguments: Arguments) -> dict[str, Tensor]:
    """An incoming gradient for each differentiable result of a call."""
    arguments = complete(op, arguments)
    with torch.no_grad():
        return incoming_for(op, arguments, name_results(op, op.reference(**arguments)))


def baseline_and_truth(
    op: Op[..., Any],
    arguments: Arguments,
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
) -> tuple[Outcome, Outcome]:
    """The reference on these arguments in their own dtype, and in float64.

    The latter is on the CPU where the arguments' device has no float64.
    """
    arguments = complete(op, arguments)
    incoming = incoming_of(op, arguments) if incoming is None else incoming
    baseline = evaluate(op, op.reference, arguments, wanted, incoming)
    wide = {name: widen(value) for name, value in arguments.items()}
    truth = evaluate(op, op.reference, wide, wanted, {name: widen(value) for name, value in incoming.items()})
    return baseline, truth


def errors_nearby(
    op: Op[..., Any],
    arguments: Arguments,
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
    rows: int | None = None,
) -> dict[str, list[Tensor]]:
    """How far roundings may take an answer from the truth, for each result and gradient: a few samples.

    Half of them are the baseline's largest error at other inputs, as near as roundings are. The others are that of the
    reference whose inputs and operations are all rounded to float32 at random, those that add up terms at each term: what
    float32 inside comes to with this condition. A baseline may do better for no merit, as in the gradient of a layer norm of
    two columns, where it cancels. What the truth decides, such as which elements are equal, stays decided. What has so many
    `rows` has an error for each.
    """
    arguments = complete(op, arguments)
    incoming = incoming_of(op, arguments) if incoming is None else incoming
    wide, wide_incoming = ({name: widen(value) for name, value in values.items()} for values in (arguments, incoming))
    halves = any(isinstance(v, Tensor) and v.dtype in (torch.bfloat16, torch.float16) for v in arguments.values())
    decisions: list[Tensor] = []
    with Deciding(decisions):
        truth = evaluate(op, op.reference, wide, wanted, wide_incoming)
    errors: dict[str, list[Tensor]] = {}
    for draw in range(1, DRAWS):
        near, near_incoming = moved(arguments, draw), moved(incoming, draw)
        with Decided(decisions):
            baseline = evaluate(op, op.reference, near, wanted, near_incoming)
        near, near_incoming = ({n: widen(v) for n, v in values.items()} for values in (near, near_incoming))
        with Decided(decisions):
            near_truth = evaluate(op, op.reference, near, wanted, near_incoming)
        inexact, inexact_incoming = (moved(values, draw, torch.float32) for values in (wide, wide_incoming))
        with Decided(decisions, draw, halves):
            rounded = evaluate(op, op.reference, inexact, wanted, inexact_incoming)
        for name, value in truth.items().items():
            found = errors.setdefault(name, [])
            by_row = rows is not None and has_rows(value, rows)
            found.append(largest_error(baseline.items()[name], near_truth.items()[name], by_row))
            found.append(largest_error(rounded.items()[name], value, by_row))
    return errors


def without_overflow(
    op: Op[..., Any],
    arguments: Arguments,
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, Tensor] | None = None,
) -> Outcome:
    """The baseline as it would be if its dtypes had no largest number: in float64, each operation rounded to their digits."""
    arguments = complete(op, arguments)
    incoming = incoming_of(op, arguments) if incoming is None else incoming
    wide, wide_incoming = ({name: widen(value) for name, value in values.items()} for values in (arguments, incoming))
    dtypes: list[torch.dtype] = []
    with _Dtypes(dtypes):
        evaluate(op, op.reference, arguments, wanted, incoming)
    with _Rounded(dtypes) as rounding:
        found = evaluate(op, op.reference, wide, wanted, wide_incoming)
    assert next(rounding.next, None) is None, f"{op.name}: the reference does other operations in float64"
    return found


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: PyTorch imports Dynamo for that at the first operation, which takes 3 s. Nothing is compiled in here."""
        return False


class Deciding(_Mode):
    """Notes what operations decide: the results that are no floating-point numbers, such as those of comparisons; and signs."""

    def __init__(self, decisions: list[Tensor]) -> None:
        mode: Any = super()
        mode.__init__()
        self.decisions = decisions

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in function._schema.returns):  # a view, or in place
            return result
        return tree_map_only(Tensor, functools.partial(self._one, function, args, kwargs or {}), result)

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if not _is_inexact(value) or function._schema.name in _SIGNS:
            self.decisions.append(value)
        return value


class Decided(Deciding):
    """Gives operations the results that were noted, and may round the others. Of signs only those of 0 are given.

    Args:
        decisions: of a run of the same operations.
        seed: of the roundings, which move the result of each operation in float64 by up to half a unit of rounding in
            float32; None for no rounding. Those of a sum and of a matrix product move each term so, all terms of an element
            alike: in which order terms are added, and so how large the sums between are, is nobody's to say. A row of a
            log-softmax is moved as a whole besides: its log-sum-exp is rounded.
        halves: operands have half precision, whose products tensor cores add up, `AT_ONCE` at a time, to a sum that they cut
            off: always towards zero.
    """

    def __init__(self, decisions: list[Tensor], seed: int | None = None, halves: bool = False) -> None:
        super().__init__(decisions)
        self.next, self.seed, self.halves, self.rounded = iter(decisions), seed, halves, 0

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if not _is_inexact(value):
            return next(self.next).to(value.device, value.dtype)
        if function._schema.name in _SIGNS:
            return value.where(next(self.next).to(value.device) != 0, 0.0)
        if self.seed is None:
            return value
        self.rounded += 1
        generator = torch.Generator(value.device).manual_seed(zlib.crc32(f"{self.seed}/{self.rounded}".encode()))
        by = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
        cut = torch.rand((), generator=generator, device=value.device, dtype=torch.float64)
        terms, lost, walk = self._moves(function, args, kwargs, value)
        moved = by * terms - cut * lost
        if walk is not None:
            moved += torch.randn(value.shape, generator=generator, device=value.device, dtype=torch.float64) * walk
        if function._schema.name == "aten::_log_softmax":
            log_sums = _log_sums(args[0], value, args[1])
            by = torch.rand(log_sums.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
            moved += by * log_sums
        # Infinite terms leave no error to speak of, and infinity times 0 is NaN.
        return value + torch.finfo(torch.float32).eps * moved.where(moved.isfinite(), 0.0)

    def _moves(
        self, function: Any, args: Any, kwargs: Any, value: Tensor
    ) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """What of a result is rounded: itself, or the terms that are added up to it, without their signs; and what is cut off.

        Of a product of float32 matrices also how far the sums between take it, if its n products join one after another. Each of
        those sums is rounded by up to half a unit of itself, 1/√12 of one in root mean square. Their squares add up to
        n (value² / 3 + Σ products² / 6): they grow to the result along a straight line, and walk about it.

        Sums that are cut off lose about half a unit each time, and as much again because products are cut off before they join.
        Where terms cancel sums are as large as their root mean square suggests, of any sign. Those that don't grow to the result,
        of which they are half on average, and all lose alike.
        """
        name = function._schema.name
        if name == "aten::_log_softmax_backward_data":  # gradient − e^output · Σ gradient
            gradient, output, dim = _magnitude(args[0]), args[1], args[2]
            return gradient + output.exp() * gradient.sum(dim, keepdim=True), 0.0, None
        if name not in _SUMS and name not in _PRODUCTS:
            return value, 0.0, None
        terms = function(*tree_map_only(Tensor, _magnitude, args), **kwargs)
        if name not in _PRODUCTS:
            return terms, 0.0, None
        products = args[_PRODUCTS[name]].shape[-1]
        squares = function(*tree_map_only(Tensor, lambda operand: _magnitude(operand).square(), args), **kwargs)
        if not self.halves:
            return terms, 0.0, (products / 12 * (value.square() / 3 + squares / 6)).sqrt()
        times = products / AT_ONCE
        return terms + times * squares.sqrt(), times * value / 2, None


class _Dtypes(Deciding):
    """Notes the dtypes of operations' results, but for conversions, which float64 has none of."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__([])
        self.dtypes = dtypes

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if _is_inexact(value) and function._schema.name != "aten::_to_copy":
            self.dtypes.append(value.dtype)
        return value


class _Rounded(Deciding):
    """Rounds the results of operations to the digits of the dtypes that were noted."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__([])
        self.next = iter(dtypes)

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if not _is_inexact(value) or function._schema.name == "aten::_to_copy":
            return value
        kind = torch.finfo(next(self.next))
        if value.is_complex():
            return torch.view_as_complex(_rounded_to(torch.view_as_real(value), kind))
        return _rounded_to(value, kind)


def _rounded_to(value: Tensor, kind: torch.finfo) -> Tensor:
    """A float64 value, rounded to the digits of a dtype; the unit of its subnormal values is that of its smallest normal one."""
    digits = 1 - round(math.log2(kind.eps))
    exponent = torch.frexp(value)[1].clamp(min=1 + round(math.log2(kind.smallest_normal)))
    unit = torch.ldexp(torch.ones_like(value), exponent - digits)
    return torch.where(value.isfinite(), (value / unit).round() * unit, value)


def _magnitude(value: Tensor) -> Tensor:
    return value.abs() if _is_inexact(value) else value


def _log_sums(x: Tensor, log_softmax: Tensor, dim: int) -> Tensor:
    """What is rounded of each row: its log-sum-exp, or the logarithm that is added to its maximum, whichever is larger."""
    whole = (x - log_softmax).nan_to_num(0.0, 0.0, 0.0)
    return torch.maximum(whole.abs(), (whole - x.amax(dim, keepdim=True)).abs()).amax(dim, keepdim=True)


AT_ONCE = 16
"""Products of half-precision numbers that a tensor core adds to a float32 sum at a time."""

_SIGNS = ("aten::sgn", "aten::sign")
_SUMS = ("aten::sum", "aten::mean")
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::dot": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix products, and where their first operand stands."""


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def moved(values: dict[str, Any], draw: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The values, of which floating-point ones are moved by up to a unit of rounding, otherwise for each draw.

    The unit is of `dtype`, or of each one's own. Zeros, infinities and NaN stay.
    """
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor) and _is_inexact(value):
            eps = torch.finfo(dtype or value.dtype).eps
            generator = torch.Generator(value.device).manual_seed(zlib.crc32(f"{name}/{draw}".encode()))
            by = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32)
            found[name] = (widen(value) * (1 + eps * (2 * widen(by) - 1))).to(value.device, value.dtype)
    return found


class Poison(_Mode):
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
