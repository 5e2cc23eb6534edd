"""`Op`: a call checks its arguments, chooses a kernel, and is remembered by the metadata of its arguments."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]

from liger_core import dispatch, recompute, resolve, subclasses, torch_state
from liger_core.autograd import HostCode, Parts, Run
from liger_core.backend import Unsupported, backends, close_to
from liger_core.declaration import Arguments, Declaration, Needs, declared
from liger_core.devices import type_of

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Callable[..., Any])

MOST_REMEMBERED = 1024
"""The most calls that an op remembers."""

ops = cast("dict[str, Op[..., Any]]", declared)
"""Every op by name."""

_metadata = operator.attrgetter("__class__", "dtype", "device", "shape", "layout", "requires_grad")
_is_neg = Tensor.is_neg


class Ready(NamedTuple):
    """A call that passed its checks, to be run again with other tensors of the same metadata.

    Attributes:
        run: runs the kernel.
        device: the device type.
        needs: which differentiable arguments need a gradient.
        options: every option by name.
        refuses: a function to ask again at each call, because metadata doesn't decide it; None if there is none.
        host_code: what replays the kernel's host code; None if the language doesn't tell its launches.
    """

    run: Run
    device: str
    needs: Needs
    options: dict[str, Any]
    refuses: Callable[..., str | None] | None
    host_code: HostCode | None = None


class _Itself:
    """The `__get__` of ops. It returns the op itself.

    Dynamo up to torch 2.11 traces a `__get__` that is Python code, and fails at an op that is an instance's attribute. It skips C
    slots. With `object.__repr__` as its `__get__`, this object looks like a C slot, while Python still calls `__call__`.
    """

    def __call__(self, op: Any, owner: Any, kind: Any = None) -> Any:
        return op

    def __get__(self, op: Any, kind: Any = None) -> Any:
        return object.__repr__


class Op(Declaration[P, R]):
    """An op. Calling it runs the best kernel installed for the tensors' device, or the reference."""

    def __init__(self, reference: Callable[P, R], *declaration: Any) -> None:
        super().__init__(reference, *declaration)
        functools.update_wrapper(self, reference)
        self._ready: dict[Any, Ready] = {}
        self._plans: dict[tuple[str, str | None], resolve.Resolution] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.call(dispatch.state.demand, args, kwargs)

    if TYPE_CHECKING:

        def __get__(self, owner: Any, kind: Any = None) -> Self:
            """The op itself, also as an attribute of a class. Because of this method, `help` shows an op as a function."""
            ...

    else:
        __get__ = _Itself()

    def call(self, demand: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Check the arguments, then run the language that `demand` names, or the best one.

        Decisions that depend on metadata alone, such as the checks and the kernel, are remembered by that metadata.
        """
        arguments = self.bind(args, kwargs)
        if torch_state.compiling() or not torch_state.plain():
            return self._call_anew(demand, arguments, None)
        for name in self._sequences:  # a list has no hash
            if type(arguments[name]) is list:
                arguments[name] = tuple(arguments[name])
        try:
            options = self._pick_options(arguments)
            key = (
                demand,
                is_grad_enabled(),
                tuple([t if t is None else (_metadata(t), _is_neg(t)) for t in self._pick_tensors(arguments)]),
                options,
                tuple(map(self._type_of, options)),  # 1, 1.0 and True are equal
            )
            ready = self._ready.get(key)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, a nested one, or an option without a hash
            key = ready = None
        if ready is None:
            return self._call_anew(demand, arguments, key)
        run, device, needs, values, refuses, host_code = ready
        if (_is_any_autocast_enabled() and torch.is_autocast_enabled(device)) or (
            refuses is not None and refuses(**arguments) is not None
        ):
            return self._call_anew(demand, arguments, None)
        if self._check_values is not None:
            self._check_data(device, arguments)
        return run(arguments, needs, values, None, host_code)

    def _call_anew(self, demand: str | None, arguments: Arguments, key: Any) -> R:
        if not torch_state.compiling() and (tracer := torch_state.symbolic_tracer(arguments.values())) is not None:
            return cast("Any", tracer.create_proxy("call_function", self, (), arguments))
        if (handler := subclasses.handler_of([arguments[name] for name in self.tensors])) is not None:
            return handler(self, demand, arguments)
        remembered, original = self._ready, arguments.copy()
        device, refusal, autocast = self.examine(arguments)
        if torch_state.compiling():
            plan_while_tracing(self.name, device, demand)
        elif self._check_values is not None and not torch_state.without_values(self._pick_tensors(arguments)):
            self._check_data(device, arguments)
        chosen = self.resolve(device, demand, refusal, arguments)
        if chosen.run is None:
            # Under autocast the inputs are cast already.
            with torch.autocast(device, enabled=False) if autocast else nullcontext():
                return self._run_reference(arguments)
        grad = torch.is_grad_enabled()
        needs = tuple(
            [grad and arguments[name] is not None and arguments[name].requires_grad for name in self.differentiable]
        )
        options = {name: arguments[name] for name in self.options}
        if autocast:
            with torch.autocast(device, enabled=False):
                return chosen.run(arguments, needs, options)
        if key is not None and self._may_remember(chosen, device, demand, original, arguments):
            host_code = None if chosen.replayable is None else HostCode(chosen.replayable, self._pick_tensors)
            asked_again = self._asked_again(chosen, arguments)
            remember(remembered, key, Ready(chosen.run, device, needs, options, asked_again, host_code))
        return chosen.run(arguments, needs, options)

    def _check_data(self, device: str, arguments: Arguments) -> None:
        if self._check_values is not None and dispatch.reads_values(device):
            self._check_values(**arguments)

    def _run_reference(self, arguments: Arguments) -> R:
        """The reference's result. Inside of `lean` only its arguments are saved for backward, as by a kernel."""
        if (
            self.recompute is None
            or torch_state.compiling()
            or not torch_state.plain()
            or (lean_hooks := recompute.active()) is None
        ):
            return self.reference(**arguments)
        if not any(t is not None and t.requires_grad for t in self._pick_tensors(arguments)):
            return self.reference(**arguments)
        import torch.utils.checkpoint as torch_checkpoint

        checkpoint = cast("Any", torch_checkpoint).checkpoint
        result = checkpoint(self.reference, use_reentrant=False, preserve_rng_state=False, **arguments)
        if torch.is_grad_enabled():
            tensors = {name: arguments[name] for name in self.tensors}
            options = {name: arguments[name] for name in self.options}
            lean_hooks.remember(self.recompute, tensors, options, result, self.reference)
        return cast("R", result)

    def call_parts(self, demand: str | None, arguments: Arguments, parts: Parts) -> Any:
        """Run a kernel on plain parts of tensors that are not plain, and record it for those tensors.

        `arguments` holds every argument by name, the tensors as parts; the whole tensors have passed the checks. Returns
        NotImplemented if the caller has to call the op on the parts, which PyTorch then records: if no kernel takes them, under
        autocast, and while something traces.
        """
        if torch_state.compiling() or not torch_state.plain():
            return NotImplemented
        needs = parts.needs
        try:
            metadata = [t if t is None else (_metadata(t), _is_neg(t)) for t in self._pick_tensors(arguments)]
            key = parts.key, *metadata
            ready = self._ready.get(key)
        except (AttributeError, TypeError, RuntimeError):
            return NotImplemented
        if ready is None:
            original = arguments.copy()
            device, refusal, autocast = self.examine(arguments)
            chosen = None if autocast else self.resolve(device, demand, refusal, arguments)
            if chosen is None or chosen.run is None:
                return NotImplemented
            if not self._may_remember(chosen, device, demand, original, arguments):
                return NotImplemented
            values = {name: arguments[name] for name in self.options}
            ready = Ready(chosen.run, device, needs, values, self._asked_again(chosen, arguments))
            remember(self._ready, key, ready)
        run, device, _, values, refuses, _ = ready
        if (_is_any_autocast_enabled() and torch.is_autocast_enabled(device)) or (
            refuses is not None and refuses(**arguments) is not None
        ):
            return NotImplemented
        if self._check_values is not None:
            self._check_data(device, arguments)
        return run(arguments, needs, values, parts)

    def _may_remember(
        self, chosen: resolve.Candidate, device: str, demand: str | None, original: Arguments, arguments: Arguments
    ) -> bool:
        """Whether the next call with this metadata may run this kernel, on unchanged arguments."""
        plan = self._plans.get((device, demand))
        # If the first choice refused this call, it may take the next one.
        if plan is None or chosen is not plan.chosen:
            return False
        changed = any(arguments[name] is not original[name] for name in self.names)
        return not changed and not any(isinstance(arguments[name], Tensor) for name in self.options)

    def _asked_again(self, chosen: resolve.Candidate, arguments: Arguments) -> Callable[..., str | None] | None:
        """A function to ask for a remembered call: does the kernel refuse it, or is a complex argument a conjugate view?"""
        refuses = chosen.refuses
        names = [name for name in self.tensors if (t := arguments[name]) is not None and t.is_complex()]
        if not names:
            return refuses

        def refuses_or_conjugate(**arguments: Any) -> str | None:
            for name in names:
                if arguments[name].is_conj():
                    return f"{name} is a conjugate view"
            return None if refuses is None else refuses(**arguments)

        return refuses_or_conjugate

    def examine(self, arguments: Arguments) -> tuple[str, str | None, bool]:
        """Convert `arguments` in place for kernels, and check their metadata. A call does this before it chooses a kernel.

        Returns the device type, why no kernel of any language takes the call (or None), and whether autocast is on.
        """
        device, refusal = self.inspect(arguments)
        if not torch_state.compiling():
            arguments.update({name: _python_number(arguments[name]) for name in self.options})
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        if autocast:
            self._cast(arguments, torch.get_autocast_dtype(device))
        for name in self.tensors:
            tensor = arguments[name]
            if tensor is not None:
                arguments[name] = torch_state.resolved(tensor)
        try:
            self._checks(**arguments)
        except (TypeError, ValueError):
            subclasses.refuse_partitioned(self.name, {name: arguments[name] for name in self.tensors})
            raise
        refusal = torch_state.transforming([arguments[name] for name in self.tensors]) or refusal
        if not torch_state.compiling():
            refusal = torch_state.recording() or refusal
        return device, refusal, autocast

    def resolve(self, device: str, demand: str | None, refusal: str | None, arguments: Arguments) -> resolve.Candidate:
        """The candidate that runs a call. `arguments` are checked already.

        Raises:
            Unsupported: no candidate may run.
        """
        return resolve.decide(resolve.resolve(self.plan_once(device, demand), self, arguments, refusal))

    def plan_once(self, device: str, demand: str | None) -> resolve.Resolution:
        """The candidates on a device, remembered or looked up now."""
        plan = self._plans.get((device, demand))
        return self.plan(device, demand) if plan is None else plan

    def plan(self, device: str, demand: str | None) -> resolve.Resolution:
        """Find, and remember, the candidates on a device.

        Raises:
            Unsupported: the requested language has no kernel there. This is not remembered.
        """
        plan = resolve.plan(self, device, demand)
        if plan.chosen is None and not plan.falls_back:
            resolve.decide(plan)
        self._plans[device, demand] = plan
        return plan

    def forget_plans(self) -> None:
        """Forget the plans: the next call looks again at the installed and the requested languages."""
        # New dicts: a call in another thread may be about to write to the old ones.
        self._plans, self._ready = {}, {}

    def _cast(self, arguments: Arguments, dtype: torch.dtype) -> None:
        for name in self.autocast:
            tensor = arguments[name]
            if tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64:
                arguments[name] = tensor.to(dtype)


class OverloadedOp(Op[P, R], Generic[P, R, C]):
    """An op whose flags decide its result type. Type checkers take it for a `C`, whose ``__call__`` has overloads."""

    if TYPE_CHECKING:

        @property
        def __call__(self) -> C: ...  # pyright: ignore[reportIncompatibleMethodOverride]


def remember(calls: dict[Any, Ready], key: Any, ready: Ready) -> None:
    """Add a call to an op's remembered calls, at most `MOST_REMEMBERED`."""
    if len(calls) >= MOST_REMEMBERED:
        calls.clear()
    calls[key] = ready


def _python_number(option: Any) -> Any:
    """A Python number for a NumPy number. Anything else, including a tensor, is returned as it is."""
    if type(option) is tuple:
        values = cast("tuple[Any, ...]", option)
        numbers = tuple(map(_python_number, values))
        return values if all(map(operator.is_, numbers, values)) else numbers
    return option.item() if getattr(option, "shape", None) == () and not isinstance(option, Tensor) else option


@torch_state.constant_in_graphs
def plan_while_tracing(op: str, device: str, demand: str | None) -> bool:
    """Fill an op's tables of plans. Dynamo can't trace imports and file look-ups; it can run them, here."""
    ops[op].plan_once(device, demand)
    return True


def by_name(name: str | Op[..., Any]) -> Op[..., Any]:
    """The op called `name`, or ValueError with the names that exist."""
    if isinstance(name, Op):
        return name
    if name not in ops:
        raise ValueError(f"there is no op {name!r}{close_to(name, ops)}; the ops are {', '.join(sorted(ops))}")
    return ops[name]


class BoundOp(Generic[P, R]):
    """An op bound to a device and a language, as `get_op` returns it. Call it like the op."""

    def __init__(self, op: Op[P, R], device: str | None, language: str | None) -> None:
        if not torch_state.compiling():  # Dynamo can't trace it
            functools.update_wrapper(self, op.reference)
        self.op, self.device, self.language = op, device, language

    def __repr__(self) -> str:
        return f"<liger op {self.op.name} in {self.language or 'the best language'} on {self.device or 'any device'}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if (tracer := torch_state.symbolic_tracer((*args, *kwargs.values()))) is not None:
            return cast("Any", tracer.create_proxy("call_function", self, args, kwargs))
        if self.device is not None:
            device, _ = self.op.inspect(self.op.bind(args, kwargs))
            if device != self.device:
                raise ValueError(f"{self.op.name}: the tensors are on {device}; this callable takes {self.device}")
        return self.op.call(self.language or dispatch.state.demand, args, kwargs)


@overload
def get_op(
    name: Op[P, R], *, device: str | torch.device | None = None, language: str | None = None
) -> BoundOp[P, R]: ...
@overload
def get_op(
    name: str, *, device: str | torch.device | None = None, language: str | None = None
) -> BoundOp[..., Any]: ...
def get_op(name: Any, *, device: str | torch.device | None = None, language: str | None = None) -> BoundOp[..., Any]:
    """The callable that runs an op on a device in a language; either may be left out.

    `name` is the op or its name. With the op itself, an editor knows the signature.

    Without `language`, this call chooses a language as the op does: `BoundOp.language` is that language, or None if the tensors'
    device decides.

    Raises:
        Unsupported: the language can't run the op there.
        ValueError: an op or a device that doesn't exist, or a string that can't be a language's name.
    """
    op = by_name(name)
    device = None if device is None else type_of(device)
    return BoundOp(op, device, _language_of(op.name, device, language, dispatch.state.demand))


@torch_state.constant_in_graphs
def _language_of(name: str, device: str | None, language: str | None, demand: str | None) -> str | None:
    """The language of a `BoundOp`, checked. Dynamo runs this, and doesn't trace it."""
    if language is not None:
        dispatch.parse_demand(dispatch.one_language(language, "get_op"), "get_op")
        if language != "torch":
            backend = next(b for b in backends() if b.language == language)
            places = [device] if device else list(backend.devices)
            obstacles = [resolve.obstacle(backend, name, place) for place in places]
            if all(obstacles):
                raise Unsupported(f"{name} in {language}: {'; '.join(filter(None, obstacles))}")
    elif device is not None:
        chosen = ops[name].plan(device, demand).chosen
        language = "torch" if chosen is None else chosen.language
    return language
