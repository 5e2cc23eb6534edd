"""Logits while torch.compile traces, or of a tensor-parallel head: a plain object, of which the traced graph keeps nothing.

They are given to code that is known alone: a forward and a loss of transformers, on a head without hooks. They don't leave the
model.
"""

# Functions of torch and their arguments are any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_transformers.deferred import MUL, NEG, DeferredTensor, add_methods, check_unmodified, version
from liger_transformers.linear import as_called, cross_entropy, one_linear, takes

ADD = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
DIV = frozenset({torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__})
TANH = frozenset({torch.tanh, Tensor.tanh})

T = TypeVar("T")


class Term(NamedTuple):
    """scale · (x weightᵀ + bias)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    version: int | None


class TracedLogits(DeferredTensor):
    """Logits that aren't computed yet: outer · tanh(Σ scaleᵢ · headᵢ(xᵢ)), or the sum alone, waiting for their loss."""

    __slots__ = ("_dtype", "outer", "terms")

    def __init__(self, terms: tuple[Term, ...], outer: float | None, dtype: torch.dtype, grad: bool) -> None:
        super().__init__(grad)
        self.terms, self.outer, self._dtype = terms, outer, dtype

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> TracedLogits:
        """The logits F.linear(x, weight, bias), as they would be computed now."""
        x, weight, bias = as_called(x, weight, bias)
        return cls((Term(x, weight, bias, 1.0, version(x)),), None, x.dtype, torch.is_grad_enabled())

    @property
    def shape(self) -> torch.Size:
        x, weight, *_ = self.terms[0]
        return torch.Size((*x.shape[:-1], weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0].x.device

    def compute(self) -> Tensor:
        with _without_autocast(self.device):
            logits = None
            for x, weight, bias, scale, expected in self.terms:
                check_unmodified(x, expected)
                term = _whole(F.linear(_replicated(x, weight), weight, bias)).to(self._dtype)
                term = term if scale == 1.0 else term * scale
                logits = term if logits is None else logits + term
            assert logits is not None
            return logits if self.outer is None else torch.tanh(logits) * self.outer

    def handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = HANDLERS.get(function) if args[0] is self else None
        return NotImplemented if handler is None else handler(self, *args[1:], **kwargs)

    def replaced(
        self, terms: tuple[Term, ...] | None = None, outer: float | None = None, dtype: torch.dtype | None = None
    ) -> TracedLogits:
        """These logits with some things replaced."""
        outer = self.outer if outer is None else outer
        grad = self.grad and torch.is_grad_enabled()
        return TracedLogits(self.terms if terms is None else terms, outer, dtype or self._dtype, grad)

    def scaled(self, factor: Any) -> Any:
        """These logits times a number."""
        if type(factor) not in (float, int) or not math.isfinite(factor) or factor == 0:
            return NotImplemented
        if self.outer is not None:
            return self.replaced(outer=self.outer * factor)
        return self.replaced(terms=tuple([t._replace(scale=t.scale * factor) for t in self.terms]))

    def plus(self, other: Any) -> Any:
        """These logits plus those of another head, as of LoRA on the head."""
        if (
            not isinstance(other, TracedLogits)
            or other.materialized
            or self.outer is not None
            or other.outer is not None
        ):
            return NotImplemented
        alike = self.shape == other.shape and self._dtype == other._dtype and self.grad == other.grad
        return self.replaced(terms=self.terms + other.terms) if alike else NotImplemented

    def select(self, rows: Callable[[Tensor], Tensor]) -> TracedLogits:
        """The logits of the rows that `rows` takes from x."""
        terms: list[Term] = []
        for term in self.terms:
            check_unmodified(term.x, term.version)
            x = rows(term.x)
            terms.append(term._replace(x=x, version=version(x)))
        return self.replaced(terms=tuple(terms))

    def run(self, op: Callable[..., T]) -> T:
        """op(x, weight, bias, softcap=…, temperature=…), for the one linear and the form that these logits are."""
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), _without_autocast(self.device):
            for term in self.terms:
                check_unmodified(term.x, term.version)
            terms = [(_replicated(x, weight), weight, bias, scale) for x, weight, bias, scale, _ in self.terms]
            x, weight, bias, how = one_linear(terms, self.outer)
            return op(x, weight, bias, **how)

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
        if size_average is not None or reduce is not None or not takes(target, weight, self.shape[:-1]):
            return NotImplemented
        dtype = torch.float32 if torch.is_autocast_enabled(self.device.type) else self._dtype
        how = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        loss = functools.partial(cross_entropy, target=target, class_weight=weight, **how)
        return _whole(self.run(loss)).to(dtype)


add_methods(TracedLogits, *["add", "contiguous", "div", "float", "mul", "reshape", "tanh", "to", "view"])


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _replicated(x: Tensor, weight: Tensor) -> Tensor:
    """x; or, if the weight is a DTensor of a tensor-parallel head, x as one that each process has.

    So an op divides the vocabulary, and no process makes the logits of another one.
    """
    if type(weight) in (nn.Parameter, Tensor):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = cast("DTensor", weight).device_mesh
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(result: Tensor) -> Tensor:
    return result if type(result) is Tensor else cast("Any", result).full_tensor()


def _to(z: TracedLogits, *args: Any, **kwargs: Any) -> Any:
    options = {**kwargs, **{"dtype" if isinstance(a, torch.dtype) else "device": a for a in args}}
    if len(options) != len(args) + len(kwargs) or not {*options} <= {"dtype", "device"}:
        return NotImplemented
    device, dtype = options.get("device"), options.get("dtype") or z.dtype
    if device is not None and (not isinstance(device, (str, torch.device)) or torch.device(device) != z.device):
        return NotImplemented
    if dtype == z.dtype:
        return z
    # Losses are computed in float32 whatever the logits' dtype, so an earlier cast changes nothing.
    return z.replaced(dtype=dtype) if dtype == torch.float32 and z.dtype.itemsize == 2 else NotImplemented


def _getitem(z: TracedLogits, key: Any) -> Any:
    keys: list[Any] = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else [key]
    if any(k is not Ellipsis and type(k) not in (int, slice) for k in keys) or keys.count(Ellipsis) > 1:
        return NotImplemented
    place = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    keys[place : place + 1] = [slice(None)] * (z.ndim - len(keys) + keys.count(Ellipsis))
    if len(keys) != z.ndim or keys[-1] != slice(None):
        return NotImplemented
    rows = tuple(keys)
    return z.select(lambda x: x[rows])


def _reshape(z: TracedLogits, *shape: Any, **kwargs: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(cast("tuple[Any, ...]", shape[0]))
    if kwargs or not shape or shape[-1] != z.shape[-1] or any(not isinstance(n, int) for n in shape):
        return NotImplemented
    return z.select(lambda x: x.reshape(*shape[:-1], x.shape[-1]))


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: TracedLogits.cross_entropy,
    Tensor.to: _to,
    Tensor.float: lambda z: _to(z, torch.float32),
    Tensor.contiguous: lambda z: z.select(Tensor.contiguous),
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys(MUL, TracedLogits.scaled),
    **dict.fromkeys(
        DIV, lambda z, divisor: z.scaled(1.0 / divisor) if type(divisor) in (float, int) else NotImplemented
    ),
    **dict.fromkeys(ADD, TracedLogits.plus),
    **dict.fromkeys(NEG, lambda z: z.scaled(-1.0)),
    **dict.fromkeys(TANH, lambda z: z.replaced(outer=1.0) if z.outer is None else NotImplemented),
}
"""By function of torch: its handler for logits."""
