"""Results that nobody keeps for backward, since an op makes them again from what its own backward keeps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import _get_dispatch_stack_at, _has_storage, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from liger_core import modes

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that autograd saves, and what unpacks it."""


class Remade:
    """How an op's cheap results are made again: a line of its declaration. The op does it, from the same arguments.

    Args:
        *kept: the arguments that the backward of every kernel keeps. Another one, such as rope's q, has to be a result that
            can be made again itself.
        **instead: functions of the tuple of results, whose values take the place of arguments. Only the first result is then made
            again.
    """

    def __init__(self, *kept: str, **instead: Callable[[tuple[Tensor, ...]], Tensor]) -> None:
        self.kept, self.instead = kept, instead


class State:
    """What torch.compile finds while it traces, and guards on: whether `lean` is on. In eager mode the hooks tell."""

    lean: bool = False


state = State()


def recomputing() -> Any:
    """The `context_fn` of a checkpointed region, of which Inductor's partitioner keeps nothing that it can make again.

    Without one, torch before 2.13 marks what stands in the region, but not the kernels inside of an `autograd.Function` there.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


def keeper_of(hooks: Hooks | None) -> Keeper | None:
    """The `Keeper` whose hooks these are, or None."""
    keeper = None if hooks is None else getattr(hooks[0], "__self__", None)
    return keeper if isinstance(keeper, Keeper) else None


def innermost() -> Hooks | None:
    """This thread's hooks that autograd calls."""
    return _top_saved_tensors_default_hooks(True)


def active() -> Keeper | None:
    """The `Keeper` of the innermost hooks, or None."""
    return keeper_of(innermost())


def checkpointed() -> bool:
    """Whether non-reentrant activation checkpointing keeps what autograd saves, around `lean` or not.

    It runs a region again only until everything that was saved has been saved once more. If a policy chooses what is kept
    (selective checkpointing), it is False: then products may be kept.
    """
    if modes.compiling():
        return False
    hooks = innermost()
    if (keeper := keeper_of(hooks)) is not None:
        hooks = keeper.outer
    if hooks is None or getattr(hooks[0], "__module__", None) != _CHECKPOINT:
        return False
    active = _len_torch_dispatch_stack()
    return not any(type(_get_dispatch_stack_at(place)).__module__ == _CHECKPOINT for place in range(active))


_CHECKPOINT = "torch.utils.checkpoint"


class Kept(NamedTuple):
    """A tensor that is kept, as hooks around ours pack it, if there are any, and what it was when it was saved."""

    tensor: Any
    version: int
    strides: tuple[int, ...]


class Known(NamedTuple):
    """A result that can be made again, while its memory lives."""

    storage: StorageWeakRef
    call: Call
    number: int
    dtype: torch.dtype
    version: int


class Keeper:
    """The hooks of one `lean`: they keep tensors, but for the results that they know.

    Attributes:
        outer: the hooks around it, which get what is kept.
        results: by the address of their storage, which stays taken while a weak reference to it lives.
    """

    def __init__(self, outer: Hooks | None) -> None:
        self.outer = outer
        self.results: dict[int, Known] = {}

    def remember(
        self,
        remade: Remade,
        given: dict[str, Tensor | None],
        options: dict[str, Any],
        result: Any,
        run: Callable[..., Any],
    ) -> None:
        """Make a call's results known, unless they can't be made again.

        Args:
            remade: the op's.
            given: the call's tensors by name, in the order of the signature.
            options: its other arguments.
            result: what it returned.
            run: makes the result, from all arguments by name.
        """
        for storage in [key for key, known in self.results.items() if known.storage.expired()]:
            del self.results[storage]
        results: tuple[Tensor, ...] = result if isinstance(result, tuple) else (result,)
        own = {name: function(results) for name, function in remade.instead.items()}
        for name, tensor in given.items():
            if tensor is not None and name not in remade.kept and name not in own and self._known(tensor) is None:
                return
        inputs = {**given, **own}
        results = results[:1] if own else results
        packed = {name: None if t is None else self.pack(t.detach()) for name, t in inputs.items()}
        call = Call(self, functools.partial(run, **options), packed, results)
        for number, y in enumerate(results):
            storage = y.untyped_storage()
            self.results[storage._cdata] = Known(StorageWeakRef(storage), call, number, y.dtype, y._version)

    def _known(self, tensor: Tensor) -> Known | None:
        if not self.results or tensor.layout is not torch.strided or not _has_storage(tensor):
            return None
        known = self.results.get(tensor.untyped_storage()._cdata)
        same = known is not None and known.dtype is tensor.dtype and known.version == tensor._version
        return known if same and not tensor.is_neg() else None

    def pack(self, tensor: Tensor) -> Kept | Use:
        """What autograd, or a `Call`, holds in place of a tensor."""
        if (known := self._known(tensor)) is not None:
            return known.call.use(known.number, tensor)
        strides = tensor.stride() if self.outer is not None and tensor.layout is torch.strided else ()
        # Undetached, the result that an attention saves would hold the node that saves it: a cycle that only backward undoes.
        kept = tensor.detach() if self.outer is None else self.outer[0](tensor)
        return Kept(kept, tensor._version, strides)

    def unpack(self, packed: Kept | Use) -> Tensor:
        """The tensor again."""
        if isinstance(packed, Use):
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


class Call:
    """A call of an op whose results can be made again: they are, once for all who use them in a backward."""

    def __init__(
        self,
        keeper: Keeper,
        make: Callable[..., Any],
        inputs: dict[str, Kept | Use | None],
        results: Sequence[Tensor],
    ) -> None:
        self._keeper, self._make, self._inputs = keeper, make, inputs
        self._layouts = [(y.shape, y.stride()) for y in results]
        self._uses: WeakSet[Use] = WeakSet()
        self._waiting: WeakSet[Use] = WeakSet()
        self._made: list[Tensor] | None = None
        self._lock = threading.Lock()

    def use(self, number: int, tensor: Tensor) -> Use:
        """What stands for `tensor`, which shares the memory of a result."""
        use = Use(self, number, tensor)
        self._uses.add(use)
        return use

    def result(self, number: int, use: Use) -> Tensor:
        """A result, which is let go when each of the uses has had it."""
        with self._lock:
            if self._made is None:
                self._made = self._remake()
                self._waiting = WeakSet(self._uses)
            made = self._made[number]
            self._waiting.discard(use)
            if not self._waiting:
                self._made = None
            return made

    def _remake(self) -> list[Tensor]:
        tensors = {n: None if packed is None else self._keeper.unpack(packed) for n, packed in self._inputs.items()}
        device = next(t.device.type for t in tensors.values() if t is not None)
        with torch.no_grad():
            if _is_any_autocast_enabled():  # forward ran without, too
                with torch.autocast(device, enabled=False):
                    made = self._make(**tensors)
            else:
                made = self._make(**tensors)
        results = made if isinstance(made, tuple) else (made,)
        return [_as_it_was(y, *layout) for y, layout in zip(results, self._layouts)]  # noqa: B905  the first alone, where the others are kept


class Use:
    """Stands for a saved tensor that shares the memory of a result, such as a view of it."""

    __slots__ = ("__weakref__", "_call", "_number", "_view")

    def __init__(self, call: Call, number: int, tensor: Tensor) -> None:
        self._call, self._number = call, number
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        """The tensor, made again."""
        made = self._call.result(self._number, self)
        return made if (made.shape, made.stride(), 0) == self._view else made.as_strided(*self._view)


def _as_it_was(tensor: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A result with its first layout, which hooks of other code may have changed in what it is made from."""
    if tensor.stride() == strides and tensor.storage_offset() == 0:
        return tensor
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with its dimensions in memory as they are in one of these `strides`; without gaps, if it isn't it already.

    Hooks of saved tensors, such as those that offload, may return another layout than they got.
    """
    if tensor.stride() == strides:
        return tensor
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    return tensor.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
