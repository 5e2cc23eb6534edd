"""Functions of logits that an op computes without them, and the gradients of both."""

# Functions of torch and their arguments are any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_core as liger
from liger_core.losses import fused_linear_token_logprobs
from liger_core.ops.cross_entropy import loss_of_logits
from liger_core.ops.logit_statistics import LogitStatistics
from liger_transformers.linear import OTHER_VALUE, as_called, cross_entropy, model_loss, one_linear, takes
from liger_transformers.logits import HANDLERS, Form, Logits, Note, Plain, Source, Term, aten

NO_TOKEN = torch.iinfo(torch.int64).min
"""The target that doesn't count. No real target has this value, since gather refuses negative indices."""

LOSS_ALONE: dict[str, Any] = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), False)
"""Arguments of `loss_of_logits` for a loss without further results."""


class Function(torch.autograd.Function):
    """A node that gets no zeros in place of gradients that are None: they would take as much memory as the logits."""

    @staticmethod
    def ready(ctx: Any) -> None:
        ctx.set_materialize_grads(False)


def waits(g: Any, form: type) -> bool:
    return isinstance(g, Logits) and isinstance(g.state.form, form) and g.state.waits()


class Linear(Function):
    """F.linear(x, weight, bias), not made yet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
        Function.ready(ctx)
        ctx.save_for_backward(x, weight, bias)  # backward raises, as a linear's does, if one of them was written to
        ctx.source = source
        meta = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")
        return Logits.make(meta, x.device, lambda: F.linear(*source.get()), (), Form((Term(source, (), 1.0, ()),)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (g,) = grad_outputs
        x, weight, bias = ctx.saved_tensors
        if g is None:
            return None, None, None, None
        if waits(g, Note) and all(answer.fits(ctx.source, steps) for answer, steps in g.state.form.parts):
            return *_summed([answer.gradients(ctx.source) for answer, _ in g.state.form.parts]), None
        g = Plain.apply(g) if isinstance(g, Logits) else g
        rows, need = g.reshape(-1, g.shape[-1]), ctx.needs_input_grad
        return (
            g @ weight if need[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if need[1] else None,
            rows.sum(0) if bias is not None and need[2] else None,
            None,
        )


def _summed(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    def plus(a: Any, b: Any) -> Any:
        return a if b is None else b if a is None else a + b

    return functools.reduce(lambda one, two: tuple(map(plus, one, two)), parts)


def defer(x: Tensor, weight: Tensor, bias: Tensor | None, head: Any = None) -> Tensor | None:
    """The logits F.linear(x, weight, bias); None if they have to be made at once."""
    inputs = [t for t in (x, weight, bias) if t is not None]
    # Tensors of inference mode count no version.
    plain = all(type(t) in (nn.Parameter, Tensor) and not t.is_inference() for t in inputs)
    if x.device.type == "meta" or x.dim() < 2 or not plain:
        return None
    x, weight, bias = as_called(x, weight, bias)
    if x.dtype != weight.dtype or not x.is_floating_point():
        return None
    return cast("Any", Linear.apply(x, weight, bias, Source(x, weight, bias, head)))


class Answer(Function):
    """fused(x, weight, bias, softcap=…, temperature=…) in place of made(logits). Both give a tuple of tensors."""

    @staticmethod
    def forward(ctx: Any, z: Logits, fused: Any, made: Any) -> Any:
        Function.ready(ctx)
        need, leaves = ctx.needs_input_grad[0], {}
        with torch.set_grad_enabled(need), torch.autocast(z.state.device.type, enabled=False):
            x, weight, bias, how = _one_linear(cast("Form", z.state.form), leaves, need)
            results = fused(x, weight, bias, **how)
        ctx.z, ctx.made, ctx.leaves, ctx.results = z, made, leaves, results
        values = tuple(t.detach() for t in results)
        ctx.mark_non_differentiable(*(v for v, t in zip(values, results, strict=True) if not t.requires_grad))
        return values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        places = [i for i, g in enumerate(grad_outputs) if g is not None]
        incoming, z = [grad_outputs[i] for i in places], ctx.z
        if not places:
            return None, None, None
        if torch.is_grad_enabled():  # create_graph: only the plain way is differentiable again
            p = Plain.apply(z)
            results = ctx.made(p)
            return *torch.autograd.grad([results[i] for i in places], p, incoming, create_graph=True), None, None

        def gradient() -> Tensor:
            with _with_autograd():
                p = z.state.compute(current=False).detach().requires_grad_()
                results = ctx.made(p)
                return torch.autograd.grad([results[i] for i in places], p, incoming)[0]

        answer = Answered(z.state.form, [ctx.results[i] for i in places], ctx.leaves, incoming)
        meta = torch.empty(z.shape, dtype=z.dtype, device="meta")
        new = Logits.make(meta, z.state.device, gradient, (), Note(((answer, ()),)))
        if z.retains_grad:
            new.state.tensor()  # it will be read, maybe after the optimizer's step
        return new, None, None


@contextmanager
def _with_autograd() -> Any:
    """Autograd beneath it, in __torch_dispatch__."""
    keys: Any = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        keys = keys.remove(key)
    guard: Any = torch._C._ForceDispatchKeyGuard
    with guard(torch._C._dispatch_tls_local_include_set(), keys), torch.enable_grad():
        yield


class Answered:
    """Gradients of the heads' inputs and weights, for one backward of one answer."""

    def __init__(self, form: Form, results: list[Tensor], leaves: dict[Source, Any], grads: list[Tensor]) -> None:
        self.steps = {t.source: t.steps[::-1] for t in form.terms}
        self.results, self.leaves, self.grads = results, leaves, grads
        self.keep = cast("Any", torch._C)._autograd._get_current_graph_task_keep_graph()
        self.by_source: dict[Source, list[Any]] | None = None

    def fits(self, source: Source, steps: tuple[Any, ...]) -> bool:
        """Whether the gradient took the steps of the forward back and no others."""
        return not torch.is_grad_enabled() and self.steps.get(source) == steps

    def gradients(self, source: Source) -> tuple[Any, ...]:
        if self.by_source is None:
            differentiable = [
                (s, i, t) for s, three in self.leaves.items() for i, t in enumerate(three) if t is not None
            ]
            differentiable = [(s, i, t) for s, i, t in differentiable if t.requires_grad]
            inputs = [t for *_, t in differentiable]
            grads = torch.autograd.grad(self.results, inputs, self.grads, retain_graph=self.keep, allow_unused=True)
            self.by_source = {s: [None, None, None] for s in self.leaves}
            for (s, i, _), grad in zip(differentiable, grads, strict=True):
                self.by_source[s][i] = grad
        return tuple(self.by_source.pop(source))


def _one_linear(
    form: Form, leaves: dict[Source, Any], need: bool
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """The one linear that the form's are, as a function of `leaves`: what the op differentiates."""
    terms: list[tuple[Tensor, Tensor, Tensor | None, float]] = []
    for t in form.terms:
        three: Any = tuple(
            v if v is None else v.detach().requires_grad_(need and wants)
            for v, wants in zip(t.source.get(), t.source.needs, strict=True)
        )
        leaves[t.source] = x, weight, bias = three
        for rows in t.rows:
            x = rows(x)
        terms.append((x, weight, bias, t.scale))
    return one_linear(terms, form.outer)


def _answer(z: Logits, fused: Callable[..., Tensor], made: Callable[[Tensor], Tensor]) -> Tensor:
    (value,) = Answer.apply(z, lambda *args, **how: (fused(*args, **how),), lambda p: (made(p),))
    return value


def statistics(
    z: Logits, target: Tensor | None = None, *, ignore_index: int = NO_TOKEN, **outputs: Any
) -> LogitStatistics:
    """`fused_linear_logit_statistics` of the rows, with the logits' own softcap and scale."""
    ids = torch.zeros(z.shape[:-1].numel(), dtype=torch.int64, device=z.device) if target is None else target
    places: list[int] = []

    def given(result: LogitStatistics) -> tuple[Tensor, ...]:
        places[:] = [i for i, value in enumerate(result) if value is not None]
        return tuple(value for value in result if value is not None)

    def fused(x: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> tuple[Tensor, ...]:
        return given(
            liger.fused_linear_logit_statistics(x, weight, ids, bias, ignore_index=ignore_index, **how, **outputs)
        )

    def made(p: Tensor) -> tuple[Tensor, ...]:
        rows = p.reshape(-1, p.shape[-1])
        return given(liger.logit_statistics(rows, ids, ignore_index=ignore_index, **outputs))

    values: list[Any] = [None] * len(LogitStatistics._fields)
    for i, value in zip(places, Answer.apply(z, fused, made), strict=True):
        values[i] = value
    return LogitStatistics(*values)


class OfRows(Function):
    """log_softmax, softmax or exp of every row, not made yet."""

    @staticmethod
    def forward(ctx: Any, z: Logits, of: str) -> Tensor:
        Function.ready(ctx)
        ctx.of, ctx.step = of, (of, object())
        form = cast("Form", z.state.form).after(ctx.step)._replace(of=of)
        new = z.then(torch.exp if of == "exp" else functools.partial(getattr(torch, of), dim=-1), (), form)
        ctx.save_for_backward(new)
        return new

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (g,) = grad_outputs
        if g is None:
            return None, None
        (y,) = ctx.saved_tensors
        if not waits(g, Note):
            return _of_rows_backward(ctx.of, g, y), None
        note = g.state.form.after(ctx.step)
        return g.then(functools.partial(_of_rows_backward, ctx.of), (y,), note, meta=g.state.meta), None


def _of_rows_backward(of: str, g: Tensor, y: Tensor) -> Tensor:
    if of == "exp":
        return g * y
    function = aten._log_softmax_backward_data if of == "log_softmax" else aten._softmax_backward_data
    return function(g, y, -1, y.dtype)


class EntropyTerm(Function):
    """p · log p, not made yet."""

    @staticmethod
    def forward(ctx: Any, p: Logits, log_p: Logits) -> Tensor:
        Function.ready(ctx)
        ctx.step = ("entropy", object())
        ctx.save_for_backward(p, log_p)
        form = cast("Form", log_p.state.form).after(ctx.step)._replace(of="entropy")
        return Logits.make(log_p.state.meta, p.state.device, torch.mul, (p, log_p), form)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (g,) = grad_outputs
        if g is None:
            return None, None
        p, log_p = ctx.saved_tensors
        if not waits(g, Note):
            return g * log_p, g * p
        # p is a function of log_p, whose gradient gets both parts.
        note = g.state.form.after(ctx.step)
        return None, g.then(lambda g, p, log_p: g * p * (log_p + 1), (p, log_p), note, meta=g.state.meta)


class Rows(Function):
    """z[key] for a tensor `key` that chooses rows, not made yet."""

    @staticmethod
    def forward(ctx: Any, z: Logits, key: Tensor) -> Tensor:
        Function.ready(ctx)
        ctx.step, ctx.shape = ("rows", object()), z.shape
        ctx.save_for_backward(key)
        form = cast("Form", z.state.form).after(ctx.step, lambda x: x[key])
        shape = torch.empty(z.shape[:-1], device=key.device)[key].shape
        meta = torch.empty((*shape, z.shape[-1]), dtype=z.dtype, device="meta")
        return z.then(lambda t: t[key], (), form, meta=meta)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (g,) = grad_outputs
        (key,) = ctx.saved_tensors

        def back(t: Tensor) -> Tensor:
            return t.new_zeros(ctx.shape).index_put((key,), t, accumulate=True)

        if g is None or not waits(g, Note):
            return None if g is None else back(g), None
        meta = torch.empty(ctx.shape, dtype=g.dtype, device="meta")
        return g.then(back, (), g.state.form.after(ctx.step), meta=meta), None


# Handlers: a function of torch, asked of logits that wait.


def _cross_entropy(
    z: Logits,
    function: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    form, of = cast("Form", z.state.form), "log_softmax" if function is F.nll_loss else "logits"
    if form.of != of or form.factor != 1.0 or size_average is not None or reduce is not None or z.dim() != 2:
        return NotImplemented
    if not takes(target, weight, z.shape[:1]):
        return NotImplemented
    dtype = torch.float32 if torch.is_autocast_enabled(z.device.type) else z.dtype
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    options |= {"label_smoothing": label_smoothing} if of == "logits" else {}

    def fused(x: Tensor, w: Tensor, b: Tensor | None, **how: Any) -> Tensor:
        return cross_entropy(x, w, b, target, class_weight=weight, **how, **options).to(dtype)

    other = {name: value for name, value in model_loss.options.items() if name in OTHER_VALUE}
    if other and of != "logits":
        return NotImplemented
    if other:
        plain = functools.partial(cast("Any", loss_of_logits), target=target, weight=weight, softcap=None, **LOSS_ALONE)
        return _answer(z, fused, lambda p: plain(p, **{**OTHER_VALUE, **other, **options}).to(dtype))
    return _answer(z, fused, lambda p: function(p.to(dtype), target, weight, **options))


def _is_last(z: Logits, dim: Any) -> bool:
    """Whether `dim` is that of the columns, alone."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(cast("Any", dim)) == 1 else dim
    return type(dim) is int and dim in (-1, z.dim() - 1)


def _cast(z: Any, function: Callable[..., Tensor], dtype: torch.dtype | None = None) -> Any:
    """z in the dtype that function(z, -1, dtype=dtype) has: in an autocast region it may differ from z's."""
    if dtype is None and torch.is_autocast_enabled(z.device.type):
        dtype = function(torch.zeros((1, 1), dtype=z.dtype, device=z.device), -1).dtype
    z = z if dtype is None else z.to(dtype)
    return z if waits(z, Form) else NotImplemented


def _of_rows(of: str) -> Callable[..., Any]:
    def handler(z: Logits, function: Any, dim: Any = None, *rest: Any, dtype: Any = None, **more: Any) -> Any:
        more.pop("_stacklevel", None)
        if rest or more or not _is_last(z, dim) or cast("Form", z.state.form).of != "logits":
            return NotImplemented
        z = _cast(z, getattr(torch, of), dtype)
        return z if z is NotImplemented else OfRows.apply(z, of)

    return handler


def _exp(z: Logits, function: Any, **more: Any) -> Any:
    form = cast("Form", z.state.form)
    return OfRows.apply(z, "exp") if not more and form.of == "log_softmax" and form.factor == 1.0 else NotImplemented


def _mul(z: Any, function: Any, other: Any, **more: Any) -> Any:
    """p · log p."""
    if more or not (waits(z, Form) and waits(other, Form)):
        return NotImplemented
    log_p, p = (z, other) if z.state.form.of == "log_softmax" else (other, z)
    if log_p.state.form.of != "log_softmax" or log_p.state.form.factor != 1.0 or p.state.form.factor != 1.0:
        return NotImplemented
    of, args = p.state.form.of, p.state.call[1]
    same = (of == "exp" and args[0] is log_p.state) or (of == "softmax" and args[0] is log_p.state.call[1][0])
    return EntropyTerm.apply(p, log_p) if same else NotImplemented


def _gather(z: Logits, function: Any, dim: Any = None, index: Any = None, **more: Any) -> Any:
    form = cast("Form", z.state.form)
    fits = isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == z.dim() and index.shape[-1] > 0
    if more or not fits or not _is_last(z, dim) or index.shape[:-1] != z.shape[:-1]:
        return NotImplemented
    ids = index.reshape(-1, index.shape[-1])
    if form.of == "log_softmax":

        def fused(x: Tensor, w: Tensor, b: Tensor | None, **how: Any) -> Tensor:
            logprobs = cast("Tensor", fused_linear_token_logprobs(x, w, ids, b, ignore_index=NO_TOKEN, **how))
            return (logprobs.view(index.shape) * form.factor).to(z.dtype)

        return _answer(z, fused, lambda p: torch.gather(p, -1, index))
    if form.of != "logits":
        return NotImplemented
    row_statistics = statistics(z, ids)
    picked = row_statistics.picked.view(index.shape).to(z.dtype)
    # Log-probabilities are these less the rows' log-sum-exp, which the op has given too. Who holds the one keeps the other.
    picked.row_lse = row_statistics.lse.view(z.shape[:-1])  # type: ignore[attr-defined]
    z.state.picked = weakref.ref(picked)
    return picked


def _take_along_dim(z: Logits, function: Any, indices: Any = None, dim: Any = None, **more: Any) -> Any:
    return _gather(z, function, dim, indices, **more)


def _logsumexp(z: Logits, function: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not _is_last(z, dim) or cast("Form", z.state.form).of != "logits":
        return NotImplemented
    lse = _known_lse(z)
    if lse is None:
        lse = statistics(z).lse.view(z.shape[:-1])
    lse = lse.unsqueeze(-1) if keepdim else lse
    return lse.to(function(torch.zeros((1, 1), dtype=z.dtype, device=z.device), -1).dtype)


def _known_lse(z: Logits) -> Tensor | None:
    """The log-sum-exp of each row, if an earlier `gather` of them, or of what they are one item of, has given it."""
    state, item = z.state, None
    if state.picked is None and state.of is not None and state.call[0] is aten.select.int and state.call[1][1] == 0:
        state, item = state.of, state.call[1][2]
    picked = None if state.picked is None else state.picked()
    if (
        picked is None
        or z._backward_hooks
        or (torch.is_grad_enabled() and picked.row_lse.requires_grad != z.requires_grad)
    ):
        return None
    return picked.row_lse if item is None else picked.row_lse[item]


def _sum(z: Logits, function: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any) -> Any:
    """The sum or mean over columns, or over everything."""
    form, mean = cast("Form", z.state.form), function in (torch.mean, Tensor.mean)
    every = dim is None and not keepdim and form.of == "logits"
    if more or not (every or _is_last(z, dim)) or form.of in ("exp", "softmax") or (mean and form.of != "logits"):
        return NotImplemented
    dtype = dtype or function(torch.zeros((1, 1), dtype=z.dtype, device=z.device), -1).dtype
    columns, shape = z.shape[-1], (*z.shape[:-1], *([1] if keepdim else []))

    def fused(x: Tensor, w: Tensor, b: Tensor | None, **how: Any) -> Tensor:
        total = _row_sums(form, x, w, b, how) / (columns if mean else 1)
        if every:
            return (total.mean() if mean else total.sum()).to(dtype)
        return total.view(shape).to(dtype)

    return _answer(z, fused, lambda p: function(p, *(() if every else (-1, keepdim)), dtype=dtype))


def _row_sums(form: Form, x: Tensor, w: Tensor, b: Tensor | None, how: dict[str, Any]) -> Tensor:
    if form.of == "logits" and form.outer is None:  # x · Σ W reads the weight once
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.to(wide) @ w.sum(0, dtype=wide)
        return (total if b is None else total + b.sum(dtype=wide)) / how["temperature"]
    ids, entropy = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device), form.of == "entropy"
    row_statistics = liger.fused_linear_logit_statistics(
        x, w, ids, b, ignore_index=NO_TOKEN, **how, return_entropy=entropy, return_total=not entropy
    )
    if entropy:
        return cast("Tensor", row_statistics.entropy) * -form.factor
    total = cast("Tensor", row_statistics.total)
    return total if form.of == "logits" else (total - row_statistics.lse * w.shape[0]) * form.factor


def _argmax(z: Logits, function: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not _is_last(z, dim) or cast("Form", z.state.form).of != "logits":
        return NotImplemented
    with torch.no_grad():
        best = cast("Tensor", statistics(z.detach(), return_best=True).best_index)  # type: ignore[arg-type]
    return best.view((*z.shape[:-1], *([1] if keepdim else [])))


def _getitem(z: Logits, function: Any, key: Any) -> Any:
    rows = isinstance(key, Tensor) and not isinstance(key, Logits) and key.dtype in (torch.bool, torch.int64)
    return Rows.apply(z, key) if rows and 0 < key.dim() < z.dim() else NotImplemented


def _index_select(z: Logits, function: Any, dim: Any = None, index: Any = None, **more: Any) -> Any:
    return _getitem(z, function, index) if not more and dim == 0 and z.dim() > 1 else NotImplemented


def _unbind(z: Logits, function: Any, dim: int = 0) -> Any:
    if dim % z.dim() == z.dim() - 1:
        return NotImplemented
    items = tuple(z.select(dim, i) for i in range(z.shape[dim]))
    return iter(items) if function is Tensor.__iter__ else items


def _split(z: Logits, function: Any, size: Any, dim: int = 0) -> Any:
    if type(size) is not int or size < 1 or dim % z.dim() == z.dim() - 1:
        return NotImplemented
    size = -(-z.shape[dim] // size) if function in (torch.chunk, Tensor.chunk) else size
    return tuple(aten.slice.Tensor(z, dim, i, i + size) for i in range(0, z.shape[dim], max(size, 1)))


_T: Any = Tensor
for _handler, _functions in (
    (_cross_entropy, [F.cross_entropy, F.nll_loss]),
    (_of_rows("log_softmax"), [F.log_softmax, torch.log_softmax, Tensor.log_softmax]),
    (_of_rows("softmax"), [F.softmax, torch.softmax, Tensor.softmax]),
    (_exp, [torch.exp, Tensor.exp]),
    (_mul, [torch.mul, Tensor.mul, _T.__mul__]),
    (_gather, [torch.gather, Tensor.gather]),
    (_take_along_dim, [torch.take_along_dim]),
    (_logsumexp, [torch.logsumexp, Tensor.logsumexp]),
    (_sum, [torch.sum, Tensor.sum, torch.mean, Tensor.mean]),
    (_argmax, [torch.argmax, Tensor.argmax]),
    (_getitem, [_T.__getitem__]),
    (_index_select, [torch.index_select, Tensor.index_select]),
    (_unbind, [torch.unbind, Tensor.unbind, _T.__iter__]),
    (_split, [torch.split, _T.split, torch.chunk, Tensor.chunk]),
):
    HANDLERS.update(dict.fromkeys(_functions, _handler))
