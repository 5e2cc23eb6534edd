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
from liger_core.replay import may_record, record

Saved = tuple[Any, ...]
"""Tensors and None that a kernel's forward saves for its backward; the last entry may be a `SavedOnce`. Empty if nothing needs a
gradient."""


class Parts(Protocol):
    """A call that runs on the plain parts of tensors that are not plain. Autograd records it for those tensors.

    Attributes:
        tensors: the op's tensor arguments as autograd sees them.
        needs: which differentiable arguments require a gradient.
        key: the call's part of the key that an op remembers it by. Equal only if the demand, `needs`, the options and their types
            are.
    """

    @property
    def key(self) -> object:
        """See above."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """See above."""
        ...

    @property
    def needs(self) -> Needs:
        """See above."""
        ...

    def wrap_results(self, result: Any) -> Any:
        """The op's result, from the kernel's: a tensor, or a tuple of tensors and None."""
        ...

    def unwrap_gradients(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The plain parts of the results' gradients."""
        ...

    def wrap_gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of `tensors`, from the kernel's: one per differentiable argument."""
        ...


class Run(Protocol):
    """A function that runs a kernel. It gets the arguments, `needs`, the options, the `Parts` if the arguments are parts, and the
    `HostCode` of calls with this metadata if it is remembered.
    """

    def __call__(
        self,
        arguments: Arguments,
        needs: Needs,
        options: dict[str, Any],
        parts: Parts | None = None,
        host_code: HostCode | None = None,
        /,
    ) -> Any:
        """Returns the op's result."""
        ...


class SavedEarly(NamedTuple):
    """Returned by a kernel's `saves_early`.

    Attributes:
        saved: the arguments that backward needs. They take the place of the tensors that forward saves.
        shape: the result's.
    """

    saved: Saved
    shape: tuple[int, ...]


class SavedOnce:
    """Tensors from forward that backward may overwrite and return. Backward may not do that with saved tensors.

    Only the first backward gets them. A second backward through a retained graph computes them again. A kernel doesn't use
    `SavedOnce` while torch.compile traces.
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors: tuple[Tensor | None, ...] | None = tensors

    def take(self) -> tuple[Tensor | None, ...] | None:
        """The tensors, or None when a backward has taken them."""
        tensors, self._tensors = self._tensors, None
        return tensors


REPLAY_AFTER = 8
"""Calls of a remembered metadata that run the kernel's host code before one is recorded, which takes longer."""


class HostCode:
    """A kernel's `forward` and `backward` for calls of one metadata: run, then recorded once, then replayed.

    Args:
        kernel: the module.
        pick_tensors: takes the op's tensors out of its arguments.
    """

    __slots__ = ("_calls", "_kernel", "_pick_tensors", "_replay_backward", "_replay_forward")

    def __init__(self, kernel: ModuleType, pick_tensors: Callable[[Arguments], tuple[Any, ...]]) -> None:
        self._kernel, self._pick_tensors, self._calls = kernel, pick_tensors, 0
        self._replay_forward: Callable[..., Any] | None = None
        self._replay_backward: Callable[..., Any] | None = None

    def forward(self, needs: Needs, arguments: Arguments) -> tuple[Any, Saved, HostCode | None]:
        """The result, what is saved, and self if it was replayed: then backward gets tensors with the metadata of each time."""
        replay = self._replay_forward
        if replay is not None:
            returned = replay(*self._pick_tensors(arguments))
            if returned is None:
                return *self._kernel.forward(needs, **arguments), None
            result, saved, once = returned
            return result, saved if once is None else (*saved, SavedOnce(*once)), self
        self._calls += 1
        if self._calls <= REPLAY_AFTER or not may_record():
            return *self._kernel.forward(needs, **arguments), None

        def host_code() -> Any:
            once = None
            result, saved = self._kernel.forward(needs, **arguments)
            if saved and type(saved[-1]) is SavedOnce:
                *saved, once = saved
            return result, tuple(saved), None if once is None else once.take()

        (result, saved, tensors), replay, _ = record(host_code, self._pick_tensors(arguments))
        self._replay_forward = replay or _never
        return result, saved if tensors is None else (*saved, SavedOnce(*tensors)), None

    def backward(
        self, needs: Needs, saved: Saved, grads: Sequence[Tensor | None], options: dict[str, Any]
    ) -> Sequence[Tensor | None]:
        """The gradients, after a forward that was replayed."""
        tensors = saved
        if saved and type(saved[-1]) is SavedOnce:
            taken = saved[-1].take()
            if taken is None:
                return self._kernel.backward(needs, saved, *grads, **options)
            tensors = *saved[:-1], *taken
            saved = *saved[:-1], SavedOnce(*taken)
        tensors = *tensors, *grads
        replay = self._replay_backward
        if replay is None and may_record():
            gradients, replay, _ = record(lambda: self._kernel.backward(needs, saved, *grads, **options), tensors)
            self._replay_backward = replay or _never
            return gradients
        gradients = None if replay is None else replay(*tensors)
        return self._kernel.backward(needs, saved, *grads, **options) if gradients is None else gradients


_as_it_is = nullcontext()


def _never(*inputs: Tensor | None) -> None:
    """The replay of what can't be replayed."""


@dataclass(frozen=True)
class Wiring:
    """A kernel of an op, with the facts about the op that its autograd nodes use.

    Attributes:
        op: the op.
        kernel: the module with `forward` and `backward`, and maybe `saves_early`.
        name: the name of the nodes. Profiles, `grad_fn` and anomaly reports show it.
        nothing: the `needs` of a call without gradients.
        takes_gradient: which tensor arguments can get a gradient.
        has_gradient: a function of the options that returns which results have a gradient; None if all have.
        no_second_derivative: the error of a backward through a backward.
        no_batch: the error of a batch of incoming gradients.
        not_recorded: the error of a backward that something records; the braces are for the reason.
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

    def select_gradients(
        self, grads: tuple[Tensor | None, ...], options: Mapping[str, Any]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the results that have one."""
        flags = None if self.has_gradient is None else self.has_gradient(options)
        if flags is None:
            return grads
        return tuple([g for g, flag in zip(grads, flags) if flag])  # noqa: B905  a bare tensor is the first result

    def gradient_per_tensor(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """A gradient or None per tensor argument, from the gradients of the differentiable ones."""
        rest = iter(grads)
        return tuple([next(rest) if takes else None for takes in self.takes_gradient])

    def backward(
        self, needs: Needs, saved: Saved, grads: tuple[Tensor | None, ...], options: dict[str, Any], device: str
    ) -> Sequence[Tensor | None]:
        """Run the kernel's backward if gradients, autocast or a tracer are active. Nothing in it is recorded or cast."""
        if not torch_state.plain() and (reason := torch_state.recording()) is not None:
            raise RuntimeError(self.not_recorded.format(reason))
        create_graph = torch.is_grad_enabled()
        # Forward ran without autocast as well.
        with torch.no_grad(), torch.autocast(device, enabled=False) if _is_any_autocast_enabled() else nullcontext():
            gradients = self.kernel.backward(needs, saved, *grads, **options)
        if not create_graph:
            return gradients
        sources = [tensor for tensor in (*saved, *grads) if isinstance(tensor, Tensor)]
        return without_second_derivatives(self.no_second_derivative, gradients, sources)


def differentiable(op: Declaration[..., Any], kernel: ModuleType, language: str) -> Run:
    """A function of an op's checked arguments that runs `kernel`, and records it if a gradient is needed."""
    wiring = Wiring.of(op, kernel, language)
    tensors, nothing = op.tensors, wiring.nothing
    node = eager_node(wiring)
    run_traced, run_early = traced_run(wiring), early_run(wiring, node)
    saves_early = getattr(kernel, "saves_early", None)

    # node.apply without 1.8 of its 6.7 µs: it checks whether a torch.func transform is active, as `Op.call` has done.
    apply = super(torch.autograd.Function, node).apply  # pyright: ignore[reportAttributeAccessIssue]

    def forward(**arguments: Any) -> Any:
        return kernel.forward(nothing, **arguments)[0]

    def run(
        arguments: Arguments,
        needs: Needs,
        options: dict[str, Any],
        parts: Parts | None = None,
        host_code: HostCode | None = None,
        /,
    ) -> Any:
        result: Any
        if needs == nothing:
            # A teacher's logits may require a gradient that this op doesn't give.
            with torch.no_grad() if torch.is_grad_enabled() else _as_it_is:
                if host_code is None:
                    result = kernel.forward(nothing, **arguments)[0]
                else:
                    result = host_code.forward(nothing, arguments)[0]
            if parts is not None:
                result = parts.wrap_results(result)
        elif parts is not None:
            result = apply((needs, arguments, options, parts, None), *parts.tensors)
        elif torch_state.compiling():
            result = run_traced(arguments, needs, options)
        elif saves_early is not None and recompute.checkpointed():
            result = run_early(arguments, needs, options, saves_early(**arguments))
        else:
            result = apply((needs, arguments, options, None, host_code), *[arguments[name] for name in tensors])
            if op.recompute is not None and (lean_hooks := recompute.active()) is not None:
                inputs = {name: arguments[name] for name in tensors}
                lean_hooks.remember(op.recompute, inputs, options, result, forward)
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
        def forward(ctx: Any, call: tuple[Any, ...], *tensors: Tensor | None) -> Any:
            needs, arguments, options, parts, host_code = call
            if host_code is None:
                result, saved = kernel.forward(needs, **arguments)
            else:
                result, saved, host_code = host_code.forward(needs, arguments)
            once = strides = None
            if saved and type(saved[-1]) is SavedOnce:
                *saved, once = saved
            if (hooks := _top_saved_tensors_default_hooks(True)) is not None:
                strides = _saved_under(hooks, saved, once)
            ctx.call = needs, options, once, strides, parts, host_code
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            if parts is not None:
                result = parts.wrap_results(result)
            if has_gradient is not None and isinstance(result, tuple):
                _mark_constant(ctx, result, has_gradient(options))
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs, options, once, strides, parts, host_code = ctx.call
            if parts is not None:
                grads = parts.unwrap_gradients(grads)
            if has_gradient is not None:
                grads = wiring.select_gradients(grads, options)
            traced = torch_state.compiling()  # by compiled autograd
            incoming = None
            for grad in grads:
                if grad is not None:
                    incoming = grad
                    if not traced and (grad.is_neg() or not _has_storage(grad)):
                        grads = _with_memory(grads, grad, wiring.no_batch)
            if incoming is None:  # no result has an incoming gradient
                return (None,) * (1 + len(wiring.takes_gradient))
            saved = ctx.saved_tensors  # read once: checkpointing doesn't give them a second time
            if strides is not None:
                saved = _with_strides(saved, strides)
            if once is not None:
                saved = (*saved, once)
            if not traced and (not torch_state.plain() or torch.is_grad_enabled() or _is_any_autocast_enabled()):
                gradients = wiring.backward(needs, saved, grads, options, incoming.device.type)
            elif host_code is None or traced or strides is not None:
                gradients = kernel.backward(needs, saved, *grads, **options)
            else:
                gradients = host_code.backward(needs, saved, grads, options)
            if parts is not None:
                gradients = parts.wrap_gradients(gradients)
            return (None, *gradients) if all_take_gradient else (None, *wiring.gradient_per_tensor(gradients))

    node = _named(wiring, EagerNode)
    node._backward_cls._raw_saved_tensors = property(_raw_saved_tensors)
    return node


def _mark_constant(ctx: Any, results: tuple[Tensor | None, ...], flags: tuple[bool, ...] | None) -> None:
    """Tell autograd which results have no gradient; `flags` says which have one, None that all do."""
    if flags is not None:
        without = [r for r, flag in zip(results, flags, strict=True) if not flag and r is not None]
        ctx.mark_non_differentiable(*without)


def _raw_saved_tensors(node: Any) -> Any:
    """The saved tensors, for hooks on single tensors. Such hooks are registered after forward, so the strides are noted here."""
    needs, options, once, strides, parts, host_code = node.call
    if strides is None:
        node.call = needs, options, once, _strides(node.saved_tensors), parts, host_code
    saver: Any = super(type(node), node)
    return saver._raw_saved_tensors


def _saved_under(
    hooks: recompute.Hooks, saved: Sequence[Tensor | None], once: SavedOnce | None
) -> list[tuple[int, ...]] | None:
    """The strides of the saved tensors, if hooks may change them. Hooks that may drop tensors also empty `once`."""
    lean_hooks = recompute.lean_hooks_of(hooks)
    if lean_hooks is not None and lean_hooks.outer is None:
        return None
    if once is not None:
        once.take()  # activation checkpointing, or another hook that drops tensors: backward computes them again
    return _strides(saved)


def _with_strides(saved: Sequence[Tensor | None], strides: Sequence[tuple[int, ...]]) -> Saved:
    """Saved tensors with the order of dimensions that these strides have: hooks may have changed it."""
    return tuple([t if t is None else recompute.laid_out(t, s) for t, s in zip(saved, strides, strict=True)])


def _with_memory(grads: tuple[Tensor | None, ...], grad: Tensor, no_batch: str) -> tuple[Tensor | None, ...]:
    """Incoming gradients without negative and conjugate views. A RuntimeError if `grad`, one of them, stands for a batch."""
    if torch_state.is_batched(grad):
        raise RuntimeError(no_batch)
    return tuple([g if g is None else torch_state.resolved(g) for g in grads])


def early_run(wiring: Wiring, node: Any) -> Callable[[Arguments, Needs, dict[str, Any], SavedEarly], Any]:
    """A function that runs a kernel in activation checkpointing, if the kernel's backward needs its arguments alone.

    Checkpointing runs a region again until the last saved tensor has been packed again. Autograd packs the tensors that a
    Function saves after its forward. So `SaveNode` saves the arguments, and `RunNode` runs the forward after that: the forward
    needn't run again if nothing behind it saves a tensor.
    """
    kernel, nothing = wiring.kernel, wiring.nothing

    class SaveNode(node):
        """Saves the tensors that backward takes. Its backward is the eager node's."""

        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *tensors: Tensor | None) -> Any:
            needs, options, early = call
            ctx.call = needs, options, None, _strides(early.saved), None, None
            ctx.save_for_backward(*early.saved)
            ctx.set_materialize_grads(False)
            first = tensors[0]
            assert first is not None
            return torch.empty((), dtype=first.dtype, device=first.device).expand(early.shape)

    class RunNode(torch.autograd.Function):
        """Runs the forward. The result's gradient goes to `SaveNode`, whose own result has no memory."""

        @staticmethod
        def forward(ctx: Any, arguments: Arguments, anchor: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            return kernel.forward(nothing, **arguments)[0]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, *grads

    save_node, run_node = _named(wiring, SaveNode), _named(wiring, RunNode)

    def run(arguments: Arguments, needs: Needs, options: dict[str, Any], early: SavedEarly) -> Any:
        tensors = [arguments[name] for name in wiring.op.tensors]
        return run_node.apply(arguments, save_node.apply((needs, options, early), *tensors))

    return run


def traced_run(wiring: Wiring) -> Callable[[Arguments, Needs, dict[str, Any]], Any]:
    """A function that runs a kernel while Dynamo traces: its launches and its node are part of the graph."""
    op, kernel, has_gradient = wiring.op, wiring.kernel, wiring.has_gradient

    class TracedNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: tuple[Any, ...], *tensors: Tensor | None) -> Any:
            needs, values = call
            options = dict(zip(op.options, values, strict=True))
            result, saved = kernel.forward(needs, **dict(zip(op.tensors, tensors, strict=True)), **options)
            ctx.call = needs, options
            ctx.save_for_backward(*saved)
            ctx.set_materialize_grads(False)
            # torch 2.11 drops the gradient of a tensor that was changed in place, or converted to the dtype it has.
            if isinstance(result, tuple):
                return tuple(_absent(tensors[0]) if r is None else r.view_as(r) for r in result)
            return result.view_as(result)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs, options = ctx.call
            # A result that is None is a stand-in in the graph: its gradient is zeros.
            grads = tuple([None if g is None or _is_absent(g) else g for g in wiring.select_gradients(grads, options)])
            if all(grad is None for grad in grads):
                return (None,) * (1 + len(wiring.takes_gradient))
            gradients = kernel.backward(needs, ctx.saved_tensors, *grads, **options)
            return None, *wiring.gradient_per_tensor(gradients)

    node = _named(wiring, TracedNode)

    def run(arguments: Arguments, needs: Needs, options: dict[str, Any]) -> Any:
        tensors = _each_once([arguments[name] for name in op.tensors])
        call = needs, tuple(options.values())
        if op.recompute is not None and recompute.state.lean:
            from torch.utils.checkpoint import checkpoint

            result = checkpoint(node.apply, call, *tensors, use_reentrant=False, context_fn=recompute.recomputing)
        else:
            result = node.apply(call, *tensors)
        if not isinstance(result, tuple):
            return result
        flags = (has_gradient and has_gradient(options)) or (True,) * len(result)
        return tuple(
            None if _is_absent(r) else r if flag else r.detach() for r, flag in zip(result, flags, strict=True)
        )

    return run


def _named(wiring: Wiring, node: Any) -> Any:
    return type(node)(wiring.name, (node,), {})


def without_second_derivatives(
    message: str, grads: Sequence[Tensor | None], used: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of a backward, marked: to differentiate them raises a RuntimeError with the message.

    Args:
        message: the error's text.
        grads: the gradients.
        used: the tensors that they were computed from.
    """
    sources = [t for t in used if t is not None and t.requires_grad] or [torch.empty(0, requires_grad=True)]
    return tuple(g if g is None else _NoSecondDerivative.apply(message, g, *sources) for g in grads)


# A traced Function that gets one tensor twice has wrong gradients in torch 2.11, and is refused by 2.13.
def _each_once(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    distinct: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or all(tensor is not other for other in distinct):
            distinct.append(tensor)
        else:
            distinct.append(tensor.view_as(tensor))
    return distinct


def _strides(saved: Sequence[Tensor | None]) -> list[tuple[int, ...]]:
    return [() if tensor is None else tensor.stride() for tensor in saved]


# Dynamo (torch 2.13) traces neither a None among a Function's results nor marks of some of them as non-differentiable.
# So a traced Function returns all of them as tensors; a bool, which is no op's result, stands for None.
def _absent(beside: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.bool, device=None if beside is None else beside.device)


def _is_absent(result: Tensor) -> bool:
    return result.dtype is torch.bool


class _NoSecondDerivative(torch.autograd.Function):
    """The identity of a gradient. Its backward raises the error that a kernel can't be differentiated twice.

    The gradient was computed from the `sources`. They connect it to the op's inputs.
    """

    @staticmethod
    def forward(ctx: Any, message: str, grad: Tensor, *sources: Tensor) -> Tensor:
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)
