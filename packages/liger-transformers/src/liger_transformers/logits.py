"""Logits that are a tensor and take memory only if somebody reads them.

A head returns `Logits`, a wrapper subclass of Tensor: shape, strides, dtype, grad_fn, hooks and version are PyTorch's own. They
stand for one aten call on other tensors. It runs at the first operation that has no rule here.

Forward: ``__torch_dispatch__``, beneath autograd, has a rule for each step that models do to logits, and gives other `Logits`. So
autograd records every step as it does with plain tensors. ``__torch_function__`` knows functions that an op computes from the
head's input and weight, which are in `answers`.

Backward: an answer's gradient of the logits are `Logits` too. They go back through autograd's own nodes and hooks, and rules note
each step. The head's node compares the note with the steps of the forward. If they are the same, nobody changed the gradient, and
the op's gradients of x and weight are right. Otherwise the gradient is made, which costs memory and is exact.
"""

# Functions of torch and their arguments are any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

aten: Any = torch.ops.aten


class Source:
    """The input, weight and bias of one call of a head."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, head: Any = None) -> None:
        inputs = (x, weight, bias)
        self.head, self.parameter, self.stepped = head, weight, False
        self.needs = tuple(t is not None and t.requires_grad for t in inputs)
        # Aliases share memory and version with the tensors. They keep the memory if somebody sets `.data` of a parameter.
        self.tensors = tuple(None if t is None else t.detach() for t in inputs)
        self.versions = tuple(None if t is None else t._version for t in inputs)
        sources.add(self)

    def get(self) -> tuple[Any, ...]:
        """x, weight and bias; RuntimeError if they have changed since the call."""
        for t, version, what in zip(self.tensors, self.versions, ("input", "weight", "bias"), strict=True):
            if t is None:
                continue
            freed = t.numel() > 0 and t.untyped_storage().size() == 0
            if freed and hasattr(self.head, "unshard"):
                self.head.unshard()  # FSDP2's head as its own unit: into the same memory; its backward shards it again
                freed = t.untyped_storage().size() == 0
            if t._version != version or (self.stepped and what != "input"):
                raise RuntimeError(
                    f"liger_transformers: the head's {what} was modified in place before its logits were used; use them "
                    "earlier, or pass skip_logits=False to the model to have a copy"
                )
            if freed:
                raise RuntimeError(
                    f"liger_transformers: FSDP has sharded the head's {what} again before its logits were used; lazy takes "
                    "a head that is an FSDP unit of its own, or reshard_after_forward=False on the unit that holds it"
                )
        return self.tensors


sources: weakref.WeakSet[Source] = weakref.WeakSet()


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Optimizers that write through `.data` count no version.
    for source in list(sources):
        if any(p is source.parameter for group in optimizer.param_groups for p in group["params"]):
            source.stepped = True


register_optimizer_step_pre_hook(_stepped)


class Term(NamedTuple):
    """scale · head(x) of one call. `rows`: functions of x that give the logits' rows. `steps`: steps of the forward, in order."""

    source: Source
    rows: tuple[Callable[[Tensor], Tensor], ...]
    scale: float
    steps: tuple[Any, ...]


class Form(NamedTuple):
    """factor · of(outer · tanh(Σ termᵢ)), or the same without tanh. `of` names a function of each row."""

    terms: tuple[Term, ...]
    outer: float | None = None
    of: str = "logits"
    factor: float = 1.0

    def after(self, step: Any, rows: Callable[[Tensor], Tensor] | None = None) -> Form:
        """The form behind one more step."""
        more = () if rows is None else (rows,)
        return self._replace(terms=tuple(t._replace(rows=t.rows + more, steps=(*t.steps, step)) for t in self.terms))

    def scaled(self, factor: float, step: Any) -> Form:
        new = self.after(step)
        if self.of != "logits":
            return new._replace(factor=self.factor * factor)
        if self.outer is not None:
            return new._replace(outer=self.outer * factor)
        return new._replace(terms=tuple(t._replace(scale=t.scale * factor) for t in new.terms))


class Note(NamedTuple):
    """The answers whose gradients a gradient sums, and the steps of each since."""

    parts: tuple[tuple[Any, tuple[Any, ...]], ...]

    def after(self, step: Any) -> Note:
        return Note(tuple((answer, (*steps, step)) for answer, steps in self.parts))


class State:
    """Logits without their place in autograd's graph, which later logits don't keep alive."""

    __slots__ = ("call", "computed", "device", "form", "key", "meta", "of", "picked", "writes")

    def __init__(self, meta: Tensor, device: torch.device, call: Any, form: Any, of: Any, key: Any) -> None:
        self.meta, self.device = meta, device
        self.call: tuple[Callable[..., Tensor], tuple[Any, ...], tuple[int | None, ...]] = call
        self.form: Form | Note | None = form
        self.of: State | None = of  # the state of what these are a view of
        self.key = object() if key is None else key  # the same for logits and their aliases
        self.computed: Tensor | None = None
        self.writes = 0  # in-place operations on the memory, counted where `of` is None
        self.picked: Any = None

    def root(self) -> State:
        return self if self.of is None else self.of.root()

    def waits(self) -> bool:
        """Whether nobody has read them, nor what they are a view of."""
        return self.computed is None and (self.of is None or self.of.waits())

    def tensor(self) -> Tensor:
        """The plain tensor, which is made once."""
        if self.computed is None:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self.computed = self.compute(current=True)
        return self.computed

    def compute(self, current: bool) -> Tensor:
        """The value that they had when their call was recorded; or, `current`, a view of what they are a view of."""
        function, args, writes = self.call
        plain: list[Any] = []
        for a, count in zip(args, writes, strict=True):
            if not isinstance(a, State):
                plain.append(a)
            elif current and (a is self.of or a.root().writes == count):
                plain.append(a.tensor())
            else:
                plain.append(a.compute(current=False))
        return function(*plain)


class Logits(Tensor):
    """Logits, or their gradient, that may not be made yet."""

    state: State

    @staticmethod
    def make(
        meta: Tensor, device: torch.device, function: Any, args: Any, form: Any, of: Any = None, key: Any = None
    ) -> Logits:
        """Logits with the layout of `meta` that are function(*args)."""
        new: Any = cast("Any", Tensor)._make_wrapper_subclass(
            Logits, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=device
        )
        states = tuple(a.state if isinstance(a, Logits) else a for a in args)
        writes = tuple(a.root().writes if isinstance(a, State) else None for a in states)
        new.state = State(meta, device, (function, states, writes), form, of, key)
        return new

    def then(
        self, function: Any, args: Any, form: Any, *, view: bool = False, key: Any = None, meta: Any = None
    ) -> Logits:
        """The logits function(self, *args)."""
        state = self.state
        meta = function(state.meta, *args) if meta is None else meta
        return Logits.make(meta, state.device, function, (self, *args), form, state if view else None, key)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        z: Any = args[0] if args else None
        options = dict(kwargs or {})
        rule = RULES.get(func)
        waits = rule is not None and isinstance(z, Logits) and z.state.form is not None and z.state.waits()
        if rule is not None and waits and (not options or _only_dtype(z, options)):
            result = rule(func, z, *args[1:], **options)
            if result is not None:
                return result
        return _run_plain(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, z = kwargs or {}, args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(z, Logits):
                handler = HANDLERS.get(func)
                if handler is not None and isinstance(z.state.form, Form) and z.state.waits():
                    result = handler(z, func, *args[1:], **kwargs)
                    if result is not NotImplemented:
                        return result
                if func in READS_MEMORY:
                    return func(*(Plain.apply(a) if isinstance(a, Logits) else a for a in args), **kwargs)
            return func(*args, **kwargs)


class Plain(torch.autograd.Function):
    """Logits as a plain tensor, in the same graph."""

    @staticmethod
    def forward(ctx: Any, z: Logits) -> Tensor:
        return z.state.tensor().view_as(z.state.tensor())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""By function of torch: handler(z, function, *args, **kwargs), or NotImplemented. `answers` fills it."""

_T: Any = Tensor
READS_MEMORY = {
    _T.__deepcopy__, _T.__reduce_ex__, _T.data_ptr, _T.untyped_storage, _T.storage, _T.numpy, _T.tolist, _T.__array__,
    _T.__dlpack__, _T.__repr__, _T.__format__, _T.share_memory_, _T.storage_type, _T.data.__get__,
}  # fmt: skip
"""Functions that don't go through PyTorch's dispatcher."""


def _only_dtype(z: Logits, options: dict[str, Any]) -> bool:
    """Whether options change nothing but the dtype. Those that change nothing are removed."""
    for name in ("layout", "device", "pin_memory", "non_blocking"):
        value = options.pop(name, None)
        same = value == torch.strided if name == "layout" else name == "device" and value == z.state.device
        if value and not same:
            return False
    return not options.keys() - {"dtype", "memory_format"}


def _run_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """func on plain tensors. Results in place are the arguments themselves, and views are wrapped: both share memory."""
    deferred: list[Logits] = []

    def plain(a: Any) -> Any:
        if not isinstance(a, Logits):
            return a
        deferred.append(a)
        return a.state.tensor()

    args, kwargs = tree_map(plain, (tuple(args), kwargs))
    out = func(*args, **kwargs)
    if func._schema.is_mutable:
        for a in deferred:
            a.state.root().writes += 1
        return tree_map(lambda t: next((a for a in deferred if a.state.computed is t), t), out)
    return tree_map(_wrapped, out) if func.is_view or func in (aten.detach.default, aten.alias.default) else out


def _wrapped(t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    new = Logits.make(meta, t.device, None, (), None)
    new.state.computed = t
    return new


# Rules: steps of logits or of their gradient that make neither. None: no rule for this call.


def _alias(func: Any, z: Logits) -> Any:
    return z.then(func, (), z.state.form, view=True, key=z.state.key, meta=z.state.meta)


def _clone(func: Any, z: Logits, memory_format: Any = None) -> Any:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    return z.then(lambda t: t.clone(memory_format=memory_format or torch.preserve_format), (), z.state.form)


def _view(func: Any, z: Logits, size: Any) -> Any:
    form, meta = z.state.form, func(z.state.meta, size)
    before, after = tuple(z.state.meta.shape), tuple(meta.shape)
    if before == after:  # a backward hook has such a view in forward alone, so it is no step
        return z.then(func, (size,), form, view=True, key=z.state.key, meta=meta)
    if after[-1:] != before[-1:]:
        return None
    if isinstance(form, Form):
        form = form.after(("view", before), lambda x: x.reshape(*after[:-1], x.shape[-1]))
    else:
        form = _noted(z, ("view", after))
    return z.then(func, (size,), form, view=True, meta=meta)


def _noted(z: Logits, step: Any) -> Note:
    return cast("Note", z.state.form).after(step)


def _slice(func: Any, z: Logits, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    shape, form, args = tuple(z.state.meta.shape), z.state.form, (dim, start, end, step)
    dim %= len(shape)
    bounds = slice(start, end, step).indices(shape[dim])
    if bounds == (0, shape[dim], 1):
        return z.then(func, args, form, view=True, key=z.state.key)
    if dim == len(shape) - 1 or not isinstance(form, Form):
        return None
    form = form.after(("slice", shape, dim, bounds), lambda x: aten.slice.Tensor(x, dim, start, end, step))
    return z.then(func, args, form, view=True)


def _slice_backward(func: Any, g: Logits, sizes: Any, dim: int, start: Any, end: Any, step: int) -> Any:
    if not isinstance(g.state.form, Note):
        return None
    sizes, dim = tuple(sizes), dim % len(sizes)
    bounds = slice(start, end, step).indices(sizes[dim])
    note = g.state.form if bounds == (0, sizes[dim], 1) else _noted(g, ("slice", sizes, dim, bounds))
    return g.then(func, (sizes, dim, start, end, step), note)


def _select(func: Any, z: Logits, dim: int, index: int) -> Any:
    shape, form = tuple(z.state.meta.shape), z.state.form
    dim %= len(shape)
    if dim == len(shape) - 1 or not isinstance(form, Form):
        return None
    form = form.after(("select", shape, dim, index % shape[dim]), lambda x: x.select(dim, index))
    return z.then(func, (dim, index), form, view=True)


def _select_backward(func: Any, g: Logits, sizes: Any, dim: int, index: int) -> Any:
    if not isinstance(g.state.form, Note):
        return None
    sizes, dim = tuple(sizes), dim % len(sizes)
    return g.then(func, (sizes, dim, index), _noted(g, ("select", sizes, dim, index % sizes[dim])))


def _to(func: Any, z: Logits, dtype: Any = None, memory_format: Any = None) -> Any:
    if memory_format not in (None, torch.preserve_format) or dtype is None:
        return None
    before, form = z.state.meta.dtype, z.state.form
    if isinstance(form, Note):
        form = form.after(("to", dtype))
    elif isinstance(form, Form) and dtype == torch.float32 and before.itemsize == 2:
        # Losses are computed in float32 whatever the logits' dtype, so an earlier cast changes nothing but rounding.
        form = form.after(("to", before))
    else:
        return None
    return z.then(lambda t: func(t, dtype=dtype), (), form)


def _elementwise(z: Logits) -> Tensor | None:
    """The layout of an elementwise result, if it is that of z."""
    return z.state.meta if z.state.meta.is_contiguous() and not z.state.meta.storage_offset() else None


def _times(func: Any, z: Logits, other: Any) -> Any:
    if not isinstance(other, (int, float)) or not math.isfinite(other) or other == 0:
        return None
    step, form = (func, other), z.state.form
    factor = other if func is aten.mul.Tensor else 1.0 / other
    form = form.scaled(factor, step) if isinstance(form, Form) else _noted(z, step)
    return z.then(func, (other,), form, meta=_elementwise(z))


def _neg(func: Any, z: Logits) -> Any:
    form = z.state.form
    form = form.scaled(-1.0, "neg") if isinstance(form, Form) else _noted(z, "neg")
    return z.then(func, (), form, meta=_elementwise(z))


def _tanh(func: Any, z: Logits) -> Any:
    form, key = z.state.form, object()
    if not isinstance(form, Form) or form.outer is not None or form.of != "logits":
        return None
    return z.then(func, (), form.after(("tanh", key))._replace(outer=1.0), key=key, meta=_elementwise(z))


def _tanh_backward(func: Any, g: Logits, result: Any) -> Any:
    if not (isinstance(g.state.form, Note) and isinstance(result, Logits)):
        return None
    return g.then(func, (result,), _noted(g, ("tanh", result.state.key)), meta=g.state.meta)


def _add(func: Any, z: Logits, other: Any, alpha: Any = 1) -> Any:
    """Two heads' logits, as of LoRA on the head; or two gradients of the same logits."""
    if alpha != 1 or not isinstance(other, Logits) or not other.state.waits():
        return None
    a, b, layout, second = z.state.form, other.state.form, z.state.meta, other.state.meta
    if layout.shape != second.shape or layout.dtype != second.dtype:
        return None
    if isinstance(a, Note) and isinstance(b, Note):
        return z.then(func, (other,), Note((*a.parts, *b.parts)), meta=layout)
    if not (isinstance(a, Form) and isinstance(b, Form)) or any(
        f.outer is not None or f.of != "logits" for f in (a, b)
    ):
        return None
    terms = (*a.terms, *b.terms)
    if len({id(t.source) for t in terms}) != len(terms):  # each source has one gradient to fetch
        return None
    meta = _elementwise(z) if _elementwise(other) is not None else None
    return z.then(func, (other,), Form(terms), meta=func(layout, second) if meta is None else meta)


RULES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias, aten.alias.default: _alias, aten.clone.default: _clone, aten.view.default: _view,
    aten._unsafe_view.default: _view, aten.slice.Tensor: _slice, aten.slice_backward.default: _slice_backward,
    aten.select.int: _select, aten.select_backward.default: _select_backward, aten._to_copy.default: _to,
    aten.mul.Tensor: _times, aten.div.Tensor: _times, aten.neg.default: _neg, aten.tanh.default: _tanh,
    aten.tanh_backward.default: _tanh_backward, aten.add.Tensor: _add,
}  # fmt: skip
