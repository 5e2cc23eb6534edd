"""The one autograd wiring of every kernel, in every language, eager and traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C import _has_storage, _is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks

from liger_core import recompute, torch_state
from liger_core.declaration import Arguments, Declaration, Needs

Saved = tuple[Any, ...]
"""What a kernel's forward keeps for its backward: tensors, or None, and last it may be a `SavedOnce`. Empty when nothing
needs a gradient."""


class Parts(Protocol):
    """A call on the plain parts of tensors that are not plain: autograd records it for those tensors.

    Attributes:
        given: the op's tensor arguments as autograd sees them.
        needs: which differentiable ones of them require a gradient.
        known: stands for the demand, `needs`, the options and their types, in what is remembered: equal only if these are.
    """

    @property
    def known(self) -> object:
        """See above."""
        ...

    @property
    def given(self) -> Sequence[Tensor | None]:
        """See above."""
        ...

    @property
    def needs(self) -> Needs:
        """See above."""
        ...

    def whole(self, result: Any) -> Any:
        """A kernel's result, a tensor or a tuple of them and None, as what is returned."""
        ...

    def flowing(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The plain parts of the results' gradients."""
        ...

    def gradients(self, found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """A kernel's gradients, one per differentiable argument, as those of `given`."""
        ...


class Run(Protocol):
    """Runs a kernel: the arguments, which differentiable ones require a gradient, the options, and what they are parts of."""

    def __call__(
        self, arguments: Arguments, needs: Needs, options: dict[str, Any], parts: Parts | None = None, /
    ) -> Any:
        """Returns the op's result."""
        ...


class SavedEarly(NamedTuple):
    """What a kernel's `saves_early` returns.

    Attributes:
        saved: what forward would keep for backward, of the arguments alone.
        shape: the result's.
    """

    saved: Saved
    shape: tuple[int, ...]


class SavedOnce:
    """Tensors that forward made and that backward may overwrite and return, as it may not with saved ones.

    Only the first backward gets them. Another one, of a graph that is retained, makes them anew. A kernel doesn't use
    it while torch.compile traces.
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors: tuple[Tensor | None, ...] | None = tensors

    def take(self) -> tuple[Tensor | None, ...] | None:
        """The tensors, or None when a backward has taken them."""
        tensors, self._tensors = self._tensors, None
        return tensors


@dataclass(frozen=True)
class Wiring:
    """One kernel of an op, and what its nodes ask of the op.

    Attributes:
        op: the op.
        kernel: the module with `forward` and `backward`, and maybe `saves_early`.
        name: of its nodes, which profiles, `grad_fn` and anomaly reports show.
        nothing: the `needs` of a call without gradients.
        takes_gradient: which tensor arguments can get a gradient.
        has_gradient: says of the options which results have a gradient; None if all have.
        no_second_derivative: the error of a backward through a backward.
        no_batch: the error of a batch of incoming gradients.
        not_recorded: the error of a backward that something records, with a place for what.
    """

    op: Declaration[..., Any]
    kernel: ModuleType
    name: str
    nothing: Needs
    takes_gradient: tuple[bool, ...]
    has_gradient: Callable[[Mapping[str, Any]], tuple[bool, ...] | None] | None
    no_second_derivative: str
    no_batch: str
    not_recorded: str

    @staticmethod
    def of(op: Declaration[..., Any], kernel: ModuleType, language: str) -> Wiring:
        """The wiring of an op's kernel in a language."""
        subject, otherwise = f"{op.name} in {language}", "liger_core.use('torch') runs the reference, which"
        return Wiring(
            op,
            kernel,
            name=f"{op.name}[{language}]",
            nothing=(False,) * len(op.differentiable),
            takes_gradient=tuple(name in op.differentiable for name in op.tensors),
            has_gradient=None if op.result is None else op.has_gradient,
            no_second_derivative=f"{subject} has no second derivative; {otherwise} has",
            no_batch=(
                f"{subject} takes one incoming gradient and not a batch of them, as is_grads_batched=True and "
                f"vectorize=True give; {otherwise} takes it"
            ),
            not_recorded=f"backward of {subject}: {{}}; {otherwise} can be recorded",
        )

    def flowing(self, grads: tuple[Tensor | None, ...], options: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
        """The gradients of those results that have one."""
        kept = None if self.has_gradient is None else self.has_gradient(options)
        if kept is None:
            return grads
        return tuple([g for g, keeps in zip(grads, kept) if keeps])  # noqa: B905  a bare tensor is the first result

    def of_every_tensor(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradient of each tensor argument, from those of the differentiable ones."""
        rest = iter(grads)
        return tuple([next(rest) if takes else None for takes in self.takes_gradient])

    def backward(
        self, needs: Needs, saved: Saved, grads: tuple[Tensor | None, ...], options: dict[str, Any], device: str
    ) -> Sequence[Tensor | None]:
        """Run the kernel's backward where gradients, autocast or a tracer are active: nothing in it is recorded or cast."""
        if not torch_state.plain() and (why := torch_state.recording()) is not None:
            raise RuntimeError(self.not_recorded.format(why))
        again = torch.is_grad_enabled()
        # Forward ran without autocast, too.
        with torch.no_grad(), torch.autocast(device, enabled=False) if _is_any_autocast_enabled() else nullcontext():
            found = self.kernel.backward(needs, saved, *grads, **options)
        if not again:
            return found
        sources = [tensor for tensor in (*saved, *grads) if isinstance(tensor, Tensor)]
        return without_second_derivatives(self.no_second_derivative, found, sources)


def differentiable(op: Declaration[..., Any], kernel: ModuleType, language: str) -> Run:
    """A function of an op's checked arguments that runs `kernel`, and records it when a gradient is wanted."""
    wiring = Wiring.of(op, kernel, language)
    tensors, nothing = op.tensors, wiring.nothing
    node = eager_node(wiring)
    run_traced, run_early = traced_run(wiring), early_run(wiring, node)
    saves_early = getattr(kernel, "saves_early", None)

    # node.apply, but for 1.8 of its 6.7 µs: it asks whether a torch.func transform is active, as `Op.call` has done.
    apply = super(torch.autograd.Function, node).apply  # pyright: ignore[reportAttributeAccessIssue]

    def forward(**arguments: Any) -> Any:
        return kernel.forward(nothing, **arguments)[0]

    def run(arguments: Arguments, needs: Needs, options: dict[str, Any], parts: Parts | None = None, /) -> Any:
        result: Any
        if needs == nothing:
            if torch.is_grad_enabled():
                # A teacher's logits may require a gradient that this op doesn't give.
                with torch.no_grad():
                    result = kernel.forward(nothing, **arguments)[0]
            else:
                result = kernel.forward(nothing, **arguments)[0]
            if parts is not None:
                result = parts.whole(result)
        elif parts is not None:
            result = apply((needs, arguments, options, parts), *parts.given)
        elif torch_state.compiling():
            result = run_traced(arguments, needs, options)
        elif saves_early is not None and recompute.checkpointed():
            result = run_early(arguments, needs, options, saves_early(**arguments))
        else:
            result = apply((needs, arguments, options, None), *[arguments[name] for name in tensors])
            if op.recompute is not None and (lean_hooks := recompute.active()) is not None:
                given = {name: arguments[name] for name in tensors}
                lean_hooks.remember(op.recompute, given, options, result, forward)
        if op.result is not None and isinstance(result, tuple):
            return op.result(*result)
        return result

    return run


def eager_node(wiring: Wiring) -> Any:
    """The autograd node that a call in eager mode records."""
    kernel, has_gradient = wiring.kernel, wiring.has_gradient
    all_take_gradient = all(wiring.takes_gradient)

    class EagerNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *given: Tensor | None) -> Any:
            needs, arguments, options, parts = call
            result, saved = kernel.forward(needs, **arguments)
            once = strides = None
            if saved and type(saved[-1]) is SavedOnce:
                *saved, once = saved
            if (hooks := _top_saved_tensors_default_hooks(True)) is not None:
                strides = _saved_under(hooks, saved, once)
            ctx.call = needs, options, once, strides, parts
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            if parts is not None:
                result = parts.whole(result)
            if isinstance(result, tuple):
                differentiable = None if has_gradient is None else has_gradient(options)
                if differentiable is not None:
                    pairs = zip(result, differentiable, strict=True)
                    ctx.mark_non_differentiable(*[r for r, yes in pairs if not yes and r is not None])
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs, options, once, strides, parts = ctx.call
            if parts is not None:
                grads = parts.flowing(grads)
            if has_gradient is not None:
                grads = wiring.flowing(grads, options)
            traced = torch_state.compiling()  # by compiled autograd
            device = None
            for grad in grads:
                if grad is not None:
                    device = grad.device.type
                    if not traced and (grad.is_neg() or not _has_storage(grad)):
                        grads = _with_memory(grads, grad, wiring.no_batch)
            if device is None:  # nothing flows into any result
                return (None,) * (1 + len(wiring.takes_gradient))
            saved = ctx.saved_tensors  # read once: checkpointing gives them no second time
            if strides is not None:
                saved = tuple(
                    [t if t is None else recompute.laid_out(t, s) for t, s in zip(saved, strides, strict=True)]
                )
            if once is not None:
                saved = (*saved, once)
            if traced or (torch_state.plain() and not torch.is_grad_enabled() and not _is_any_autocast_enabled()):
                found = kernel.backward(needs, saved, *grads, **options)
            else:
                found = wiring.backward(needs, saved, grads, options, device)
            if parts is not None:
                found = parts.gradients(found)
            return (None, *found) if all_take_gradient else (None, *wiring.of_every_tensor(found))

    node = _named(wiring, EagerNode)
    node._backward_cls._raw_saved_tensors = property(_raw_saved_tensors)
    return node


def _raw_saved_tensors(node: Any) -> Any:
    """The saved tensors, for hooks on single ones: these are registered after forward, whatever was active then."""
    needs, options, once, strides, parts = node.call
    if strides is None:
        node.call = needs, options, once, _strides(node.saved_tensors), parts
    own: Any = super(type(node), node)
    return own._raw_saved_tensors


def _saved_under(
    hooks: recompute.Hooks, saved: Sequence[Tensor | None], once: SavedOnce | None
) -> list[tuple[int, ...]] | None:
    """The strides of what is saved, if hooks may change them. Those that keep no tensors leave nothing in `once`."""
    lean_hooks = recompute.lean_hooks_of(hooks)
    if lean_hooks is not None and lean_hooks.outer is None:
        return None
    if once is not None:
        once.take()  # activation checkpointing, or another hook that keeps no tensors: backward makes them anew
    return _strides(saved)


def _with_memory(grads: tuple[Tensor | None, ...], grad: Tensor, no_batch: str) -> tuple[Tensor | None, ...]:
    """Incoming gradients without negative and conjugate views. `grad`, one of them, must not stand for a batch."""
    if torch_state.is_batched(grad):
        raise RuntimeError(no_batch)
    return tuple([g if g is None else torch_state.resolved(g) for g in grads])


def early_run(wiring: Wiring, node: Any) -> Callable[[Arguments, Needs, dict[str, Any], SavedEarly], Any]:
    """Runs a kernel whose arguments are all that backward keeps, in activation checkpointing.

    Autograd packs what a Function saves after its forward. But checkpointing stops to run a region again where the last tensor is
    packed that was. So one node keeps the tensors before forward runs, of which the other is the node: such a forward needn't run
    again.
    """
    kernel, nothing = wiring.kernel, wiring.nothing

    class SaveNode(node):
        """Keeps what backward takes. Its backward is the eager node's."""

        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *given: Tensor | None) -> Any:
            needs, options, early = call
            ctx.call = needs, options, None, _strides(early.saved), None
            ctx.save_for_backward(*early.saved)
            ctx.set_materialize_grads(False)
            first = given[0]
            assert first is not None
            return torch.empty((), dtype=first.dtype, device=first.device).expand(early.shape)

    class RunNode(torch.autograd.Function):
        """Runs the forward. The gradient of what it returns goes to `SaveNode`, whose result has no memory."""

        @staticmethod
        def forward(ctx: Any, arguments: Arguments, keeping: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            return kernel.forward(nothing, **arguments)[0]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, *grads

    keeping, running = _named(wiring, SaveNode), _named(wiring, RunNode)

    def run(arguments: Arguments, needs: Needs, options: dict[str, Any], early: SavedEarly) -> Any:
        tensors = [arguments[name] for name in wiring.op.tensors]
        return running.apply(arguments, keeping.apply((needs, options, early), *tensors))

    return run


def traced_run(wiring: Wiring) -> Callable[[Arguments, Needs, dict[str, Any]], Any]:
    """Runs a kernel while Dynamo traces: its launches and its node are part of the graph."""
    op, kernel, has_gradient = wiring.op, wiring.kernel, wiring.has_gradient

    class TracedNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *given: Tensor | None) -> Any:
            needs, values = call
            options = dict(zip(op.options, values, strict=True))
            result, saved = kernel.forward(needs, **dict(zip(op.tensors, given, strict=True)), **options)
            ctx.call = needs, options
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            # Of a tensor that was changed in place, or converted to its own dtype, torch 2.11 drops the gradient.
            if isinstance(result, tuple):
                return tuple(_absent(given[0]) if r is None else r.view_as(r) for r in result)
            return result.view_as(result)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs, options = ctx.call
            # Zeros come for what stands for a result that is None.
            grads = tuple([None if g is None or _is_absent(g) else g for g in wiring.flowing(grads, options)])
            if all(grad is None for grad in grads):
                return (None,) * (1 + len(wiring.takes_gradient))
            found = kernel.backward(needs, ctx.saved_tensors, *grads, **options)
            return None, *wiring.of_every_tensor(found)

    node = _named(wiring, TracedNode)

    def run(arguments: Arguments, needs: Needs, options: dict[str, Any]) -> Any:
        given = _each_once([arguments[name] for name in op.tensors])
        call = needs, tuple(options.values())
        if op.recompute is not None and recompute.state.lean:
            from torch.utils.checkpoint import checkpoint

            result = checkpoint(node.apply, call, *given, use_reentrant=False, context_fn=recompute.recomputing)
        else:
            result = node.apply(call, *given)
        if not isinstance(result, tuple):
            return result
        kept = (has_gradient and has_gradient(options)) or (True,) * len(result)
        return tuple(
            None if _is_absent(r) else r if keeps else r.detach() for r, keeps in zip(result, kept, strict=True)
        )

    return run


def _named(wiring: Wiring, node: Any) -> Any:
    return type(node)(wiring.name, (node,), {})


def without_second_derivatives(
    message: str, found: Sequence[Tensor | None], used: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients that a backward found, as what can't be differentiated: that raises a RuntimeError with the message.

    Args:
        message: what the error says.
        found: the gradients.
        used: the tensors that they were computed from.
    """
    sources = [t for t in used if t is not None and t.requires_grad] or [torch.empty(0, requires_grad=True)]
    return tuple(g if g is None else _NoSecondDerivative.apply(message, g, *sources) for g in found)


# A traced Function that gets one tensor twice has wrong gradients in torch 2.11, and is refused by 2.13.
def _each_once(given: Sequence[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for tensor in given:
        if tensor is None or all(tensor is not other for other in found):
            found.append(tensor)
        else:
            found.append(tensor.view_as(tensor))
    return found


def _strides(saved: Sequence[Tensor | None]) -> list[tuple[int, ...]]:
    return [() if tensor is None else tensor.stride() for tensor in saved]


# Dynamo (torch 2.13) traces neither a None among a Function's results nor marks of some of them as non-differentiable.
# So a traced Function returns all of them as tensors; a bool, which is no op's result, stands for None.
def _absent(beside: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.bool, device=None if beside is None else beside.device)


def _is_absent(result: Tensor) -> bool:
    return result.dtype is torch.bool


class _NoSecondDerivative(torch.autograd.Function):
    """The identity of a gradient, whose backward says that a kernel can't be differentiated twice.

    The `sources` are what the gradient was computed from: through them it hangs on the op's inputs.
    """

    @staticmethod
    def forward(ctx: Any, message: str, grad: Tensor, *sources: Tensor) -> Tensor:
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)
