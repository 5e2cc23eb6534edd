"""`lean`: cheap results of ops are not saved for backward. Ops recompute them from the tensors that they save themselves."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import _get_dispatch_stack_at, _has_storage, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from liger_core import torch_state

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A function that packs a tensor which autograd saves, and one that unpacks it."""


class Recompute:
    """A declaration of how an op's cheap results are recomputed: the op runs again, from the same arguments.

    Args:
        *kept: the arguments that the backward of every kernel saves. Another argument, such as rope's q, has to be a result that
            can be recomputed itself.
        **instead: functions of the tuple of results. Their values take the place of arguments, and then only the first result is
            recomputed.
    """

    def __init__(self, *kept: str, **instead: Callable[[tuple[Tensor, ...]], Tensor]) -> None:
        self.kept, self.instead = kept, instead


class LeanState:
    """Whether `lean` is on, for torch.compile, which guards on it while it traces. In eager mode the hooks show it."""

    lean: bool = False


state = LeanState()


def recomputing() -> Any:
    """The `context_fn` of a checkpointed region: Inductor's partitioner saves nothing there that it can recompute.

    Without it, torch before 2.13 marks the region's own operators, but not the kernels inside of an `autograd.Function`.
    """
    from torch.utils import checkpoint

    def prefer_recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    return cast("Any", checkpoint).create_selective_checkpoint_contexts(prefer_recompute)


def lean_hooks_of(hooks: Hooks | None) -> LeanHooks | None:
    """The `LeanHooks` that these hooks belong to, or None."""
    lean_hooks = None if hooks is None else getattr(hooks[0], "__self__", None)
    return lean_hooks if isinstance(lean_hooks, LeanHooks) else None


def innermost() -> Hooks | None:
    """The hooks that autograd calls in this thread."""
    return _top_saved_tensors_default_hooks(True)


def active() -> LeanHooks | None:
    """The `LeanHooks` of the innermost hooks, or None."""
    return lean_hooks_of(innermost())


def checkpointed() -> bool:
    """Whether non-reentrant activation checkpointing takes the tensors that autograd saves, around `lean` or not.

    It runs a region again only until each tensor that was saved has been saved once more. The answer is False for selective
    checkpointing, whose policy may save products.
    """
    if torch_state.compiling():
        return False
    hooks = innermost()
    if (lean_hooks := lean_hooks_of(hooks)) is not None:
        hooks = lean_hooks.outer
    if hooks is None or getattr(hooks[0], "__module__", None) != _CHECKPOINT:
        return False
    active = _len_torch_dispatch_stack()
    return not any(type(_get_dispatch_stack_at(place)).__module__ == _CHECKPOINT for place in range(active))


_CHECKPOINT = "torch.utils.checkpoint"


class SavedTensor(NamedTuple):
    """A saved tensor, packed by the hooks around ours if there are any, and its version and strides when it was saved."""

    tensor: Any
    version: int
    strides: tuple[int, ...]


class RecomputableResult(NamedTuple):
    """A result that can be recomputed, while its memory lives."""

    storage: StorageWeakRef
    call: RecordedCall
    number: int
    dtype: torch.dtype
    version: int


class LeanHooks:
    """The hooks of a `lean` block. They save tensors, except results that an op can recompute.

    Attributes:
        outer: the hooks around the block. They get the tensors that are saved.
        results: the recomputable results by their storage's address. A weak reference to a storage keeps its address taken.
    """

    def __init__(self, outer: Hooks | None) -> None:
        self.outer = outer
        self.results: dict[int, RecomputableResult] = {}

    def remember(
        self,
        recompute: Recompute,
        tensors: dict[str, Tensor | None],
        options: dict[str, Any],
        result: Any,
        run: Callable[..., Any],
    ) -> None:
        """Remember a call's results, if they can be recomputed.

        Args:
            recompute: the op's declaration.
            tensors: the call's tensors by name, in the order of the signature.
            options: its other arguments.
            result: its result.
            run: a function of all arguments by name that returns the result.
        """
        for storage in [key for key, known in self.results.items() if known.storage.expired()]:
            del self.results[storage]
        results = _as_tuple(result)
        replacements = {name: function(results) for name, function in recompute.instead.items()}
        for name, tensor in tensors.items():
            if (
                tensor is not None
                and name not in recompute.kept
                and name not in replacements
                and self._known(tensor) is None
            ):
                return
        inputs = {**tensors, **replacements}
        results = results[:1] if replacements else results
        packed = {name: None if t is None else self.pack(t.detach()) for name, t in inputs.items()}
        call = RecordedCall(self, functools.partial(run, **options), packed, results)
        for number, y in enumerate(results):
            storage = y.untyped_storage()
            self.results[storage._cdata] = RecomputableResult(
                StorageWeakRef(storage), call, number, y.dtype, y._version
            )

    def _known(self, tensor: Tensor) -> RecomputableResult | None:
        if not self.results or tensor.layout is not torch.strided or not _has_storage(tensor):
            return None
        known = self.results.get(tensor.untyped_storage()._cdata)
        same = known is not None and known.dtype is tensor.dtype and known.version == tensor._version
        return known if same and not tensor.is_neg() else None

    def pack(self, tensor: Tensor) -> SavedTensor | Placeholder:
        """Pack a tensor. Autograd, or a `RecordedCall`, holds the packed one in its place."""
        if (known := self._known(tensor)) is not None:
            return known.call.placeholder(known.number, tensor)
        strides = tensor.stride() if self.outer is not None and tensor.layout is torch.strided else ()
        # If an attention saves its own result undetached, result and node hold each other: a cycle that only backward breaks.
        packed = tensor.detach() if self.outer is None else self.outer[0](tensor)
        return SavedTensor(packed, tensor._version, strides)

    def unpack(self, packed: SavedTensor | Placeholder) -> Tensor:
        """The tensor that was packed."""
        if isinstance(packed, Placeholder):
            return packed.tensor()
        tensor, version, strides = packed
        if self.outer is not None:
            return laid_out(self.outer[1](tensor), strides) if strides else self.outer[1](tensor)
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor that backward needs was changed in place: {tensor.dtype}, shape {tuple(tensor.shape)}, is at version "
                f"{tensor._version}; liger_core.lean() saved it at version {version}"
            )
        return tensor


class RecordedCall:
    """A call of an op whose results can be recomputed. A backward recomputes them once, for all placeholders."""

    def __init__(
        self,
        lean_hooks: LeanHooks,
        run: Callable[..., Any],
        inputs: dict[str, SavedTensor | Placeholder | None],
        results: Sequence[Tensor],
    ) -> None:
        self._lean_hooks, self._run, self._inputs = lean_hooks, run, inputs
        self._layouts = [(y.shape, y.stride()) for y in results]
        self._placeholders: WeakSet[Placeholder] = WeakSet()
        self._waiting: WeakSet[Placeholder] = WeakSet()
        self._results: list[Tensor] | None = None
        self._lock = threading.Lock()

    def placeholder(self, number: int, tensor: Tensor) -> Placeholder:
        """A placeholder for `tensor`, which shares the memory of a result."""
        placeholder = Placeholder(self, number, tensor)
        self._placeholders.add(placeholder)
        return placeholder

    def result(self, number: int, placeholder: Placeholder) -> Tensor:
        """A result. The results are freed when every placeholder has received its result."""
        with self._lock:
            if self._results is None:
                self._results = self._recompute()
                self._waiting = WeakSet(self._placeholders)
            result = self._results[number]
            self._waiting.discard(placeholder)
            if not self._waiting:
                self._results = None
            return result

    def _recompute(self) -> list[Tensor]:
        tensors = {n: None if packed is None else self._lean_hooks.unpack(packed) for n, packed in self._inputs.items()}
        device = next(t.device.type for t in tensors.values() if t is not None)
        for name, t in tensors.items():
            if t is not None and t.numel() > 0 and _has_storage(t) and t.untyped_storage().size() == 0:
                raise RuntimeError(
                    f"liger_core.lean() recomputes a result in backward, and its {name} was freed, as FSDP does behind a module "
                    "that is a unit of its own; leave lean out there, or let the unit hold the result's users as well"
                )
        with torch.no_grad():
            if _is_any_autocast_enabled():  # forward ran without autocast as well
                with torch.autocast(device, enabled=False):
                    result = self._run(**tensors)
            else:
                result = self._run(**tensors)
        results = _as_tuple(result)
        return [_as_it_was(y, *layout) for y, layout in zip(results, self._layouts)]  # noqa: B905  with `instead`, only the first


class Placeholder:
    """A stand-in for a saved tensor that shares the memory of a result, such as a view of it."""

    __slots__ = ("__weakref__", "_call", "_number", "_view")

    def __init__(self, call: RecordedCall, number: int, tensor: Tensor) -> None:
        self._call, self._number = call, number
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        """The tensor, recomputed."""
        result = self._call.result(self._number, self)
        return result if (result.shape, result.stride(), 0) == self._view else result.as_strided(*self._view)


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", result if isinstance(result, tuple) else (result,))


def _as_it_was(tensor: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A recomputed result in the layout of the first one. Hooks of other code may have changed the layout of its inputs."""
    if tensor.stride() == strides and tensor.storage_offset() == 0:
        return tensor
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor itself if it has these `strides`; otherwise a copy without gaps whose dimensions lie in memory in their order.

    Saved-tensor hooks, such as those that offload, may return another layout than they got.
    """
    if tensor.stride() == strides:
        return tensor
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    return tensor.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


@contextmanager
def lean() -> Generator[None]:
    """Save less for backward: cheap results of ops, such as a norm's, are recomputed instead of saved by their users.

    Code in the block that saves such a result, such as a linear layer or an attention, gets a placeholder. When backward needs
    the result, the op's forward kernel runs once more. Gradients are equal to the bit. Other tensors are saved as always.

    `lean` changes the tensors that autograd saves in this thread. Backward may run in any thread. Ops declare how their results
    are recomputed (`Op.recompute`). `lean` works inside of a checkpointed region, and inside of other saved-tensor hooks, such as
    `torch.autograd.graph.save_on_cpu`. If such hooks are innermost, only they run.

    Raises:
        RuntimeError: in backward, if a saved tensor was changed in place.

    >>> import liger_core
    >>> x, w = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    >>> with lean():
    ...     y = torch.nn.functional.linear(liger_core.rms_norm(x, w), torch.ones(1, 4, requires_grad=True))
    >>> y.sum().backward()
    """
    before, state.lean = state.lean, True
    try:
        if torch_state.compiling():
            yield
            return
        outer = innermost()
        if lean_hooks_of(outer) is not None:
            yield
            return
        lean_hooks = LeanHooks(outer)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lean_hooks.pack, lean_hooks.unpack):
                yield
        finally:
            # Results refer to their hooks: a cycle, which would hold tensors until Python collects cycles. Checkpointing ends a
            # region that runs again by an exception, which passes here.
            lean_hooks.results.clear()
    finally:
        state.lean = before
