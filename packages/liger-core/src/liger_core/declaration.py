"""The declaration of an op: its reference, and the facts in the reference's signature. Nothing here runs a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from liger_core import subclasses
from liger_core.dimensions import parse
from liger_core.recompute import Recompute
from liger_core.torch_state import compiling

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Needs = tuple[bool, ...]
"""Which of an op's differentiable arguments want a gradient, in the order of `Declaration.differentiable`."""

GradResults = Callable[[Mapping[str, Any]], tuple[str, ...]]
"""Which fields of an op's result have a gradient, from its options."""

Arguments = dict[str, Any]
"""Every argument of a call by name, in the order of the signature."""

declared: dict[str, Declaration[..., Any]] = {}
"""Every op by name."""

_LAYOUTS = (torch.strided, torch.jagged)


class Declaration(Generic[P, R]):
    """An op as its author declares it.

    Attributes:
        name: the op's name, which is also its kernels' file name.
        reference: the PyTorch function that defines the op. In float64 it is the exact answer.
        differentiable: the arguments that can get a gradient.
        result: the NamedTuple that the op returns when it returns several named values, else None.
        autocast: the tensors that are cast to the autocast dtype in an autocast region.
        dimensions: which dimensions of its tensors are independent, or None where it doesn't say.
        recompute: how its results are recomputed from the tensors that backward saves, or None if that isn't cheap.
        tensors: the parameters that are tensors; those of them that may be None are `optional`.
        options: the other parameters.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        differentiable: tuple[str, ...],
        result: type[tuple[Any, ...]] | None,
        grad_results: tuple[str, ...] | GradResults | None,
        autocast: tuple[str, ...],
        dimensions: str | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        self.name = reference.__name__
        self.reference: Callable[..., R] = reference
        self.differentiable = differentiable
        self.result: Callable[..., tuple[Any, ...]] | None = result
        self._fields = fields = cast("tuple[str, ...]", getattr(result, "_fields", ()))
        self._grad_results = grad_results if callable(grad_results) else None
        self._has_gradient = None if grad_results is None or callable(grad_results) else self._kept(grad_results)
        self.autocast = autocast

        self.signature = inspect.signature(reference)
        parameters = self.signature.parameters.values()
        self.names = tuple(p.name for p in parameters)
        self.positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.required = tuple(p.name for p in parameters if p.default is p.empty)
        self._fewest = len(self.required)
        self.template = {p.name: p.default for p in parameters}
        hints = get_type_hints(reference)
        self.tensors = tuple(name for name in self.names if hints[name] in (Tensor, Tensor | None))
        self.optional = tuple(name for name in self.tensors if hints[name] == (Tensor | None))
        self.options = tuple(name for name in self.names if name not in self.tensors)
        if differentiable != tuple(name for name in self.tensors if name in differentiable):
            raise ValueError(
                f"{self.name}: differentiable is {differentiable}; it takes tensors, in the signature's order"
            )

        several = len(get_args(hints["return"])) if get_origin(hints.get("return")) is tuple else None
        returned = len(fields) or (1 if hints.get("return") is Tensor else several)
        self.dimensions = (
            None if dimensions is None else parse(dimensions, self.name, self.tensors, self.options, returned)
        )

        self.recompute = recompute
        for name in () if recompute is None else (*recompute.kept, *recompute.instead):
            if name not in self.tensors:
                raise ValueError(
                    f"{self.name}: recompute names {name!r}; it takes tensor arguments, {', '.join(self.tensors)}"
                )

        self._checks: Callable[..., None] = _no_check
        self._check_values: Callable[..., None] | None = None
        self._pick_tensors = _picker(self.tensors)
        self._pick_options = _picker(self.options)
        self._sequences = tuple(name for name in self.options if get_origin(hints[name]) is Sequence)
        self._type_of: Callable[[Any], Any] = _deep_type if self._sequences else type
        declared[self.name] = self

    def has_gradient(self, options: Mapping[str, Any]) -> tuple[bool, ...] | None:
        """For each field of `result`, whether it has a gradient; None when every returned value has. It takes all options."""
        return self._has_gradient if self._grad_results is None else self._kept(self._grad_results(options))

    def _kept(self, names: tuple[str, ...]) -> tuple[bool, ...]:
        # Bools, not positions: torch.compile(dynamic=True) takes ints for symbols.
        return tuple([name in names for name in self._fields])

    def __repr__(self) -> str:
        return f"<liger op {self.name}{self.signature}>"

    def __reduce__(self) -> str:
        return self.name  # pickled and copied like a function: by its name in its module

    def checks(self, check: F) -> F:
        """Attach what inspects the arguments' metadata: called with the reference's signature, before any kernel."""
        self._checks = check
        return check

    def checks_values(self, check: F) -> F:
        """Attach what reads the arguments' data: on the CPU always, on an accelerator under LIGER_KERNEL_CHECK=1."""
        self._check_values = check
        return check

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Every argument by name, in the order of the signature, defaults filled in."""
        arguments = self.template.copy()
        arguments.update(zip(self.names, args))  # noqa: B905  too many are caught below
        count = len(args)
        if not kwargs and self._fewest <= count <= self.positional:
            return arguments
        arguments.update(kwargs)
        wrong = count > self.positional or len(arguments) > len(self.names)
        for name in kwargs:
            wrong = wrong or name in self.names[:count]
        for name in self.required[count:]:
            wrong = wrong or name not in kwargs
        if wrong:
            self._explain_wrong_arguments(args, kwargs)
        return arguments

    def _explain_wrong_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; it takes {self.signature}") from None

    def inspect(self, arguments: Arguments) -> tuple[str, str | None]:
        """The device type of the tensors, and why no kernel of any language takes them, or None."""
        device: torch.device | None = None
        refusal = first = None
        traced = compiling()
        for name in self.tensors:
            tensor = arguments[name]
            kind = type(tensor)  # pyright: ignore[reportUnknownVariableType]
            if kind is not Tensor and kind is not Parameter:
                if tensor is None and name in self.optional:
                    continue
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{self.name}: {name} is a {kind.__name__}; it takes a torch.Tensor")
                if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
                    plain = None if first is None or type(arguments[first]) is kind else first
                    refusal = subclasses.refusal(self.name, name, type(tensor), plain)
            if device is None:
                device, first = tensor.device, name
            elif tensor.device != device:
                raise ValueError(f"{self.name}: {name} is on {tensor.device}; it takes {first}'s device, {device}")
            if tensor.is_nested and tensor.layout is torch.strided:
                takes = "a dense tensor, or a nested one with layout=torch.jagged"
                raise TypeError(f"{self.name}: {name} is a nested tensor of layout torch.strided; it takes {takes}")
            # Dynamo traces no backward that asks for a layout, and no tensor of another one.
            if not traced and tensor.layout not in _LAYOUTS:
                takes = "a dense tensor, such as to_dense() gives"
                raise TypeError(f"{self.name}: {name} has layout {tensor.layout}; it takes {takes}")
            if tensor.dtype is torch.float64:
                refusal = f"{name} is float64; kernels compute in float32"
        if device is None:
            raise TypeError(f"{self.name}: no argument is a tensor")
        return device.type, refusal


def _deep_type(option: Any) -> Any:
    return (tuple, *map(type, option)) if type(option) is tuple else type(option)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _picker(names: tuple[str, ...]) -> Callable[[Arguments], tuple[Any, ...]]:
    """A function that takes the values of `names` out of a dict, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple([arguments[name] for name in names])


def _no_check(**arguments: Any) -> None:
    """An op without `checks` takes anything."""
