"""Logits of a head that aren't computed yet: the form in which they wait for a loss, its views, and cross-entropy."""

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
from liger_transformers.deferred import MUL, NEG, DeferredTensor, add_methods, check_unmodified, version

ADD = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
DIV = frozenset({torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__})
TANH = frozenset({torch.tanh, Tensor.tanh})
SIZED: frozenset[Any] = frozenset({torch.chunk, Tensor.chunk, torch.split, cast("Any", Tensor).split})

T = TypeVar("T")


class Term(NamedTuple):
    """scale · head(x)."""

    x: Tensor
    head: nn.Module
    scale: float
    version: int | None


class Handler(NamedTuple):
    """A function that runs one of torch's on deferred logits, or returns NotImplemented.

    With `arguments`, it takes so many positional arguments after the logits, and no others.
    """

    run: Callable[..., Any]
    arguments: int | None = None


class Logits(DeferredTensor):
    """Deferred logits: outer · tanh(Σ scaleᵢ · headᵢ(xᵢ)), or the sum alone, waiting for their loss.

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
        base: DeferredTensor | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        # A model makes a few of these per step. Calling DeferredTensor.__init__ would cost time.
        self._tensor: Tensor | None = None
        self.grad, self._base, self._view = grad, base, view
        self.terms, self.outer, self._dtype, self.autocast = terms, outer, dtype, autocast
        self.row_of: tuple[Logits, int] | None = None

    @classmethod
    def of(cls, x: Tensor, head: nn.Module) -> Logits:
        """The logits head(x). They are computed later as they would be now: under this autocast, with this grad mode."""
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
        with self._same_autocast():
            logits = None
            for x, head, scale, expected in self.terms:
                check_unmodified(x, expected)
                term = head(x, function=F.linear).to(self._dtype)
                term = term if scale == 1.0 else term * scale
                logits = term if logits is None else logits + term
            assert logits is not None
            return logits if self.outer is None else torch.tanh(logits) * self.outer

    def _same_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast under which the head was called."""
        kind = self.device.type
        if kind == "meta" or torch.is_autocast_enabled(kind) == (self.autocast is not None):
            return contextlib.nullcontext()
        return torch.autocast(kind, self.autocast, enabled=self.autocast is not None)

    def handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = HANDLERS.get(function) if args[0] is self else None
        if handler is None:
            return NotImplemented
        others = args[1:]
        if handler.arguments is not None and (kwargs or len(others) != handler.arguments):
            return NotImplemented
        return handler.run(self, *others, **kwargs)

    def _replace(
        self,
        *,
        terms: tuple[Term, ...] | None = None,
        outer: float | None = None,
        dtype: torch.dtype | None = None,
        grad: bool = True,
        base: DeferredTensor | None = None,
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
        if self._deferred and type(factor) in (float, int) and factor and math.isfinite(factor):
            return self._scaled(factor)
        return DeferredTensor.__torch_function__(Tensor.__mul__, (), (self, factor))

    def __rmul__(self, factor: Any) -> Any:
        if self._deferred and type(factor) in (float, int) and factor and math.isfinite(factor):
            return self._scaled(factor)
        return DeferredTensor.__torch_function__(Tensor.__rmul__, (), (self, factor))

    def __truediv__(self, divisor: Any) -> Any:
        if self._deferred and type(divisor) in (float, int) and divisor and math.isfinite(divisor):
            return self._scaled(1.0 / divisor)
        return DeferredTensor.__torch_function__(Tensor.__truediv__, (), (self, divisor))

    @property
    def _deferred(self) -> bool:
        """Whether there is no tensor yet."""
        return self._tensor is None and (self._base is None or not self._base.materialized)

    def plus(self, other: Any, sign: float = 1.0) -> Any:
        """These logits plus sign · other."""
        if not isinstance(other, Logits):
            return NotImplemented
        alike = self.shape == other.shape and self._dtype == other._dtype and self.autocast == other.autocast
        if (
            not alike
            or other.materialized
            or self.grad != other.grad
            or self.outer is not None
            or other.outer is not None
        ):
            return NotImplemented
        return self._replace(terms=self.terms + other._scaled(sign).terms)

    def _is_rows(self, dim: int) -> bool:
        """Whether a dimension is not that of the columns."""
        return -self.ndim <= dim < self.ndim - 1 and dim != -1

    def divided(self, dim: Any, divide: Callable[[Tensor], Any]) -> tuple[Logits, ...] | None:
        """The results of divide(logits), which divides `dim`; None unless that is a dimension of rows."""
        if type(dim) is not int or not self._is_rows(dim):
            return None

        def item(i: int) -> Callable[[Tensor], Tensor]:
            return lambda t: divide(t)[i]

        return tuple([self._select(item(i), item(i)) for i in range(len(divide(self.terms[0].x)))])

    def snapshot(self) -> Logits:
        """The same logits, which don't see later writes to these."""
        return self._replace()

    def same(self, other: Logits) -> bool:
        """Whether the other logits are computed from the same tensors in the same way."""
        return (
            len(self.terms) == len(other.terms)
            and all(
                a.x is b.x and a.head is b.head and a.scale == b.scale and a.version == b.version
                for a, b in zip(self.terms, other.terms, strict=True)
            )
            and (self.outer, self._dtype, self.autocast) == (other.outer, other._dtype, other.autocast)
        )

    def _select(self, select: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor] | None = None) -> Logits:
        """The logits of the rows that `select` takes from x: a copy, or `view` of these logits."""
        terms: list[Term] = []
        for x, head, scale, expected in self.terms:
            check_unmodified(x, expected)
            rows = select(x)
            terms.append(Term(rows, head, scale, version(rows)))
        return self._replace(terms=tuple(terms), base=None if view is None else self, view=view)

    def getitem(self, key: Any) -> Any:
        """The logits of some rows."""
        if isinstance(key, Tensor):
            if key.dtype not in (torch.bool, torch.int64) or key.dim() >= self.ndim:
                return NotImplemented
            return self._select(lambda x: x[key])
        keys: list[Any] = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else [key]
        if any(k is not Ellipsis and type(k) not in (int, slice) for k in keys) or keys.count(Ellipsis) > 1:
            return NotImplemented
        skipped = [slice(None)] * (self.ndim - len(keys) + keys.count(Ellipsis))
        place = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
        keys[place : place + 1] = skipped
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
        options = {**kwargs, **{"dtype" if isinstance(a, torch.dtype) else "device": a for a in args}}
        if len(options) != len(args) + len(kwargs) or not {*options} <= {"dtype", "device"}:
            return NotImplemented
        device, dtype = options.get("device"), options.get("dtype") or self._dtype
        if device is not None and (not isinstance(device, (str, torch.device)) or torch.device(device) != self.device):
            return NotImplemented
        if dtype == self._dtype:
            return self
        # Losses are computed in float32 whatever the logits' dtype, so an earlier cast changes nothing.
        return self._replace(dtype=dtype) if dtype == torch.float32 and self._dtype.itemsize == 2 else NotImplemented

    def cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """`fused_linear_cross_entropy`, with these logits' softcap and scale."""
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

        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), self._same_autocast():
            return _call_heads(self.terms, factor, loss).to(self._dtype)

    def run(self, op: Callable[..., T]) -> T:
        """op(x, weight, bias, softcap=…, temperature=…), for the one linear and the form that these logits are.

        x is ``[N, H]``, a row per row of logits. z = softcap · tanh((x Wᵀ + b) / softcap) / temperature; or the same without the
        softcap. A scale of all terms goes into these two numbers, and x stays unchanged.
        """
        terms, scale = self.terms, self.terms[0].scale
        if all(term.scale == scale for term in terms):
            terms = tuple(term._replace(scale=1.0) for term in terms)
        else:
            scale = 1.0
        outer = 1.0 if self.outer is None else self.outer

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> T:
            rows = x.reshape(-1, x.shape[-1])
            softcap = None if self.outer is None else 1.0 / abs(scale)
            return op(rows, weight, bias, softcap=softcap, temperature=1.0 / abs(scale * outer))

        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), self._same_autocast():
            return _call_heads(terms, math.copysign(1.0, scale * outer), run)

    def stride(self, dim: int | None = None) -> Any:
        """0: no memory holds the logits. TRL reads the stride before it gives them to a kernel that reads memory."""
        if self.materialized:
            return self.tensor().stride() if dim is None else self.tensor().stride(dim)
        return (0,) * self.ndim if dim is None else 0


METHODS = """
    add argmax chunk contiguous detach div flatten float gather index_select log_softmax logsumexp mean mul reshape softmax split
    sub sum tanh to unbind view
"""
add_methods(Logits, *METHODS.split())


def _scale(z: Logits, factor: Any) -> Any:
    usable = isinstance(factor, (int, float)) and math.isfinite(factor) and factor != 0
    return z._scaled(factor) if usable else NotImplemented


def _divide(z: Logits, divisor: Any) -> Any:
    usable = isinstance(divisor, (int, float)) and math.isfinite(divisor) and divisor != 0
    return z._scaled(1.0 / divisor) if usable else NotImplemented


def _neg(z: Logits) -> Any:
    return z._scaled(-1.0)


def _tanh(z: Logits) -> Any:
    return z._replace(outer=1.0) if z.outer is None else NotImplemented


def _float(z: Logits) -> Any:
    return z._to(torch.float32)


def _contiguous(z: Logits) -> Any:
    return z if z.terms[0].x.is_contiguous() else z._select(Tensor.contiguous)


def _detach(z: Logits) -> Any:
    return z._replace(grad=False, base=z, view=Tensor.detach)


def _view(z: Logits, *shape: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else z._reshape(True, shape)


def _reshape(z: Logits, *shape: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else z._reshape(False, shape)


def _flatten(z: Logits, first: Any, last: Any) -> Any:
    dims = first, last
    rows = dims == (0, -2) or (dims == (0, 1) and z.ndim == 3)
    return z._reshape(False, (-1, z.shape[-1])) if rows else NotImplemented


def _index_select(z: Logits, dim: Any, index: Any) -> Any:
    rows = type(dim) is int and z._is_rows(dim) and isinstance(index, Tensor)
    return z._select(lambda x: x.index_select(dim, index)) if rows else NotImplemented


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of `function`, which divides a tensor into parts of a size."""

    def handler(z: Logits, *args: Any, **kwargs: Any) -> Any:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts = z.divided(dim, lambda t: function(t, *args, **kwargs))
        return NotImplemented if parts is None else parts

    return handler


def _unbind(z: Logits, *args: Any, **kwargs: Any) -> Any:
    """The rows of a dimension. Rows of the first dimension know their place."""
    dim = args[0] if args else kwargs.get("dim", 0)
    rows = z.divided(dim, lambda t: torch.unbind(t, *args, **kwargs))
    if rows is None:
        return NotImplemented
    if dim in (0, -z.ndim):
        whole = z.snapshot()
        for i, row in enumerate(rows):
            row.row_of = whole, i
    return rows


def _iter(z: Logits) -> Any:
    rows = _unbind(z)
    return NotImplemented if rows is NotImplemented else iter(rows)


HANDLERS: dict[Any, Handler] = {
    F.cross_entropy: Handler(Logits.cross_entropy),
    Tensor.to: Handler(Logits._to),
    Tensor.float: Handler(_float, 0),
    Tensor.contiguous: Handler(_contiguous, 0),
    Tensor.detach: Handler(_detach, 0),
    Tensor.__getitem__: Handler(Logits.getitem, 1),
    Tensor.view: Handler(_view),
    Tensor.reshape: Handler(_reshape),
    torch.reshape: Handler(_reshape),
    Tensor.flatten: Handler(_flatten, 2),
    torch.flatten: Handler(_flatten, 2),
    Tensor.index_select: Handler(_index_select, 2),
    torch.index_select: Handler(_index_select, 2),
    Tensor.unbind: Handler(_unbind),
    torch.unbind: Handler(_unbind),
    Tensor.__iter__: Handler(_iter, 0),
    **{function: Handler(_sized(function)) for function in SIZED},
    **dict.fromkeys(MUL, Handler(_scale, 1)),
    **dict.fromkeys(DIV, Handler(_divide, 1)),
    **dict.fromkeys(ADD, Handler(Logits.plus, 1)),
    **dict.fromkeys(NEG, Handler(_neg, 0)),
    **dict.fromkeys(TANH, Handler(_tanh, 0)),
}
"""By function of torch: its handler for logits. `logprobs` adds its own."""


def _merges(x: Tensor) -> bool:
    """Whether all dimensions but the last are one in memory, so that reshape(-1, columns) is a view."""
    dims = [(n, stride) for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return all(stride == n * inner for (_, stride), (n, inner) in itertools.pairwise(dims))


def _call_heads(terms: tuple[Term, ...], factor: float, function: Callable[[Tensor, Tensor, Tensor | None], T]) -> T:
    """function(x, weight, bias) for the one linear that equals factor · Σ scaleᵢ · headᵢ(xᵢ), from inside every head's call.

    So hooks on a head's call, such as FSDP's, have gathered its weight by then. Several linears are one with more columns: Σ xᵢ
    Wᵢᵀ = [x₁ x₂ …] [W₁ W₂ …]ᵀ.
    """

    def call(terms: tuple[Term, ...], xs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> T:
        if not terms:
            bias = None if not biases else functools.reduce(torch.add, biases)
            if len(xs) == 1:
                return function(xs[0], weights[0], bias)
            return function(torch.cat(xs, -1), torch.cat(weights, -1), bias)

        (x, head, scale, expected), *others = terms
        check_unmodified(x, expected)

        def inside(x: Tensor, weight: Tensor, bias: Tensor | None) -> T:
            if type(weight) not in (nn.Parameter, Tensor, type(x)):  # a tensor-parallel head makes x a DTensor as well
                raise RuntimeError(
                    f"liger_transformers: the head's weight is a {type(weight).__name__} now that the logits are used, after the "
                    "model's forward: FSDP has sharded it again. lazy takes a head that is an FSDP unit of its own, or "
                    "reshard_after_forward=False on the unit that holds it"
                )
            scaled = scale * factor
            if scaled != 1.0:  # (s · x) Wᵀ = s · (x Wᵀ)
                x, bias = x * scaled, None if bias is None else bias * scaled
            return call(tuple(others), [*xs, x], [*weights, weight], biases if bias is None else [*biases, bias])

        return head(x, function=inside)

    return call(terms, [], [], [])
