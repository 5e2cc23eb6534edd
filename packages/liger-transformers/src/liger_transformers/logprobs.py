"""Values of rows of deferred logits: log-probabilities of chosen tokens, entropy, log-sum-exp, mean, best column.

Each value is one op on the head's inputs and weight. A loss computes log-probabilities in several steps, such as log_softmax
and then gather. Each step but the last gives a deferred tensor. Logits are made only if a step is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import liger_core as liger
from liger_core.losses import TokenLogprobsOutput, fused_linear_token_logprobs
from liger_transformers.deferred import MUL, NEG, DeferredTensor, add_methods
from liger_transformers.logits import HANDLERS, Handler, Logits

if TYPE_CHECKING:
    from liger_core.ops.logit_statistics import LogitStatistics

NO_TOKEN = torch.iinfo(torch.int64).min
"""The target that doesn't count. No real target has this value, since gather refuses negative indices."""

SUB = frozenset({torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__})
STACK = frozenset({torch.stack})
EXP = frozenset({torch.exp, Tensor.exp})
SUM = frozenset({torch.sum, Tensor.sum})
GATHER = frozenset({torch.gather, Tensor.gather})
UNSQUEEZE = frozenset({torch.unsqueeze, Tensor.unsqueeze})
SQUEEZE = frozenset({torch.squeeze, Tensor.squeeze})


def statistics(
    z: Logits, target: Tensor | None = None, *, ignore_index: int = NO_TOKEN, **outputs: Any
) -> LogitStatistics:
    """`fused_linear_logit_statistics` of the rows, with the logits' own softcap and scale."""
    count = z.shape[:-1].numel()
    ids = torch.zeros(count, dtype=torch.int64, device=z.device) if target is None else target

    def op(x: Tensor, weight: Tensor, bias: Tensor | None, **form: Any) -> LogitStatistics:
        return liger.fused_linear_logit_statistics(x, weight, ids, bias, ignore_index=ignore_index, **form, **outputs)

    return z.run(op)


def token_logprobs(z: Logits, index: Tensor) -> Tensor:
    """Log-probabilities of K tokens for each row, of index's shape."""

    def op(x: Tensor, weight: Tensor, bias: Tensor | None, **form: Any) -> Tensor:
        ids = index.reshape(-1, index.shape[-1])
        logprobs = fused_linear_token_logprobs(x, weight, ids, bias, ignore_index=NO_TOKEN, **form)
        assert not isinstance(logprobs, TokenLogprobsOutput)
        return logprobs.view(index.shape)

    return z.run(op)


def _totals(z: Logits) -> Tensor:
    """Each row's sum of logits. Without a softcap it is x · Σ W, which reads the weight once."""
    if z.outer is not None:
        total = statistics(z, return_total=True).total
        assert total is not None
        return total

    def op(x: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, **_: Any) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            total = x.to(wide) @ weight.sum(0, dtype=wide)
            return (total if bias is None else total + bias.sum(dtype=wide)) / temperature

    return z.run(op)


def _is_index(z: Logits, index: Any) -> bool:
    """Whether `index` chooses columns of every row."""
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.int64
        and index.shape[:-1] == z.shape[:-1]
        and index.dim() == z.ndim
        and index.shape[-1] > 0
    )


def _unsqueezed(t: Tensor) -> Tensor:
    return t.unsqueeze(-1)


def _squeezed(t: Tensor) -> Tensor:
    return t.squeeze(-1)


def _is_last(z: Logits, dim: Any) -> bool:
    """Whether `dim` is that of the columns, alone."""
    if isinstance(dim, (tuple, list)):
        dims = cast("list[Any] | tuple[Any, ...]", dim)
        dim = dims[0] if len(dims) == 1 else None
    return type(dim) is int and dim in (-1, z.ndim - 1)


def _laid_out(values: Tensor, z: Logits, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Values of all rows in the logits' layout."""
    return values.view((*z.shape[:-1], *([1] if keepdim else []))).to(dtype)


def _dtype(z: DeferredTensor, function: Callable[..., Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of function(z, -1): in an autocast region it may differ from z's."""
    if dtype is not None or not torch.is_autocast_enabled(z.device.type):
        return dtype or z.dtype
    return function(torch.zeros((1, 1), dtype=z.dtype, device=z.device), -1).dtype


class DeferredRows(DeferredTensor):
    """A function of every row of logits `z`. Nobody else holds these logits, so nobody writes to them."""

    __slots__ = ("_dtype", "z")

    def __init__(self, z: Logits, dtype: torch.dtype, base: DeferredTensor | None = None, view: Any = None) -> None:
        super().__init__(z.grad, base, view)
        self.z, self._dtype = z, dtype

    @property
    def shape(self) -> torch.Size:
        return self.z.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self.z.device

    def handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0] is not self and not (function in STACK and len(args) == 1 and not kwargs):
            return NotImplemented
        return self.call(function, *args[1:], **kwargs) if function not in STACK else self.stack(*args)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of function(self, *args, **kwargs), deferred or computed; or NotImplemented."""
        raise NotImplementedError

    def stack(self, tensors: Any) -> Any:
        """The result of torch.stack(tensors), of which this is the first; or NotImplemented."""
        return NotImplemented


class LogSumExp(DeferredRows):
    """logsumexp of every row."""

    __slots__ = ("keepdim",)

    def __init__(
        self, z: Logits, dtype: torch.dtype, keepdim: bool, base: DeferredTensor | None = None, view: Any = None
    ) -> None:
        super().__init__(z, dtype, base, view)
        self.keepdim = keepdim

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.z.shape[:-1], *([1] if self.keepdim else [])))

    def compute(self) -> Tensor:
        return _laid_out(statistics(self.z).lse, self.z, self.keepdim, self.dtype)

    def is_of(self, z: Logits, keepdim: bool) -> bool:
        """Whether this is the log-sum-exp of these logits, in this layout, and as differentiable as they are now."""
        alike = self.keepdim == keepdim and self.z.same(z) and not self.materialized
        return alike and self.grad == (z.grad and torch.is_grad_enabled())

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in UNSQUEEZE and not self.keepdim and (args or (kwargs.get("dim"),)) == (-1,):
            return LogSumExp(self.z.snapshot(), self.dtype, True, self, _unsqueezed)
        return NotImplemented

    def stack(self, tensors: Any) -> Any:
        """The log-sum-exp of the whole logits, if the tensors are those of all rows of the first dimension, in order."""
        rows = [t.z.row_of if isinstance(t, LogSumExp) and not t.materialized else None for t in tensors]
        if self.keepdim or self.z.row_of is None:
            return NotImplemented
        whole, _ = self.z.row_of
        alike = len(rows) == whole.shape[0] and not any(t.keepdim or t.grad != self.grad for t in tensors)
        if not alike or any(row is None or row[0] is not whole or row[1] != i for i, row in enumerate(rows)):
            return NotImplemented
        lse = LogSumExp(whole.snapshot(), self.dtype, False)
        lse.grad = self.grad and torch.is_grad_enabled()
        return lse


class Picked(DeferredRows):
    """Logits of chosen tokens. Minus their rows' log-sum-exp they are log-probabilities, in one op."""

    __slots__ = ("index", "squeezed")

    def __init__(
        self, z: Logits, index: Tensor, squeezed: bool = False, base: DeferredTensor | None = None, view: Any = None
    ) -> None:
        super().__init__(z, z.dtype, base, view)
        self.index, self.squeezed = index, squeezed

    @property
    def shape(self) -> torch.Size:
        return self.index.shape[:-1] if self.squeezed else self.index.shape

    def compute(self) -> Tensor:
        picked = statistics(self.z, self.index.reshape(-1, self.index.shape[-1])).picked
        return picked.view(self.shape).to(self.dtype)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in SUB and len(args) == 1 and not kwargs and isinstance(args[0], LogSumExp):
            alike = self.grad == (self.z.grad and torch.is_grad_enabled())
            if alike and args[0].dtype == self.dtype and args[0].is_of(self.z, keepdim=not self.squeezed):
                return token_logprobs(self.z, self.index).view(self.shape).to(self.dtype)
        last = (args or (kwargs.get("dim"),)) in ((-1,), (self.ndim - 1,))
        if function in SQUEEZE and last and not self.squeezed and self.index.shape[-1] == 1:
            return Picked(self.z.snapshot(), self.index, True, self, _squeezed)
        return NotImplemented


class LogSoftmax(DeferredRows):
    """sign · log_softmax(z)."""

    __slots__ = ("sign",)

    def __init__(
        self,
        z: Logits,
        dtype: torch.dtype | None = None,
        sign: float = 1.0,
        base: DeferredTensor | None = None,
        view: Any = None,
    ) -> None:
        super().__init__(z, dtype or z.dtype, base, view)
        self.sign = sign

    def compute(self) -> Tensor:
        return F.log_softmax(self.z.tensor(), -1, dtype=self.dtype) * self.sign

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in GATHER:
            return self._gather(*args, **kwargs)
        if function is torch.take_along_dim:
            return self._take_along_dim(*args, **kwargs)
        if function in SUM:
            return self._sum(*args, **kwargs)
        if function is F.nll_loss and self.sign == 1.0 and self.ndim == 2:
            return self._nll_loss(*args, **kwargs)
        if kwargs or len(args) > 1:
            return NotImplemented
        if function in NEG and not args:
            return LogSoftmax(self.z.snapshot(), self.dtype, -self.sign)
        if function in EXP and not args and self.sign == 1.0:
            return Softmax(self.z.snapshot(), self.dtype)
        if function in MUL and args and isinstance(args[0], Softmax):
            return args[0].times(self)
        if function is Tensor.__getitem__ and args:
            rows = self.z.getitem(args[0])
            if rows is not NotImplemented and rows._base is not None:
                return LogSoftmax(rows.snapshot(), self.dtype, self.sign, self, rows._view)
        return NotImplemented

    def _gather(self, dim: Any, index: Any, **more: Any) -> Any:
        if more or not _is_last(self.z, dim) or not _is_index(self.z, index):
            return NotImplemented
        return self._signed(token_logprobs(self.z, index))

    def _take_along_dim(self, indices: Any, dim: Any = None, **more: Any) -> Any:
        return self._gather(dim, indices, **more)

    def _signed(self, logprobs: Tensor) -> Tensor:
        return logprobs.to(self.dtype) * self.sign if self.sign != 1.0 else logprobs.to(self.dtype)

    def _sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
        """Σ log p = Σ z − V · lse, which label smoothing adds up."""
        if more or not _is_last(self.z, dim):
            return NotImplemented
        of_row = statistics(self.z, return_total=True)
        assert of_row.total is not None
        total = (of_row.total - of_row.lse * self.z.shape[-1]) * self.sign
        return _laid_out(total, self.z, keepdim, _dtype(self, torch.sum, dtype))

    def _nll_loss(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        loss = self.z.cross_entropy(target, *args, **kwargs)
        return loss if loss is NotImplemented else loss.to(self.dtype)


class Softmax(DeferredRows):
    """softmax(z), waiting for its logarithm."""

    __slots__ = ()

    def compute(self) -> Tensor:
        return F.softmax(self.z.tensor(), -1, dtype=self.dtype)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in MUL and len(args) == 1 and not kwargs and isinstance(args[0], LogSoftmax):
            return self.times(args[0])
        return NotImplemented

    def times(self, log_p: LogSoftmax) -> Any:
        """p · log p, a product whose sum is the entropy."""
        alike = self.z.same(log_p.z) and self.dtype == log_p.dtype and self.grad == log_p.grad
        if not alike or self.materialized or log_p.materialized:
            return NotImplemented
        return EntropyTerm(self.z.snapshot(), self.dtype, log_p.sign)


class EntropyTerm(DeferredRows):
    """sign · p · log p, waiting for its sum, which is the entropy times −sign."""

    __slots__ = ("sign",)

    def __init__(self, z: Logits, dtype: torch.dtype, sign: float) -> None:
        super().__init__(z, dtype)
        self.sign = sign

    def compute(self) -> Tensor:
        log_p = F.log_softmax(self.z.tensor(), -1, dtype=self.dtype)
        return torch.mul(log_p.exp(), log_p) * self.sign

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in SUM:
            return self._sum(*args, **kwargs)
        if function in NEG and not args and not kwargs:
            return EntropyTerm(self.z.snapshot(), self.dtype, -self.sign)
        return NotImplemented

    def _sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
        if more or not _is_last(self.z, dim):
            return NotImplemented
        entropy = statistics(self.z, return_entropy=True).entropy
        assert entropy is not None
        return _laid_out(entropy * -self.sign, self.z, keepdim, _dtype(self, torch.sum, dtype))


for _cls in (LogSumExp, Picked, LogSoftmax, Softmax, EntropyTerm):
    add_methods(_cls, "exp", "gather", "mul", "neg", "squeeze", "sub", "sum", "unsqueeze")


def _log_softmax(
    z: Logits, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **more: Any
) -> Any:
    return (
        LogSoftmax(z.snapshot(), _dtype(z, F.log_softmax, dtype)) if not more and _is_last(z, dim) else NotImplemented
    )


def _torch_log_softmax(z: Logits, dim: Any = None, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return _log_softmax(z, dim, dtype=dtype, **more)


def _softmax(z: Logits, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return Softmax(z.snapshot(), _dtype(z, F.softmax, dtype)) if not more and _is_last(z, dim) else NotImplemented


def _torch_softmax(z: Logits, dim: Any = None, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return _softmax(z, dim, dtype=dtype, **more)


def _logsumexp(z: Logits, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not _is_last(z, dim):
        return NotImplemented
    lse = LogSumExp(z.snapshot(), _dtype(z, torch.logsumexp, None), keepdim)
    lse.z.row_of = z.row_of
    return lse


def _gather(z: Logits, dim: Any = None, index: Any = None, **more: Any) -> Any:
    return Picked(z.snapshot(), index) if not more and _is_last(z, dim) and _is_index(z, index) else NotImplemented


def _argmax(z: Logits, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not _is_last(z, dim):
        return NotImplemented
    with torch.no_grad():
        best = statistics(z, return_best=True).best_index
    assert best is not None
    return _laid_out(best, z, keepdim, torch.int64)


def _sum(z: Logits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if more or not (dim is None or _is_last(z, dim)) or (dim is None and keepdim):
        return NotImplemented
    total, dtype = _totals(z), _dtype(z, torch.sum, dtype)
    return total.sum().to(dtype) if dim is None else _laid_out(total, z, keepdim, dtype)


def _mean(z: Logits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if more or not (dim is None or _is_last(z, dim)) or (dim is None and keepdim):
        return NotImplemented
    mean, dtype = _totals(z) / z.shape[-1], _dtype(z, torch.mean, dtype)
    return mean.mean().to(dtype) if dim is None else _laid_out(mean, z, keepdim, dtype)


def _sub(z: Logits, other: Any) -> Any:
    if isinstance(other, LogSumExp) and other.is_of(z, keepdim=True):
        return LogSoftmax(z.snapshot())
    return z.plus(other, -1.0)


HANDLERS.update(
    {
        F.log_softmax: Handler(_log_softmax),
        torch.log_softmax: Handler(_torch_log_softmax),
        Tensor.log_softmax: Handler(_torch_log_softmax),
        F.softmax: Handler(_softmax),
        torch.softmax: Handler(_torch_softmax),
        Tensor.softmax: Handler(_torch_softmax),
        torch.logsumexp: Handler(_logsumexp),
        Tensor.logsumexp: Handler(_logsumexp),
        torch.gather: Handler(_gather),
        Tensor.gather: Handler(_gather),
        torch.argmax: Handler(_argmax),
        Tensor.argmax: Handler(_argmax),
        torch.sum: Handler(_sum),
        Tensor.sum: Handler(_sum),
        torch.mean: Handler(_mean),
        Tensor.mean: Handler(_mean),
        **dict.fromkeys(SUB, Handler(_sub, 1)),
    }
)
