"""What an op promises: a reference function, its checks, and a call that finds the kernel to keep the promise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter, itemgetter
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from liger_core import dispatch
from liger_core.autograd import Once as Once
from liger_core.backend import Unsupported

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Needs = tuple[bool, ...]
"""Which of an op's differentiable arguments want a gradient, in the order of `Op.differentiable`."""

Saved = tuple[Any, ...]
"""What a kernel's forward keeps for its backward: tensors, or None, and last it may be a `Once`. Empty when nothing
needs a gradient."""

ops: dict[str, Op[..., Any]] = {}
"""Every contract by name."""


MOST_REMEMBERED = 1024
"""Calls that an op remembers."""

_LAYOUTS = (torch.strided, torch.jagged)

_metadata = attrgetter("__class__", "dtype", "device", "shape", "layout", "requires_grad")


class Ready(NamedTuple):
    """A call that passed its checks: its kernel, the device type, which arguments need a gradient, the options."""

    kernel: dispatch.Kernel
    device: str
    needs: Needs
    options: dict[str, Any]


class Op(Generic[P, R]):
    """A contract. Calling it runs the best kernel installed for the tensors' device, or the reference.

    Attributes:
        name: the op's name, which is also its kernels' file name.
        reference: the PyTorch function that defines the op. In float64 it is the exact answer.
        differentiable: the arguments that can get a gradient.
        result: the NamedTuple that the op returns when it returns several named values, else None.
        keeps_gradient: for each field of `result`, whether it has a gradient; None when every returned value has.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        differentiable: tuple[str, ...],
        result: type[tuple[Any, ...]] | None,
        grad_results: tuple[str, ...] | None,
        autocast: tuple[str, ...],
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference: Callable[..., R] = reference
        self.differentiable = differentiable
        self.result = result
        fields: tuple[str, ...] = getattr(result, "_fields", ())
        # Bools, not positions: torch.compile(dynamic=True) takes ints for symbols.
        self.keeps_gradient = None if grad_results is None else tuple(name in grad_results for name in fields)
        self.autocast = autocast

        self.signature = inspect.signature(reference)
        parameters = self.signature.parameters.values()
        self.names = tuple(p.name for p in parameters)
        self.positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.required = tuple(p.name for p in parameters if p.default is p.empty)
        self.template = {p.name: p.default for p in parameters}
        hints = get_type_hints(reference)
        self.tensors = tuple(name for name in self.names if hints[name] in (Tensor, Tensor | None))
        self.optional = tuple(name for name in self.tensors if hints[name] == (Tensor | None))
        self.options = tuple(name for name in self.names if name not in self.tensors)
        if differentiable != tuple(name for name in self.tensors if name in differentiable):
            raise ValueError(
                f"{self.name}: differentiable is {differentiable}; it takes tensors, in the signature's order"
            )

        self._checks: Callable[..., None] = _no_check
        self._check_values: Callable[..., None] | None = None
        self._pick_tensors = _picker(self.tensors)
        self._pick_options = _picker(self.options)
        nested = any(get_origin(hints[name]) is Sequence for name in self.options)
        self._type_of: Callable[[Any], Any] = _deep_type if nested else type
        self._ready: dict[Any, Ready] = {}
        self._plans: dict[tuple[str, str | None], dispatch.Plan] = {}
        ops[self.name] = self

    def __repr__(self) -> str:
        return f"<liger op {self.name}{self.signature}>"

    def __reduce__(self) -> str:
        return self.name  # pickled and copied like a function: by its name in its module

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.call(dispatch.state.demand, args, kwargs)

    def checks(self, check: F) -> F:
        """Attach what inspects the arguments' metadata: called with the reference's signature, before any kernel."""
        self._checks = check
        return check

    def checks_values(self, check: F) -> F:
        """Attach what reads the arguments' data: on the CPU always, on an accelerator under LIGER_KERNEL_CHECK=1."""
        self._check_values = check
        return check

    def call(self, demand: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Check the arguments, then run the language that `demand` names, or the best one.

        What metadata alone decides, such as the checks and the kernel, is remembered by that metadata.
        """
        arguments = self.bind(args, kwargs)
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return self._call_anew(demand, arguments, None)
        try:
            options = self._pick_options(arguments)
            key = (
                demand,
                torch.is_grad_enabled(),
                tuple([t if t is None else _metadata(t) for t in self._pick_tensors(arguments)]),
                options,
                tuple(map(self._type_of, options)),  # 1, 1.0 and True are equal
            )
            ready = self._ready.get(key)
        except (AttributeError, TypeError):  # not a tensor, or an option without a hash
            key = ready = None
        if ready is None or torch.is_autocast_enabled(ready.device):
            return self._call_anew(demand, arguments, key)
        if ready.kernel.refuses is not None and ready.kernel.refuses(**arguments) is not None:
            return self._call_anew(demand, arguments, None)
        if self._check_values is not None and (ready.device == "cpu" or dispatch.settings().check):
            self._check_values(**arguments)
        return ready.kernel.run(arguments, ready.needs, ready.options)

    def _call_anew(self, demand: str | None, arguments: dict[str, Any], key: Any) -> R:
        device, refusal, autocast = self.examine(arguments)
        traced = torch.compiler.is_compiling()
        if traced:
            dispatch.plan_while_tracing(self.name, device, demand)
        elif self._check_values is not None and _transform() is None and (device == "cpu" or dispatch.settings().check):
            self._check_values(**arguments)
        kernel = self.resolve(device, demand, refusal, arguments)
        if kernel is None:
            # Under autocast its inputs are cast already.
            with torch.autocast(device, enabled=False) if autocast else nullcontext():
                return self.reference(**arguments)
        grad = torch.is_grad_enabled()
        needs = tuple(
            [grad and arguments[name] is not None and arguments[name].requires_grad for name in self.differentiable]
        )
        options = {name: arguments[name] for name in self.options}
        if autocast:
            with torch.autocast(device, enabled=False):
                return kernel.run(arguments, needs, options)
        # A kernel that another one has refused a call for may be the second choice for the next.
        preferred = kernel is self._plans[device, demand].kernels[0]
        if key is not None and preferred and not any(isinstance(option, Tensor) for option in options.values()):
            if len(self._ready) >= MOST_REMEMBERED:
                self._ready.clear()
            self._ready[key] = Ready(kernel, device, needs, options)
        return kernel.run(arguments, needs, options)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument by name, in the order of the signature, defaults filled in."""
        arguments = self.template.copy()
        arguments.update(zip(self.names, args))  # noqa: B905  too many are caught below
        given = len(args)
        if not kwargs and len(self.required) <= given <= self.positional:
            return arguments
        arguments.update(kwargs)
        wrong = given > self.positional or len(arguments) > len(self.names)
        for name in kwargs:
            wrong = wrong or name in self.names[:given]
        for name in self.required[given:]:
            wrong = wrong or name not in kwargs
        if wrong:
            self._explain_wrong_arguments(args, kwargs)
        return arguments

    def _explain_wrong_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; it takes {self.signature}") from None

    def examine(self, arguments: dict[str, Any]) -> tuple[str, str | None, bool]:
        """Cast `arguments` as autocast wants, and check their metadata: what a call does before it looks for a kernel.

        Returns the device type, why no kernel of any language takes the call (or None), and whether autocast is on.
        """
        device, refusal = self.inspect(arguments)
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        if autocast:
            self._cast(arguments, torch.get_autocast_dtype(device))
        self._checks(**arguments)
        if (transform := _transform()) is not None:
            refusal = f"{transform} is active; kernels take plain tensors"
        return device, refusal, autocast

    def inspect(self, arguments: dict[str, Any]) -> tuple[str, str | None]:
        """The device type of the tensors, and why no kernel of any language takes them, or None."""
        device: torch.device | None = None
        refusal = first = None
        for name in self.tensors:
            tensor = arguments[name]
            kind = type(tensor)
            if kind is not Tensor and kind is not Parameter:
                if tensor is None and name in self.optional:
                    continue
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{self.name}: {name} is a {kind.__name__}; it takes a torch.Tensor")
                if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
                    refusal = f"{name} is a {kind.__name__}; kernels take plain tensors"
            if device is None:
                device, first = tensor.device, name
            elif tensor.device != device:
                raise ValueError(f"{self.name}: {name} is on {tensor.device}; it takes {first}'s device, {device}")
            if tensor.layout not in _LAYOUTS:
                takes = "a dense tensor, such as to_dense() gives"
                raise TypeError(f"{self.name}: {name} has layout {tensor.layout}; it takes {takes}")
            if tensor.dtype is torch.float64:
                refusal = f"{name} is float64; kernels compute in float32"
        if device is None:
            raise TypeError(f"{self.name}: no argument is a tensor")
        return device.type, refusal

    def resolve(
        self, device: str, demand: str | None, refusal: str | None, arguments: dict[str, Any]
    ) -> dispatch.Kernel | None:
        """The first planned kernel that doesn't refuse; None: the reference. `arguments` are checked already."""
        plan = self._plans.get((device, demand))
        if plan is None:
            plan = self.plan(device, demand)
        if plan.kernels:
            if arguments[self.names[0]].numel() == 0:
                return None  # no rows: nothing to launch, in any language
            reasons = plan.reasons
            for kernel in plan.kernels:
                why = refusal
                if why is None and kernel.refuses is not None:
                    why = kernel.refuses(**arguments)
                if why is None:
                    return kernel
                reasons = (*reasons, f"{kernel.language}: {why}")
            if plan.demanded:
                raise Unsupported(f"{self.name} on {device}: {'; '.join(reasons)}")
            dispatch.fall_back(self.name, device, reasons)
        elif not plan.demanded:
            dispatch.fall_back(self.name, device, plan.reasons)
        return None

    def plan(self, device: str, demand: str | None) -> dispatch.Plan:
        """Find, and remember, the kernels to try on a device, in order."""
        plan = self._plans[device, demand] = dispatch.make_plan(self, device, demand)
        return plan

    def forget_plans(self) -> None:
        """Look again at what is installed and asked for, at the next call."""
        self._plans.clear()
        self._ready.clear()

    def _cast(self, arguments: dict[str, Any], dtype: torch.dtype) -> None:
        for name in self.autocast:
            tensor = arguments[name]
            if tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64:
                arguments[name] = tensor.to(dtype)


def _transform() -> str | None:
    """What is active that differentiates or maps by other means than autograd's graph, which is all that kernels have."""
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform"
    return "forward-mode automatic differentiation" if forward_ad._current_level >= 0 else None


def _deep_type(option: Any) -> Any:
    return (tuple, *map(type, option)) if type(option) is tuple else type(option)


def _picker(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that takes the values of `names` out of a dict, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple([arguments[name] for name in names])


def _no_check(**arguments: Any) -> None:
    """An op without `checks` takes anything."""


def op(
    *,
    differentiable: tuple[str, ...],
    result: type[tuple[Any, ...]] | None = None,
    grad_results: tuple[str, ...] | None = None,
    autocast: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a reference function a contract.

    Its annotations are read: a parameter that starts with ``Tensor`` is a tensor, every other one an option.

    Args:
        differentiable: the tensor arguments that can get a gradient.
        result: the NamedTuple that the reference returns, when it returns one.
        grad_results: the fields of `result` that have a gradient; all, when it is left out.
        autocast: the tensors that are cast to the autocast dtype in an autocast region. The op then runs with
            autocast off; every other tensor keeps its dtype.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        return Op(reference, differentiable, result, grad_results, autocast)

    return decorate


def implements(
    contract: Op[P, R],
) -> Callable[[Callable[Concatenate[Needs, P], tuple[Any, Saved]]], Callable[Concatenate[Needs, P], tuple[R, Saved]]]:
    """Tie a kernel's ``forward`` to its contract, for the type checker and for Find References.

    It returns the function as it is. A kernel module defines

    - ``forward(needs, <the contract's signature>) -> (result, saved)``. `needs` says which differentiable arguments
      want a gradient; when none does, `saved` is ``()``. `result` is a tensor, or a tuple in the contract's order with
      None for what was not asked for. What is saved are tensors and None; the last may be a `Once`.
    - ``backward(needs, saved, <a gradient per differentiable result>, *, <options>) -> gradients``, one per differentiable
      argument, None where `needs` says so. A gradient of a result is None when nothing flows into it. Neither
      writes to what it is given.
    - optionally ``refuses(<the contract's signature>) -> str | None``: why this kernel can't take a call. It reads
      metadata, not data.
    """

    def same(forward: Callable[Concatenate[Needs, P], tuple[Any, Saved]]) -> Any:
        return forward

    return same


def upcast(tensor: Tensor) -> Tensor:
    """At least float32; float64 stays float64, so that a float64 call of a reference is the exact answer."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def by_name(name: str | Op[..., Any]) -> Op[..., Any]:
    """The contract called `name`, or ValueError with the names that exist."""
    if isinstance(name, Op):
        return cast("Op[..., Any]", name)
    if name not in ops:
        raise ValueError(f"there is no op {name!r}; the ops are {', '.join(sorted(ops))}")
    return ops[name]
