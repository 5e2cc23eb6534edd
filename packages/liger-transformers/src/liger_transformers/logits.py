"""Logits that a head owes, and what is made from them without computing them: cross-entropy, log-probabilities, statistics."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch.nn import functional as F

import liger_core as liger
from liger_transformers import logprobs
from liger_transformers.leaves import unchanged, version
from liger_transformers.promise import DIV, MUL, NEG, SUB, Promise, follow

ADD = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
TANH = frozenset({torch.tanh, Tensor.tanh})
SHAPE = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
FLATTEN = frozenset({torch.flatten, Tensor.flatten})
SIZED: frozenset[Any] = frozenset({torch.chunk, Tensor.chunk, torch.split, cast("Any", Tensor).split})
PARTS = SIZED | {torch.unbind, Tensor.unbind, Tensor.__iter__}
"""Functions that divide a tensor along a dimension, which is 0 if none is given."""
INDEX_SELECT = frozenset({torch.index_select, Tensor.index_select})


Answer = TypeVar("Answer")


class Term(NamedTuple):
    """scale · head(x)."""

    x: Tensor
    head: nn.Module
    scale: float
    version: int | None


class Logits(Promise):
    """Logits that a head owes: outer · tanh(Σ scaleᵢ · headᵢ(xᵢ)), or the sum alone, waiting for their loss.

    The form is closed under what models do to logits before the loss: multiply, divide or negate by a number, tanh, add two
    (LoRA on the head), take rows, flatten, widen to float32. So a softcap, a scale or the shift of the labels is read from the
    model's own code.

    The x of each term is laid out as the logits are, row for row. So x shows which views of the logits share memory.
    """

    __slots__ = ("_dtype", "autocast", "outer", "row_of", "terms")

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
        # A model makes a few of these per step. Calling Promise.__init__ would cost time.
        self._tensor: Tensor | None = None
        self.grad, self._base, self._view = grad, base, view
        self.terms, self.outer, self._dtype, self.autocast = terms, outer, dtype, autocast
        self.row_of: tuple[Logits, int] | None = None

    @classmethod
    def of(cls, x: Tensor, head: nn.Module) -> Logits:
        """The promise of head(x). It is computed later as it would be now: under this autocast, with this grad mode."""
        autocast = None
        if _is_any_autocast_enabled():
            kind = x.device.type
            autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
        x = x.contiguous()  # like a linear's output
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
        rest = args[1:]
        if function in PARTS:
            return self._parts(function, *rest, **kwargs)
        if (question := logprobs.QUESTIONS.get(function)) is not None:
            return question(self, *rest, **kwargs)
        if kwargs:
            return NotImplemented
        if len(rest) == 0:
            return self._alone(function)
        if function in SHAPE:
            return self._reshape(function is Tensor.view, rest)
        if function in FLATTEN:
            flat = (rest in ((0, 1), (0, -2)) and self.ndim == 3) or rest == (0, -2)
            return self._reshape(False, (-1, self.shape[-1])) if flat else NotImplemented
        if function in INDEX_SELECT and len(rest) == 2:
            dim, index = rest
            rows = type(dim) is int and self._is_rows(dim) and isinstance(index, Tensor)
            return self._select(lambda x: x.index_select(dim, index)) if rows else NotImplemented
        if len(rest) > 1:
            return NotImplemented
        (other,) = rest
        if function in MUL or function in DIV:
            usable = isinstance(other, (int, float)) and math.isfinite(other) and other != 0
            return self._scaled(other if function in MUL else 1.0 / other) if usable else NotImplemented
        if (function in ADD or function in SUB) and isinstance(other, Logits):
            return self._plus(other, 1.0 if function in ADD else -1.0)
        if function in SUB and isinstance(other, logprobs.LogSumExp) and other.is_of(self, keepdim=True):
            return logprobs.LogSoftmax(self.apart())
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

    def _new(
        self,
        *,
        terms: tuple[Term, ...] | None = None,
        outer: float | None = None,
        dtype: torch.dtype | None = None,
        grad: bool = True,
        base: Promise | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
    ) -> Logits:
        """These logits with some things replaced. `grad` False takes the gradient away."""
        return Logits(
            self.terms if terms is None else terms,
            self.outer if outer is None else outer,
            dtype or self._dtype,
            self.autocast,
            grad and self.grad and torch.is_grad_enabled(),
            base,
            view,
        )

    def _scaled(self, factor: float) -> Logits:
        terms, outer = self.terms, self.outer
        if outer is not None:
            outer *= factor
        else:
            terms = tuple([Term(x, head, scale * factor, v) for x, head, scale, v in terms])
        return Logits(terms, outer, self._dtype, self.autocast, self.grad and torch.is_grad_enabled())

    # Models scale their logits. This skips what `__torch_function__` has to find out about other functions.

    def __mul__(self, factor: Any) -> Any:
        if self._waits and type(factor) in (float, int) and factor and math.isfinite(factor):
            return self._scaled(factor)
        return Promise.__torch_function__(Tensor.__mul__, (), (self, factor))

    def __rmul__(self, factor: Any) -> Any:
        if self._waits and type(factor) in (float, int) and factor and math.isfinite(factor):
            return self._scaled(factor)
        return Promise.__torch_function__(Tensor.__rmul__, (), (self, factor))

    def __truediv__(self, divisor: Any) -> Any:
        if self._waits and type(divisor) in (float, int) and divisor and math.isfinite(divisor):
            return self._scaled(1.0 / divisor)
        return Promise.__torch_function__(Tensor.__truediv__, (), (self, divisor))

    @property
    def _waits(self) -> bool:
        """Whether it isn't settled yet."""
        return self._tensor is None and (self._base is None or not self._base.settled)

    def _plus(self, other: Logits, sign: float) -> Any:
        alike = self.shape == other.shape and self._dtype == other._dtype and self.autocast == other.autocast
        if not alike or other.settled or self.grad != other.grad or not (self.outer is None and other.outer is None):
            return NotImplemented
        return self._new(terms=self.terms + other._scaled(sign).terms)

    def _is_rows(self, dim: int) -> bool:
        """Whether a dimension is not that of the columns."""
        return -self.ndim <= dim < self.ndim - 1 and dim != -1

    def _parts(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The parts along a dimension of rows. Parts along the first dimension know their place."""
        named = ("size", "dim") if function in SIZED else ("dim",)
        dim = {**dict(zip(named, args, strict=False)), **kwargs}.get("dim", 0)
        if type(dim) is not int or not self._is_rows(dim):
            return NotImplemented
        divide = torch.unbind if function is Tensor.__iter__ else function

        def part(i: int) -> Callable[[Tensor], Tensor]:
            return lambda t: divide(t, *args, **kwargs)[i]

        parts = [self._select(part(i), part(i)) for i in range(len(divide(self.terms[0].x, *args, **kwargs)))]
        if function not in SIZED and dim in (0, -self.ndim):
            whole = self.apart()
            for i, row in enumerate(parts):
                row.row_of = whole, i
        return iter(parts) if function is Tensor.__iter__ else tuple(parts)

    def apart(self) -> Logits:
        """The same logits, for a question: it doesn't see later writes to these."""
        return self._new()

    def same(self, other: Logits) -> bool:
        """Whether the other logits are the same, and owed in the same way."""
        return (
            len(self.terms) == len(other.terms)
            and all(
                a.x is b.x and a.head is b.head and a.scale == b.scale and a.version == b.version
                for a, b in zip(self.terms, other.terms, strict=True)
            )
            and (self.outer, self._dtype, self.autocast) == (other.outer, other._dtype, other.autocast)
        )

    def _select(self, change: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor] | None = None) -> Logits:
        """The logits of the rows that `change` takes from x: a copy, or `view` of these logits."""
        terms: list[Term] = []
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
        keys: list[Any] = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else [key]
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
            shape = tuple(cast("tuple[Any, ...]", shape[0]))
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
        # Losses are computed in float32 whatever the logits' dtype, so an earlier cast changes nothing.
        return self._new(dtype=dtype) if dtype == torch.float32 and self._dtype.itemsize == 2 else NotImplemented

    def _cross_entropy(
        self,
        target: Any,
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
        # fused_linear_cross_entropy has c · tanh(x Wᵀ / c) and no scale. A scale of the logits becomes a scale of x.
        factor, softcap = (1.0, None) if self.outer is None else (self.outer, abs(self.outer))

        def loss(x: Tensor, linear_weight: Tensor, bias: Tensor | None) -> Tensor:
            return liger.fused_linear_cross_entropy(
                x,
                linear_weight,
                target,
                bias,
                class_weight=weight,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                softcap=softcap,
                reduction=reduction,
            )

        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), self._autocast_as_then():
            return _enter(self.terms, factor, loss).to(self._dtype)

    def ask(self, question: Callable[..., Answer]) -> Answer:
        """question(x, weight, bias, softcap=…, temperature=…), asked of the one linear and the form that these logits are.

        x is ``[N, H]``, a row per row of logits. z = softcap · tanh((x Wᵀ + b) / softcap) / temperature; or the same without the
        softcap. A scale of all terms goes into these two numbers, and x stays unchanged.
        """
        terms, scale = self.terms, self.terms[0].scale
        if all(term.scale == scale for term in terms):
            terms = tuple(term._replace(scale=1.0) for term in terms)
        else:
            scale = 1.0
        outer = 1.0 if self.outer is None else self.outer

        def entered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Answer:
            rows = x.reshape(-1, x.shape[-1])
            softcap = None if self.outer is None else 1.0 / abs(scale)
            return question(rows, weight, bias, softcap=softcap, temperature=1.0 / abs(scale * outer))

        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), self._autocast_as_then():
            return _enter(terms, math.copysign(1.0, scale * outer), entered)

    def stride(self, dim: int | None = None) -> Any:
        """0: no memory holds the logits. TRL reads the stride before it gives them to a kernel that reads memory."""
        if self.settled:
            return self.tensor().stride() if dim is None else self.tensor().stride(dim)
        return (0,) * self.ndim if dim is None else 0


METHODS = """
    add argmax chunk contiguous detach div flatten float gather index_select log_softmax logsumexp mean mul reshape softmax split
    sub sum tanh to unbind view
"""
follow(Logits, *METHODS.split())


def _merges(x: Tensor) -> bool:
    """Whether all dimensions but the last are one in memory, so that reshape(-1, columns) is a view."""
    dims = [(n, stride) for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return all(stride == n * inner for (_, stride), (n, inner) in itertools.pairwise(dims))


def _enter(terms: tuple[Term, ...], factor: float, then: Callable[[Tensor, Tensor, Tensor | None], Answer]) -> Answer:
    """then(x, weight, bias) for the one linear that equals factor · Σ scaleᵢ · headᵢ(xᵢ), from inside the call of every head.

    So hooks on a head's call, such as FSDP's, have gathered its weight by then. Several linears are one with more columns: Σ xᵢ
    Wᵢᵀ = [x₁ x₂ …] [W₁ W₂ …]ᵀ.
    """

    def enter(terms: tuple[Term, ...], xs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> Answer:
        if not terms:
            bias = None if not biases else functools.reduce(torch.add, biases)
            one = len(xs) == 1
            return then(xs[0] if one else torch.cat(xs, -1), weights[0] if one else torch.cat(weights, -1), bias)

        (x, head, scale, expected), *rest = terms
        unchanged(x, expected)

        def gathered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Answer:
            if type(weight) not in (nn.Parameter, Tensor, type(x)):  # a tensor-parallel head makes x a DTensor as well
                raise RuntimeError(
                    f"liger_transformers: the head's weight is a {type(weight).__name__} now that the logits are used, after the "
                    "model's forward: FSDP has sharded it again. lazy takes a head that is an FSDP unit of its own, or "
                    "reshard_after_forward=False on the unit that holds it"
                )
            scaled = scale * factor
            if scaled != 1.0:  # (s · x) Wᵀ = s · (x Wᵀ)
                x, bias = x * scaled, None if bias is None else bias * scaled
            return enter(tuple(rest), [*xs, x], [*weights, weight], biases if bias is None else [*biases, bias])

        return head(x, then=gathered)

    return enter(terms, [], [], [])
