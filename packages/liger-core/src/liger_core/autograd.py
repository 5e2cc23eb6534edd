"""The one autograd wiring of every kernel, in every language, eager and traced."""

from __future__ import annotations

from collections.abc import Sequence
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


def differentiable(op: Declaration[..., Any], kernel: ModuleType, language: str) -> Run:
    """A function of an op's checked arguments that runs `kernel`, and records it when a gradient is wanted."""
    tensors = op.tensors
    takes_gradient = tuple(name in op.differentiable for name in tensors)
    all_take_gradient = all(takes_gradient)
    has_gradient = None if op.result is None else op.has_gradient
    nothing = (False,) * len(op.differentiable)
    runs_reference = "liger_core.use('torch') runs the reference, which"
    no_double = f"{op.name} in {language} has no second derivative; {runs_reference} has"
    no_batch = (
        f"{op.name} in {language} takes one incoming gradient and not a batch of them, as is_grads_batched=True and "
        f"vectorize=True give; {runs_reference} takes it"
    )

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *given: Tensor | None) -> Any:
            needs, arguments, options, parts = call
            traced = arguments is None
            if arguments is None:
                options = dict(zip(op.options, options, strict=True))
                arguments = dict(zip(tensors, given, strict=True)) | options
            result, saved = kernel.forward(needs, **arguments)
            once = strides = None
            if saved and type(saved[-1]) is SavedOnce:
                *saved, once = saved
            if not traced and (hooks := _top_saved_tensors_default_hooks(True)) is not None:
                lean_hooks = recompute.lean_hooks_of(hooks)
                if lean_hooks is None or lean_hooks.outer is not None:
                    strides = _strides(saved)
                    if once is not None:
                        once.take()  # activation checkpointing, or another hook that keeps no tensors: backward makes them anew
            ctx.call = needs, options, once, strides, parts
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            if parts is not None:
                result = parts.whole(result)
            if torch_state.compiling():
                # Of a tensor that was changed in place, or converted to its own dtype, torch 2.11 drops the gradient.
                if isinstance(result, tuple):
                    return tuple(_absent(given[0]) if r is None else r.view_as(r) for r in result)
                return result.view_as(result)
            if isinstance(result, tuple):
                kept = None if has_gradient is None else has_gradient(options)
                if kept is not None:
                    ctx.mark_non_differentiable(
                        *[r for r, keeps in zip(result, kept, strict=True) if not keeps and r is not None]
                    )
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs, options, once, strides, parts = ctx.call
            if parts is not None:
                grads = parts.flowing(grads)
            kept = None if has_gradient is None else has_gradient(options)
            if kept is not None:
                grads = tuple(g for g, keeps in zip(grads, kept) if keeps)  # noqa: B905  a bare tensor is the first result
            traced = torch_state.compiling()
            if traced:  # zeros come for what stands for a result that is None
                grads = tuple([None if g is None or _is_absent(g) else g for g in grads])
            device = None
            for grad in grads:
                if grad is not None:
                    device = grad.device.type
                    if not traced and (grad.is_neg() or not _has_storage(grad)):
                        if torch_state.is_batched(grad):
                            raise RuntimeError(no_batch)
                        grads = tuple([g if g is None else torch_state.resolved(g) for g in grads])
            if device is None:  # nothing flows into any result
                return (None,) * (1 + len(tensors))
            own = ctx.saved_tensors  # read once: checkpointing gives them no second time
            if strides is not None:
                own = tuple([t if t is None else recompute.laid_out(t, s) for t, s in zip(own, strides, strict=True)])
            saved = own if once is None else (*own, once)
            if traced:
                found = kernel.backward(needs, saved, *grads, **options)
            else:
                if not torch_state.plain() and (why := torch_state.recording()) is not None:
                    raise RuntimeError(f"backward of {op.name} in {language}: {why}; {runs_reference} can be recorded")
                again = torch.is_grad_enabled()
                if _is_any_autocast_enabled():  # forward ran without, too
                    with torch.no_grad(), torch.autocast(device, enabled=False):
                        found = kernel.backward(needs, saved, *grads, **options)
                elif again:
                    with torch.no_grad():
                        found = kernel.backward(needs, saved, *grads, **options)
                else:
                    found = kernel.backward(needs, saved, *grads, **options)
                if again:
                    found = without_second_derivatives(no_double, found, (*own, *grads))
            if parts is not None:
                found = parts.gradients(found)
            if all_take_gradient:
                return None, *found
            gradients = iter(found)
            return None, *[next(gradients) if takes else None for takes in takes_gradient]

    class SaveNode(Node):
        """Keeps what backward takes before forward runs, of which `RunNode` is the node.

        Autograd packs what a Function saves after its forward. But checkpointing stops to run a region again where the last
        tensor is packed that was, and so a forward whose arguments are all that is kept needn't run again.
        """

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

    # Profiles, `grad_fn` and anomaly reports show a node by its class.
    def name(node: Any) -> Any:
        return type(node)(f"{op.name}[{language}]", (node,), {})

    def raw(self: Any) -> Any:
        """The saved tensors, for hooks on single ones: these are registered after forward, whatever was active then."""
        needs, options, once, strides, parts = self.call
        if strides is None:
            self.call = needs, options, once, _strides(self.saved_tensors), parts
        own: Any = super(type(self), self)
        return own._raw_saved_tensors

    named, keeping, running = map(name, (Node, SaveNode, RunNode))
    named._backward_cls._raw_saved_tensors = property(raw)
    saves_early = getattr(kernel, "saves_early", None)

    # named.apply, but for 1.8 of its 6.7 µs: it asks whether a torch.func transform is active, as `Op.call` has done.
    apply = super(torch.autograd.Function, named).apply  # pyright: ignore[reportAttributeAccessIssue]

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
            given = _each_once(parts.given) if torch_state.compiling() else parts.given
            result = apply((needs, arguments, options, parts), *given)
        elif torch_state.compiling():
            given = _each_once([arguments[name] for name in tensors])
            call = needs, None, tuple(options.values()), None
            if op.recompute is not None and recompute.state.lean:
                from torch.utils.checkpoint import checkpoint

                result = checkpoint(named.apply, call, *given, use_reentrant=False, context_fn=recompute.recomputing)
            else:
                result = named.apply(call, *given)
            if isinstance(result, tuple):
                kept = (has_gradient and has_gradient(options)) or (True,) * len(result)
                result = tuple(
                    None if _is_absent(r) else r if keeps else r.detach() for r, keeps in zip(result, kept, strict=True)
                )
        elif saves_early is not None and recompute.checkpointed():
            result = keeping.apply((needs, options, saves_early(**arguments)), *[arguments[name] for name in tensors])
            result = running.apply(arguments, result)
        else:
            result = apply((needs, arguments, options, None), *[arguments[name] for name in tensors])
            if op.recompute is not None and (lean_hooks := recompute.active()) is not None:
                given = {name: arguments[name] for name in tensors}
                lean_hooks.remember(op.recompute, given, options, result, forward)
        if op.result is not None and isinstance(result, tuple):
            return op.result(*result)
        return result

    return run


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
