"""Norms and activations: running one on random numbers shows which op it is, and then it is swapped.

Each function takes a module of the model. It returns the class that the module may become, or the reason why it stays unchanged,
or None for a module of another kind. No name of a model or class decides. No weight of the model is read, so a model that is on
the meta device, sharded or quantised is proved like any other.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_core as liger
from liger_core.contract import compiling
from liger_transformers.promise import MUL, Promise, follow, settle
from liger_transformers.swap import has_own_forward, subclass, swapped_for

Found = type[nn.Module] | str | None
"""The class that a module may become, the reason why it stays, or None for a module of another kind."""

PROBE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a forward may raise on a stand-in of the wrong kind. The reason for leaving the module quotes the error."""

WIDTH = 48
"""Columns of a stand-in for a norm without a weight."""


CANCELLED = 1e-6
"""By how much results of `layer_norm` may differ in bfloat16 and float16 beside one rounding. A bias that nearly cancels the
product leaves the float32 errors of both, up to 4e-7, in a result of any size. Wide norms have such elements."""


def norm(module: nn.Module) -> Found:
    """The swap of a norm: a module without children, with one float with `eps` in its name, and at most weight and bias.

    If its forward takes a second tensor, it is a gated norm or is left: silu(gate) · rms_norm(x) is `swiglu` of the two.
    """
    if (op := swapped_for(module)) is not None:
        return type(module) if "norm" in op else None
    eps = next((name for name, value in vars(module).items() if "eps" in name and isinstance(value, float)), None)
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    if eps is None or module._modules or module._buffers or not {*parameters} <= {"weight", "bias"}:
        return None
    if (why := has_own_forward(module)) is not None:
        return why
    if any(value.dim() != 1 for value in parameters.values()):
        return "its weight has more than one dimension"
    return _norm_class(type(module), eps, tuple(parameters), _width(module), simple(module))


def _width(module: nn.Module) -> int:
    sizes = [value.numel() for value in module._parameters.values() if value is not None]
    return sizes[0] if sizes and sizes[0] else WIDTH


def simple(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The module's own numbers and strings, on which its forward may depend."""
    kinds = (bool, int, float, str, tuple, type(None))
    own: dict[str, Any] = vars(module)
    return tuple(
        (name, cast("Any", value))
        for name, value in own.items()
        if name != "training" and not name.startswith("_") and isinstance(value, kinds)
    )


@functools.cache
def _norm_class(
    cls: type[nn.Module], eps: str, parameters: tuple[str, ...], width: int, simple: tuple[tuple[str, Any], ...]
) -> Found:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    stand_in = object.__new__(cls)
    nn.Module.__init__(stand_in)
    stand_in.__dict__.update(simple)
    weights = {name: draw(width) for name in parameters}
    gated = len(inspect.signature(cls.forward).parameters) > 2
    inputs = [[draw(2, 3, width) * scale for _ in range(1 + gated)] for scale in (0.01, 1.0, 30.0)]
    value = dict(simple)[eps]

    def same(op: NormOp, dtype: torch.dtype, rounding: float) -> bool:
        own = {name: weight.to(dtype) for name, weight in weights.items()}
        for name in ("weight", "bias"):
            stand_in._parameters[name] = nn.Parameter(own[name], requires_grad=False) if name in own else None
        for tensors in inputs:
            x, *gate = (t.to(dtype) for t in tensors)
            want = cls.forward(stand_in, x, *gate)
            if not isinstance(want, Tensor) or want.shape != x.shape or want.dtype != dtype:
                return False
            got = op(x, own.get("weight"), own.get("bias"), value)
            got = liger.swiglu(gate[0], got) if gated else got
            least = rounding if dtype == torch.float32 else CANCELLED if rounding else 0.0
            if not torch.allclose(got.double(), want.double(), rtol=rounding, atol=least):
                return False
        return True

    def proved(op: NormOp, rounding: float) -> bool:
        low = (torch.bfloat16, torch.float16)
        return same(op, torch.float32, 1e-5) and all(same(op, d, rounding * torch.finfo(d).eps) for d in low)

    try:
        with torch.no_grad():
            if "bias" not in parameters:
                for offset in (0.0, 1.0) if parameters else (0.0,):
                    for mode in ("llama", "gemma", "none"):
                        op = functools.partial(_rms_norm, offset=offset, casting_mode=mode)
                        if proved(op, 0.0):
                            return _rms_norm_class(cls, eps, offset, mode, gated)
            # layer_norm rounds in one way, and has no options that could be confused with each other. So a last bit may differ.
            for offset in (0.0, 1.0) if "weight" in parameters and not gated else ():
                if proved(functools.partial(_layer_norm, offset=offset), 1.0):
                    return _layer_norm_class(cls, eps, offset)
    except PROBE_ERRORS as error:
        return f"its forward raises {type(error).__name__} on {'two tensors' if gated else 'a tensor'}"
    return (
        "it is not rms_norm times silu(gate)" if gated else "it is neither rms_norm, under any options, nor layer_norm"
    )


NormOp = Callable[[Tensor, Any, Any, float], Tensor]
"""A norm as a function of x, weight, bias and eps."""


def _rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Tensor:
    return liger.rms_norm(x, weight, eps, offset=offset, casting_mode=casting_mode)


@functools.cache
def _rms_norm_class(cls: type[nn.Module], eps: str, offset: float, casting_mode: str, gated: bool) -> type[nn.Module]:
    widens = casting_mode != "gemma"  # the others multiply in the wider dtype of x and weight, and return it

    def normed(self: nn.Module, x: Tensor) -> Tensor:
        weight = self._parameters.get("weight")
        if weight is not None and widens and x.dtype != weight.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        return liger.rms_norm(x, weight, getattr(self, eps), offset=offset, casting_mode=casting_mode)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()
        return normed(self, settle(x))

    def forward_gated(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        x, gate = map(settle, args) if len(args) == 2 else (None, None)
        weight = self._parameters.get("weight")
        dtypes = {t.dtype for t in (x, gate, weight) if t is not None}
        if x is None or gate is None or x.shape != gate.shape or len(dtypes) > 1:
            return cls.forward(self, *args, **kwargs)
        return liger.swiglu(gate, normed(self, x))

    op = f"rms_norm(offset={offset:g}, casting_mode={casting_mode!r})"
    return subclass(cls, forward_gated, f"{op}, swiglu") if gated else subclass(cls, forward, op)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    return liger.layer_norm(x, weight + offset if offset else weight, bias, eps)


@functools.cache
def _layer_norm_class(cls: type[nn.Module], eps: str, offset: float) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()
        x, weight, bias = settle(x), self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        if torch.is_autocast_enabled(x.device.type):
            if offset:
                return cls.forward(self, x)  # it casts by itself, in its own way
            if x.dtype != weight.dtype:
                x = x.to(weight.dtype)  # as autocast does with F.layer_norm
        return _layer_norm(x, weight, bias, getattr(self, eps), offset)

    return subclass(cls, forward, "layer_norm(weight + 1)" if offset else "layer_norm")


class Gate(Promise):
    """act(gate), waiting for the other branch of a gated linear unit."""

    __slots__ = ("act", "gate", "op", "version")

    def __init__(self, gate: Tensor, act: Callable[[Tensor], Tensor], op: Callable[[Tensor, Tensor], Tensor]) -> None:
        # A layer makes a Gate each time it runs. Calling Promise.__init__ would cost time.
        self.grad, self._tensor, self._base, self._view = torch.is_grad_enabled(), None, None, None
        self.gate, self.act, self.op, self.version = gate, act, op, version(gate)

    @property
    def shape(self) -> torch.Size:
        return self.gate.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.gate.dtype

    @property
    def device(self) -> torch.device:
        return self.gate.device

    def compute(self) -> Tensor:
        unchanged(self.gate, self.version)
        return self.act(self.gate)

    def wait(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function not in PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        in_place = function in MUL_IN_PLACE
        if in_place and args[0] is not self:
            return NotImplemented
        y = self.product(args[1] if args[0] is self else args[0])
        if in_place and y is not NotImplemented:
            self._tensor = y
        return y

    def product(self, up: Any) -> Any:
        """The op's result, or NotImplemented if `up` is not the other branch of the unit."""
        gate = self.gate
        if not isinstance(up, Tensor) or up.dtype != gate.dtype or up.shape != gate.shape:
            return NotImplemented
        if torch.is_grad_enabled() != self.grad:
            return NotImplemented
        if self.version is not None and gate._version != self.version:
            unchanged(gate, self.version)
        return self.op(gate, up)

    def __mul__(self, up: Any) -> Any:
        # Nearly every layer goes this way. It skips what `__torch_function__` has to find out about other functions.
        if self._tensor is None:
            y = self.product(up)
            if y is not NotImplemented:
                return y
        return Promise.__torch_function__(Tensor.__mul__, (), (self, up))


follow(Gate, "mul", "mul_", "multiply", "multiply_")

MUL_IN_PLACE = frozenset({Tensor.mul_, Tensor.multiply_, Tensor.__imul__})
PRODUCTS = MUL | MUL_IN_PLACE


def version(tensor: Tensor) -> int | None:
    """How often the tensor was written to, or None if nobody counts."""
    # Dynamo doesn't trace is_inference, and knows every write in what it compiles.
    return None if compiling() or tensor.is_inference() else tensor._version


def unchanged(tensor: Tensor, expected: int | None) -> None:
    """Raise RuntimeError if a promise's input was written to since: then what it stands for can't be computed any more."""
    if expected is not None and tensor._version != expected:
        raise RuntimeError(
            "liger_transformers: the input of an activation or of the head was modified in place before its output was used; "
            "apply(model, glu=False) or apply(model, loss=False) leaves that module as it is"
        )


GATED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "swiglu": (F.silu, liger.swiglu),
    "geglu": (functools.partial(F.gelu, approximate="tanh"), liger.geglu),
    "relu_squared": (liger.relu_squared, liger.relu_squared),
}
"""By op: its activation, and the op as a function of gate and up."""


def activations(parent: nn.Module) -> Iterator[tuple[str, nn.Module, Found]]:
    """The activations among a module's children that may be an op's: name, child and swap.

    In a module that multiplies they are gates. Elsewhere only the square of ReLU is an op of its own.
    """
    children = [(name, child) for name, child in parent.named_children() if is_activation(child)]
    gates = bool(children) and multiplies(type(parent))
    for name, child in children:
        if swapped_for(child) is not None:
            yield name, child, type(child)
            continue
        op = activation_op(child)
        if not gates and op != "relu_squared":
            continue
        if (why := has_own_forward(child)) is not None:
            yield name, child, why
        elif op is None:
            yield name, child, "it is neither SiLU, nor GELU's tanh approximation, nor the square of ReLU"
        else:
            yield name, child, _gated_class(type(child), op) if gates else _relu_squared_class(type(child))


def is_activation(module: nn.Module) -> bool:
    return (
        type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
        and not module._parameters
    )


@functools.cache
def multiplies(cls: type[nn.Module]) -> bool:
    """Whether the class's own code has a `*`: it has one if an activation is a gate."""
    return any(
        i.opname in ("BINARY_MULTIPLY", "INPLACE_MULTIPLY") or (i.opname == "BINARY_OP" and i.argrepr in ("*", "*="))
        for function in _functions(cls)
        for i in dis.get_instructions(function)
    )


def _functions(cls: type[nn.Module]) -> Iterator[types.FunctionType]:
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for value in vars(base).values():
            while isinstance(value, types.FunctionType):
                yield value
                value = getattr(value, "__wrapped__", None)


def activation_op(module: nn.Module) -> str | None:
    """The gated op whose activation this module computes, found by calling the module in float64."""
    if (op := swapped_for(module)) is not None:
        return op
    x = torch.linspace(-9, 9, 181, dtype=torch.float64)
    with torch.no_grad():
        try:
            y = type(module).forward(module, x)
        except PROBE_ERRORS:
            return None
    for name, (act, _) in GATED.items():
        if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, act(x), rtol=1e-12, atol=1e-14):
            return name
    return None


@functools.cache
def _gated_class(cls: type[nn.Module], op: str) -> type[nn.Module]:
    act, function = GATED[op]

    def forward(self: nn.Module, x: Tensor) -> Gate:
        return Gate(x.tensor() if isinstance(x, Promise) else x, act, function)

    return subclass(cls, forward, op)


@functools.cache
def _relu_squared_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return liger.relu_squared(settle(x))

    return subclass(cls, forward, "relu_squared")
