"""The head and the loss: `lm_head` owes its logits, and cross-entropy of what it owes is `fused_linear_cross_entropy`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_core as liger
from liger_transformers.leaves import unchanged, version
from liger_transformers.promise import DIV, MUL, Promise, follow
from liger_transformers.swap import has_own_forward, original_class, subclass, swapped_for

ADD = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
SUB = frozenset({torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__})
NEG = frozenset({torch.neg, torch.negative, Tensor.neg, Tensor.__neg__})
TANH = frozenset({torch.tanh, Tensor.tanh})
SHAPE = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
FLATTEN = frozenset({torch.flatten, Tensor.flatten})


class Term(NamedTuple):
    """scale · head(x)."""

    x: Tensor
    head: nn.Module
    scale: float
    version: int


class Logits(Promise):
    """Logits that a head owes: outer · tanh(Σ scaleᵢ · headᵢ(xᵢ)), or the sum alone, waiting for their cross-entropy.

    The form is closed under what models do to logits before the loss: multiply, divide or negate by a number, tanh, add two
    (LoRA on the head), take rows, flatten, widen to float32. So a softcap, a scale or the shift of the labels is read from the
    model's own code.

    The x of each term is laid out as the logits are, row for row, so it tells which views of them share memory.
    """

    __slots__ = ("_dtype", "autocast", "outer", "terms")

    def __init__(
        self,
        terms: tuple[Term, ...],
        outer: float | None,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        grad: bool,
        base: Promise | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(grad, base, view)
        self.terms, self.outer, self._dtype, self.autocast = terms, outer, dtype, autocast

    @classmethod
    def of(cls, x: Tensor, head: nn.Module) -> Logits:
        """What head(x) owes, computed later as it would be now: under this autocast, with this grad mode."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
        x = x.contiguous()  # as a linear's output is
        return cls((Term(x, head, 1.0, version(x)),), None, autocast or x.dtype, autocast, torch.is_grad_enabled())

    @property
    def shape(self) -> torch.Size:
        x, head, *_ = self.terms[0]
        return torch.Size((*x.shape[:-1], cast(int, head.out_features)))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0].x.device

    def compute(self) -> Tensor:
        with self._autocast_as_then():
            y = None
            for x, head, scale, expected in self.terms:
                unchanged(x, expected)
                part = head(x, then=F.linear).to(self._dtype)
                part = part if scale == 1.0 else part * scale
                y = part if y is None else y + part
            assert y is not None
            return y if self.outer is None else torch.tanh(y) * self.outer

    def _autocast_as_then(self) -> contextlib.AbstractContextManager[Any]:
        kind = self.device.type
        if kind == "meta" or torch.is_autocast_enabled(kind) == (self.autocast is not None):
            return contextlib.nullcontext()
        return torch.autocast(kind, self.autocast, enabled=self.autocast is not None)

    def wait(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0] is not self:
            return NotImplemented
        if function is F.cross_entropy:
            return self._cross_entropy(*args[1:], **kwargs)
        if function is Tensor.to:
            return self._to(*args[1:], **kwargs)
        if kwargs:
            return NotImplemented
        rest = args[1:]
        if len(rest) == 0:
            return self._alone(function)
        if function in SHAPE:
            return self._reshape(function is Tensor.view, rest)
        if function in FLATTEN:
            flat = (rest in ((0, 1), (0, -2)) and self.ndim == 3) or rest == (0, -2)
            return self._reshape(False, (-1, self.shape[-1])) if flat else NotImplemented
        if len(rest) > 1:
            return NotImplemented
        (other,) = rest
        if function in MUL or function in DIV:
            usable = isinstance(other, (int, float)) and math.isfinite(other) and other != 0
            return self._scaled(other if function in MUL else 1.0 / other) if usable else NotImplemented
        if (function in ADD or function in SUB) and isinstance(other, Logits):
            return self._plus(other, 1.0 if function in ADD else -1.0)
        if function is Tensor.__getitem__:
            return self._rows(other)
        return NotImplemented

    def _alone(self, function: Callable[..., Any]) -> Any:
        if function in TANH and self.outer is None:
            return self._new(outer=1.0)
        if function in NEG:
            return self._scaled(-1.0)
        if function is Tensor.float:
            return self._to(torch.float32)
        if function is Tensor.contiguous:
            if self.terms[0].x.is_contiguous():
                return self
            return self._select(Tensor.contiguous)
        if function is Tensor.detach:
            return self._new(grad=False, base=self, view=Tensor.detach)
        return NotImplemented

    def _new(self, **changes: Any) -> Logits:
        same = {"terms": self.terms, "outer": self.outer, "dtype": self._dtype, "autocast": self.autocast}
        return Logits(**{**same, "grad": self.grad and torch.is_grad_enabled(), **changes})

    def _scaled(self, factor: float) -> Logits:
        if self.outer is not None:
            return self._new(outer=self.outer * factor)
        return self._new(terms=tuple(term._replace(scale=term.scale * factor) for term in self.terms))

    def _plus(self, other: Logits, sign: float) -> Any:
        alike = self.shape == other.shape and self._dtype == other._dtype and self.autocast == other.autocast
        if not alike or other.settled or self.grad != other.grad or not (self.outer is None and other.outer is None):
            return NotImplemented
        return self._new(terms=self.terms + other._scaled(sign).terms)

    def _select(self, change: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor] | None = None) -> Logits:
        """The logits of the rows that `change` takes of x: a copy, or `view` of these."""
        terms = []
        for x, head, scale, expected in self.terms:
            unchanged(x, expected)
            y = change(x)
            terms.append(Term(y, head, scale, version(y)))
        return self._new(terms=tuple(terms), base=None if view is None else self, view=view)

    def _rows(self, key: Any) -> Any:
        if isinstance(key, Tensor):
            if key.dtype not in (torch.bool, torch.int64) or key.dim() >= self.ndim:
                return NotImplemented
            return self._select(lambda x: x[key])
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is not Ellipsis and type(k) not in (int, slice) for k in keys) or keys.count(Ellipsis) > 1:
            return NotImplemented
        gap = [slice(None)] * (self.ndim - len(keys) + keys.count(Ellipsis))
        place = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
        keys[place : place + 1] = gap
        if len(keys) != self.ndim or keys[-1] != slice(None):
            return NotImplemented
        rows = tuple(keys)
        return self._select(lambda x: x[rows], lambda z: z[rows])

    def _reshape(self, strict: bool, shape: tuple[Any, ...]) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
            shape = tuple(shape[0])
        columns = self.shape[-1]
        if not shape or shape[-1] != columns or any(not isinstance(n, int) for n in shape):
            return NotImplemented
        leading = shape[:-1]
        x = self.terms[0].x
        if x.is_contiguous() or (leading == (-1,) and _merges(x)):
            return self._select(lambda x: x.view(*leading, x.shape[-1]), lambda z: z.view(*leading, columns))
        if strict or leading != (-1,):
            return NotImplemented
        return self._select(lambda x: x.reshape(-1, x.shape[-1]))

    def _to(self, *args: Any, **kwargs: Any) -> Any:
        given = {**kwargs, **{"dtype" if isinstance(a, torch.dtype) else "device": a for a in args}}
        if len(given) != len(args) + len(kwargs) or not {*given} <= {"dtype", "device"}:
            return NotImplemented
        device, dtype = given.get("device"), given.get("dtype") or self._dtype
        if device is not None and (not isinstance(device, (str, torch.device)) or torch.device(device) != self.device):
            return NotImplemented
        if dtype == self._dtype:
            return self
        # A loss is taken in float32 whatever the logits' dtype, so a cast before it changes nothing.
        return self._new(dtype=dtype) if dtype == torch.float32 and self._dtype.itemsize == 2 else NotImplemented

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if self.ndim != 2 or size_average is not None or reduce is not None or not isinstance(target, Tensor):
            return NotImplemented
        if (
            target.dtype != torch.int64
            or target.shape != self.shape[:1]
            or (weight is not None and weight.requires_grad)
        ):
            return NotImplemented
        # fused_linear_cross_entropy has c · tanh(x Wᵀ / c) and no scale; a scale of the logits is one of x.
        factor, softcap = (1.0, None) if self.outer is None else (self.outer, abs(self.outer))

        def loss(x: Tensor, linear_weight: Tensor, bias: Tensor | None) -> Tensor:
            return cast(
                Tensor,
                liger.fused_linear_cross_entropy(
                    x,
                    linear_weight,
                    target,
                    bias,
                    class_weight=weight,
                    ignore_index=ignore_index,
                    label_smoothing=label_smoothing,
                    softcap=softcap,
                    reduction=reduction,
                ),
            )

        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), self._autocast_as_then():
            return _enter(self.terms, factor, loss).to(self._dtype)


follow(Logits, "add", "contiguous", "detach", "div", "flatten", "float", "mul", "reshape", "sub", "tanh", "to", "view")


def _merges(x: Tensor) -> bool:
    """Whether all dimensions but the last are one in memory, so that reshape(-1, columns) is a view."""
    dims = [(n, stride) for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return all(stride == n * inner for (_, stride), (n, inner) in itertools.pairwise(dims))


Then = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""A function of x, a linear's weight and its bias."""


def _enter(terms: tuple[Term, ...], factor: float, then: Then) -> Tensor:
    """then(x, weight, bias) of the one linear that factor · Σ scaleᵢ · headᵢ(xᵢ) is, from inside the call of every head.

    What hangs on a head's call, such as FSDP's hooks, has then gathered its weight. Several linears are one of more columns:
    Σ xᵢ Wᵢᵀ = [x₁ x₂ …] [W₁ W₂ …]ᵀ.
    """

    def enter(terms: tuple[Term, ...], xs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        if not terms:
            bias = None if not biases else functools.reduce(torch.add, biases)
            one = len(xs) == 1
            return then(xs[0] if one else torch.cat(xs, -1), weights[0] if one else torch.cat(weights, -1), bias)

        (x, head, scale, expected), *rest = terms
        unchanged(x, expected)

        def gathered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            scaled = scale * factor
            if scaled != 1.0:  # (s · x) Wᵀ = s · (x Wᵀ)
                x, bias = x * scaled, None if bias is None else bias * scaled
            return enter(tuple(rest), [*xs, x], [*weights, weight], biases if bias is None else [*biases, bias])

        return head(x, then=gathered)

    return enter(terms, [], [], [])


class _Promising(threading.local):
    """Whether heads owe their logits: while a model's forward has labels, in the thread that runs it."""

    def __init__(self) -> None:
        self.on = False


_promising = _Promising()


@functools.cache
def _head_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor, then: Then | None = None) -> Any:
        if then is not None:
            return then(x, self.weight, self.bias)  # type: ignore[arg-type]
        # A forward bound to the instance doesn't know `then`; the shard of a tensor-parallel weight is not the weight.
        if _promising.on and "forward" not in vars(self) and type(self.weight) in (nn.Parameter, Tensor):
            return Logits.of(x, self)
        return cls.forward(self, x)

    return subclass(cls, forward, "fused_linear_cross_entropy")


@functools.cache
def _model_class(cls: type[nn.Module]) -> type[nn.Module]:
    original = cls.forward
    names = [*inspect.signature(original).parameters][1:]
    place = names.index("labels") if "labels" in names else None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[place] if place is not None and len(args) > place else kwargs.get("labels")
        given = labels is not None or kwargs.get("shift_labels") is not None
        before, _promising.on = _promising.on, given and (self.training if skip_logits is None else skip_logits)
        try:
            output = original(self, *args, **kwargs)
        finally:
            _promising.on = before
        return _kept(output)

    return subclass(cls, forward, "")


def _kept(output: Any) -> Any:
    """A model's output without the promises in it where there is a loss, and with their tensors where there is none."""
    if isinstance(output, Promise):
        return output.tensor()
    if isinstance(output, tuple):
        if not any(isinstance(value, Promise) for value in output):
            return output
        if isinstance(output[0], Tensor) and output[0].dim() == 0:
            return tuple(value for value in output if not isinstance(value, Promise))
        return tuple(value.tensor() if isinstance(value, Promise) else value for value in output)
    if isinstance(output, dict):
        for name, value in list(output.items()):
            if isinstance(value, Promise):
                output[name] = value.tensor() if output.get("loss") is None else None
    return output


def head_of(model: nn.Module) -> tuple[dict[str, nn.Module], str | None]:
    """The linears by name that are the model's head, and why the loss stays as it is, or None.

    In a LoRA head they are the layer below and lora_B, whose promises add up.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return {}, "it has no output embeddings"
    place = next(name for name, module in model.named_modules() if module is head)
    columns = getattr(getattr(head, "base_layer", head), "out_features", None)
    linears = {
        f"{place}.{name}".rstrip("."): module
        for name, module in head.named_modules()
        if not module._modules and columns is not None and getattr(module, "out_features", None) == columns
    }
    if not linears:
        return {}, f"its head is a {type(head).__name__}, which holds no linear layer"
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return linears, "its forward takes no labels"
    if (getattr(model, "tp_size", None) or 1) > 1:
        return linears, "its head may be divided by tensor parallelism"
    if (why := has_own_forward(model)) is not None:
        return linears, why
    for name, module in linears.items():
        if (why := has_own_forward(module)) is not None:
            return linears, f"{name}: {why}"
        if not isinstance(module, nn.Linear) or original_class(type(module)).forward is not nn.Linear.forward:
            return linears, f"{name} is a {type(module).__name__}, whose forward is not nn.Linear's"
    return linears, None


def swap_head(model: nn.Module, linears: dict[str, nn.Module]) -> None:
    """Let the linears owe their logits while the model's forward has labels."""
    for module in (*linears.values(), model):
        if swapped_for(module) is None:
            module.__class__ = _model_class(type(module)) if module is model else _head_class(type(module))
