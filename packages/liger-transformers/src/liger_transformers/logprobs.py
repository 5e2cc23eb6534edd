"""What losses need for every row of owed logits: log-probabilities of chosen tokens, entropy, log-sum-exp, mean, best column.

Each answer is one op on the head's inputs and weight. A loss asks for log-probabilities in several steps, such as log_softmax
and then gather. Each step but the last gives a promise. Logits are made only if a step is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import liger_core as liger
from liger_core.losses import TokenLogprobsOutput, fused_linear_token_logprobs
from liger_transformers.promise import MUL, NEG, SUB, Promise, follow

if TYPE_CHECKING:
    from liger_core.ops.logit_statistics import LogitStatistics
    from liger_transformers.logits import Logits

NO_TOKEN = torch.iinfo(torch.int64).min
"""The target that doesn't count. No real target has this value, since gather refuses negative indices."""

STACK = frozenset({torch.stack})
EXP = frozenset({torch.exp, Tensor.exp})
SUM = frozenset({torch.sum, Tensor.sum})
GATHER = frozenset({torch.gather, Tensor.gather})
UNSQUEEZE = frozenset({torch.unsqueeze, Tensor.unsqueeze})
SQUEEZE = frozenset({torch.squeeze, Tensor.squeeze})


def statistics(
    z: Logits, target: Tensor | None = None, *, ignore_index: int = NO_TOKEN, **wanted: Any
) -> LogitStatistics:
    """`fused_linear_logit_statistics` of the rows, with the logits' own softcap and scale."""
    count = z.shape[:-1].numel()
    ids = torch.zeros(count, dtype=torch.int64, device=z.device) if target is None else target

    def question(x: Tensor, weight: Tensor, bias: Tensor | None, **form: Any) -> LogitStatistics:
        found = liger.fused_linear_logit_statistics(x, weight, ids, bias, ignore_index=ignore_index, **form, **wanted)
        return found

    return z.ask(question)


def token_logprobs(z: Logits, index: Tensor) -> Tensor:
    """Log-probabilities of K tokens for each row, of index's shape."""

    def question(x: Tensor, weight: Tensor, bias: Tensor | None, **form: Any) -> Tensor:
        ids = index.reshape(-1, index.shape[-1])
        found = fused_linear_token_logprobs(x, weight, ids, bias, ignore_index=NO_TOKEN, **form)
        assert not isinstance(found, TokenLogprobsOutput)
        return found.view(index.shape)

    return z.ask(question)


def _totals(z: Logits) -> Tensor:
    """Each row's sum of logits. Without a softcap it is x · Σ W, which reads the weight once."""
    if z.outer is not None:
        found = statistics(z, return_total=True)
        assert found.total is not None
        return found.total

    def question(x: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, **_: Any) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            total = x.to(wide) @ weight.sum(0, dtype=wide)
            return (total if bias is None else total + bias.sum(dtype=wide)) / temperature

    return z.ask(question)


def _picks(z: Logits, index: Any) -> bool:
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


def _last(z: Logits, dim: Any) -> bool:
    if isinstance(dim, (tuple, list)):
        dims = cast("list[Any] | tuple[Any, ...]", dim)
        dim = dims[0] if len(dims) == 1 else None
    return type(dim) is int and dim in (-1, z.ndim - 1)


def _kept(values: Tensor, z: Logits, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Values of all rows in the logits' layout."""
    return values.view((*z.shape[:-1], *([1] if keepdim else []))).to(dtype)


def _dtype(z: Promise, function: Callable[..., Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of function(z, -1): in an autocast region it may differ from z's."""
    if dtype is not None or not torch.is_autocast_enabled(z.device.type):
        return dtype or z.dtype
    return function(torch.zeros((1, 1), dtype=z.dtype, device=z.device), -1).dtype


class RowPromise(Promise):
    """A value for every row of logits `z`. Nobody else holds these logits, so nobody writes to them."""

    __slots__ = ("_dtype", "z")

    def __init__(self, z: Logits, dtype: torch.dtype, base: Promise | None = None, view: Any = None) -> None:
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

    def wait(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0] is not self and not (function in STACK and len(args) == 1 and not kwargs):
            return NotImplemented
        return self.step(function, *args[1:], **kwargs) if function not in STACK else self.stacked(*args)

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The next step's promise, or the answer, or NotImplemented."""
        raise NotImplementedError

    def stacked(self, parts: Any) -> Any:
        """The result of torch.stack of `parts`, of which this promise is the first."""
        return NotImplemented


class LogSumExp(RowPromise):
    """logsumexp of every row."""

    __slots__ = ("keepdim",)

    def __init__(
        self, z: Logits, dtype: torch.dtype, keepdim: bool, base: Promise | None = None, view: Any = None
    ) -> None:
        super().__init__(z, dtype, base, view)
        self.keepdim = keepdim

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.z.shape[:-1], *([1] if self.keepdim else [])))

    def compute(self) -> Tensor:
        return _kept(statistics(self.z).lse, self.z, self.keepdim, self.dtype)

    def is_of(self, z: Logits, keepdim: bool) -> bool:
        """Whether it is the log-sum-exp of these logits, in this layout, and as differentiable as they are now."""
        alike = self.keepdim == keepdim and self.z.same(z) and not self.settled
        return alike and self.grad == (z.grad and torch.is_grad_enabled())

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in UNSQUEEZE and not self.keepdim and (args or (kwargs.get("dim"),)) == (-1,):
            return LogSumExp(self.z.apart(), self.dtype, True, self, _unsqueezed)
        return NotImplemented

    def stacked(self, parts: Any) -> Any:
        """If the parts are all rows of the first dimension, in order, it is the log-sum-exp of the whole."""
        rows = [part.z.row_of if isinstance(part, LogSumExp) and not part.settled else None for part in parts]
        if self.keepdim or self.z.row_of is None:
            return NotImplemented
        whole, _ = self.z.row_of
        alike = len(rows) == whole.shape[0] and not any(part.keepdim or part.grad != self.grad for part in parts)
        if not alike or any(row is None or row[0] is not whole or row[1] != i for i, row in enumerate(rows)):
            return NotImplemented
        found = LogSumExp(whole.apart(), self.dtype, False)
        found.grad = self.grad and torch.is_grad_enabled()
        return found


class Picked(RowPromise):
    """Logits of chosen tokens. Minus their rows' log-sum-exp they are log-probabilities, in one op."""

    __slots__ = ("index", "squeezed")

    def __init__(
        self, z: Logits, index: Tensor, squeezed: bool = False, base: Promise | None = None, view: Any = None
    ) -> None:
        super().__init__(z, z.dtype, base, view)
        self.index, self.squeezed = index, squeezed

    @property
    def shape(self) -> torch.Size:
        return self.index.shape[:-1] if self.squeezed else self.index.shape

    def compute(self) -> Tensor:
        found = statistics(self.z, self.index.reshape(-1, self.index.shape[-1])).picked
        return found.view(self.shape).to(self.dtype)

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in SUB and len(args) == 1 and not kwargs and isinstance(args[0], LogSumExp):
            alike = self.grad == (self.z.grad and torch.is_grad_enabled())
            if alike and args[0].dtype == self.dtype and args[0].is_of(self.z, keepdim=not self.squeezed):
                return token_logprobs(self.z, self.index).view(self.shape).to(self.dtype)
        last = (args or (kwargs.get("dim"),)) in ((-1,), (self.ndim - 1,))
        if function in SQUEEZE and last and not self.squeezed and self.index.shape[-1] == 1:
            return Picked(self.z.apart(), self.index, True, self, _squeezed)
        return NotImplemented


class LogSoftmax(RowPromise):
    """sign · log_softmax(z)."""

    __slots__ = ("sign",)

    def __init__(
        self,
        z: Logits,
        dtype: torch.dtype | None = None,
        sign: float = 1.0,
        base: Promise | None = None,
        view: Any = None,
    ) -> None:
        super().__init__(z, dtype or z.dtype, base, view)
        self.sign = sign

    def compute(self) -> Tensor:
        return F.log_softmax(self.z.tensor(), -1, dtype=self.dtype) * self.sign

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
            return LogSoftmax(self.z.apart(), self.dtype, -self.sign)
        if function in EXP and not args and self.sign == 1.0:
            return Softmax(self.z.apart(), self.dtype)
        if function in MUL and args and isinstance(args[0], Softmax):
            return args[0].times(self)
        if function is Tensor.__getitem__ and args:
            rows = self.z.wait(function, (self.z, args[0]), {})
            if rows is not NotImplemented and rows._base is not None:
                return LogSoftmax(rows.apart(), self.dtype, self.sign, self, rows._view)
        return NotImplemented

    def _gather(self, dim: Any, index: Any, **more: Any) -> Any:
        if more or not _last(self.z, dim) or not _picks(self.z, index):
            return NotImplemented
        return self._answer(token_logprobs(self.z, index))

    def _take_along_dim(self, indices: Any, dim: Any = None, **more: Any) -> Any:
        return self._gather(dim, indices, **more)

    def _answer(self, logprobs: Tensor) -> Tensor:
        return logprobs.to(self.dtype) * self.sign if self.sign != 1.0 else logprobs.to(self.dtype)

    def _sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
        """Σ log p = Σ z − V · lse, which label smoothing adds up."""
        if more or not _last(self.z, dim):
            return NotImplemented
        found = statistics(self.z, return_total=True)
        assert found.total is not None
        total = (found.total - found.lse * self.z.shape[-1]) * self.sign
        return _kept(total, self.z, keepdim, _dtype(self, torch.sum, dtype))

    def _nll_loss(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.z.wait(F.cross_entropy, (self.z, target, *args), kwargs)
        return found if found is NotImplemented else found.to(self.dtype)


class Softmax(RowPromise):
    """softmax(z), waiting for its logarithm."""

    __slots__ = ()

    def compute(self) -> Tensor:
        return F.softmax(self.z.tensor(), -1, dtype=self.dtype)

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in MUL and len(args) == 1 and not kwargs and isinstance(args[0], LogSoftmax):
            return self.times(args[0])
        return NotImplemented

    def times(self, log_p: LogSoftmax) -> Any:
        """p · log p, a product whose sum is the entropy."""
        alike = self.z.same(log_p.z) and self.dtype == log_p.dtype and self.grad == log_p.grad
        if not alike or self.settled or log_p.settled:
            return NotImplemented
        return Surprise(self.z.apart(), self.dtype, log_p.sign)


class Surprise(RowPromise):
    """sign · p · log p, waiting for its sum, which is the entropy times −sign."""

    __slots__ = ("sign",)

    def __init__(self, z: Logits, dtype: torch.dtype, sign: float) -> None:
        super().__init__(z, dtype)
        self.sign = sign

    def compute(self) -> Tensor:
        log_p = F.log_softmax(self.z.tensor(), -1, dtype=self.dtype)
        return torch.mul(log_p.exp(), log_p) * self.sign

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function in SUM:
            return self._sum(*args, **kwargs)
        if function in NEG and not args and not kwargs:
            return Surprise(self.z.apart(), self.dtype, -self.sign)
        return NotImplemented

    def _sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
        if more or not _last(self.z, dim):
            return NotImplemented
        entropy = statistics(self.z, return_entropy=True).entropy
        assert entropy is not None
        return _kept(entropy * -self.sign, self.z, keepdim, _dtype(self, torch.sum, dtype))


for _cls in (LogSumExp, Picked, LogSoftmax, Softmax, Surprise):
    follow(_cls, "exp", "gather", "mul", "neg", "squeeze", "sub", "sum", "unsqueeze")


def _log_softmax(
    z: Logits, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **more: Any
) -> Any:
    return LogSoftmax(z.apart(), _dtype(z, F.log_softmax, dtype)) if not more and _last(z, dim) else NotImplemented


def _torch_log_softmax(z: Logits, dim: Any = None, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return _log_softmax(z, dim, dtype=dtype, **more)


def _softmax(z: Logits, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return Softmax(z.apart(), _dtype(z, F.softmax, dtype)) if not more and _last(z, dim) else NotImplemented


def _torch_softmax(z: Logits, dim: Any = None, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return _softmax(z, dim, dtype=dtype, **more)


def _logsumexp(z: Logits, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not _last(z, dim):
        return NotImplemented
    found = LogSumExp(z.apart(), _dtype(z, torch.logsumexp, None), keepdim)
    found.z.row_of = z.row_of
    return found


def _gather(z: Logits, dim: Any = None, index: Any = None, **more: Any) -> Any:
    return Picked(z.apart(), index) if not more and _last(z, dim) and _picks(z, index) else NotImplemented


def _argmax(z: Logits, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not _last(z, dim):
        return NotImplemented
    with torch.no_grad():
        best = statistics(z, return_best=True).best_index
    assert best is not None
    return _kept(best, z, keepdim, torch.int64)


def _sum(z: Logits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if more or not (dim is None or _last(z, dim)) or (dim is None and keepdim):
        return NotImplemented
    total, dtype = _totals(z), _dtype(z, torch.sum, dtype)
    return total.sum().to(dtype) if dim is None else _kept(total, z, keepdim, dtype)


def _mean(z: Logits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if more or not (dim is None or _last(z, dim)) or (dim is None and keepdim):
        return NotImplemented
    mean, dtype = _totals(z) / z.shape[-1], _dtype(z, torch.mean, dtype)
    return mean.mean().to(dtype) if dim is None else _kept(mean, z, keepdim, dtype)


QUESTIONS: dict[Any, Callable[..., Any]] = {
    F.log_softmax: _log_softmax,
    torch.log_softmax: _torch_log_softmax,
    Tensor.log_softmax: _torch_log_softmax,
    F.softmax: _softmax,
    torch.softmax: _torch_softmax,
    Tensor.softmax: _torch_softmax,
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    torch.gather: _gather,
    Tensor.gather: _gather,
    torch.argmax: _argmax,
    Tensor.argmax: _argmax,
    torch.sum: _sum,
    Tensor.sum: _sum,
    torch.mean: _mean,
    Tensor.mean: _mean,
}
"""By function of the logits: the function that gives its promise or its answer, or NotImplemented."""
