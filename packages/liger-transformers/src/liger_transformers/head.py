"""The head: while the model's forward runs, `lm_head` owes its logits, and the model's output does without them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from liger_core import tensors
from liger_transformers import trl
from liger_transformers.logits import Logits
from liger_transformers.promise import Promise
from liger_transformers.swap import has_own_forward, original_class, subclass, swapped_for

Lazy = bool | Literal["always"]
"""When logits may leave the model as a promise, if there are no labels: never, in training, or in evaluation as well."""


class _Promising(threading.local):
    """Whether heads owe their logits: they do while a model's forward has labels, in the thread that runs it."""

    def __init__(self) -> None:
        self.on = False


_promising = _Promising()


@contextmanager
def owing() -> Generator[None, None, None]:
    """A context in which heads owe their logits."""
    before, _promising.on = _promising.on, True
    try:
        yield
    finally:
        _promising.on = before


@functools.cache
def _head_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor, then: Callable[..., Any] | None = None) -> Any:
        if then is not None:
            return then(x, self.weight, self.bias)
        # A forward bound to the instance doesn't know `then`. The shard of a tensor-parallel weight is not the weight.
        if _promising.on and "forward" not in vars(self) and type(self.weight) in (nn.Parameter, Tensor):
            return Logits.of(x, self)
        return cls.forward(self, x)

    return subclass(cls, forward, "fused_linear_cross_entropy")


def _widened(head: nn.Module, dense: Callable[..., Any]) -> Callable[..., Any]:
    """For a forward `dense` that makes a head's logits in float32: a forward that owes them, and otherwise does the same."""

    def forward(x: Tensor, then: Callable[..., Any] | None = None) -> Any:
        bias: Any = head.bias
        if then is not None:
            return then(x.float(), head.weight.float(), bias if bias is None else bias.float())
        if _promising.on and type(head.weight) in (nn.Parameter, Tensor):
            with torch.autocast(x.device.type, enabled=False):
                return Logits.of(x.float(), head)
        return dense(x)

    forward.liger_replaces = dense  # type: ignore[attr-defined]
    return forward


def _divided(head: nn.Module, dense: Callable[..., Any]) -> Callable[..., Any]:
    """For transformers' tensor-parallel forward `dense`: a forward that owes the logits of the whole vocabulary.

    Its input is a DTensor, as the weight is, of which each process has rows. So an op divides the vocabulary, and no process
    makes the logits of another one. Its result is the same on all processes.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def forward(x: Tensor, then: Callable[..., Any] | None = None) -> Any:
        if then is None:
            return Logits.of(x, head) if _promising.on else dense(x)
        mesh = cast("DTensor", head.weight).device_mesh
        found = then(DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False), head.weight, head.bias)
        return found.full_tensor() if isinstance(found, DTensor) else found

    forward.liger_replaces = dense  # type: ignore[attr-defined]
    return forward


@functools.cache
def _model_class(cls: type[nn.Module], lazy: Lazy, for_trl: bool) -> type[nn.Module]:
    original = cls.forward
    names = [*inspect.signature(original).parameters][1:]
    place = names.index("labels") if "labels" in names else None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[place] if place is not None and len(args) > place else kwargs.get("labels")
        given = labels is not None or kwargs.get("shift_labels") is not None
        leave = lazy and not given and skip_logits is None and (self.training or lazy == "always")
        leave = leave and not kwargs.get("use_cache") and kwargs.get("past_key_values") is None
        if leave:
            _may_leave(self)
        elif not (given and (self.training if skip_logits is None else skip_logits)):
            return original(self, *args, **kwargs)
        with owing():
            output = original(self, *args, **kwargs)
        return output if leave else _kept(output)

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name == "forward" and for_trl:
            value = serve_trl(self, original, value)
        super(new, self).__setattr__(name, value)

    options = [*(["trl"] if for_trl else []), *([f"lazy={lazy!r}"] if lazy else [])]
    new = subclass(cls, forward, f"fused_linear_logit_statistics({', '.join(options)})" if options else "")
    new.liger_options = lazy, for_trl  # type: ignore[attr-defined]
    if for_trl:
        new.__setattr__ = __setattr__
    return new


def _may_leave(model: nn.Module) -> None:
    """Raise RuntimeError if a wrapper looks for tensors in the output, and would take a promise for no output."""
    outer = DistributedDataParallel._active_ddp_module
    if outer is not None and outer.find_unused_parameters:
        raise RuntimeError(
            "liger_transformers.apply(model, lazy=…) lets logits leave the model before they are computed, and DDP's search "
            "for unused parameters takes the head for unused; lazy takes DDP with find_unused_parameters=False "
            "(TrainingArguments: ddp_find_unused_parameters=False)"
        )
    if vars(model).get("_is_replica"):
        raise RuntimeError(
            "liger_transformers.apply(model, lazy=…) lets logits leave the model before they are computed, and nn.DataParallel "
            "gathers tensors; lazy takes one device per process"
        )


def serve_trl(model: nn.Module, original: Callable[..., Any], method: Any) -> Any:
    """`method`; or, if it is TRL's fused head, a replacement that answers from what the model's own forward owes."""
    head = trl.fused_head(method)
    if head is None:
        return method
    if head.cast_lm_head_to_fp32:
        for linear in head_of(model)[0].values():
            own = vars(linear).get("forward")
            if own is not None and swapped_for(linear) is not None and not hasattr(own, "liger_replaces"):
                linear.forward = _widened(linear, own)
    return head.served(model, original, owing)


def _kept(output: Any) -> Any:
    """A model's output. If there is a loss, promises in it are removed; otherwise their tensors replace them."""
    if isinstance(output, Promise):
        return output.tensor()
    if isinstance(output, tuple):
        values = cast("tuple[Any, ...]", output)
        if not any(isinstance(value, Promise) for value in values):
            return values
        if isinstance(values[0], Tensor) and values[0].dim() == 0:
            return tuple(value for value in values if not isinstance(value, Promise))
        return tuple(value.tensor() if isinstance(value, Promise) else value for value in values)
    if isinstance(output, dict):
        named = cast("dict[str, Any]", output)
        for name, value in list(named.items()):
            if isinstance(value, Promise):
                named[name] = value.tensor() if named.get("loss") is None else None
    return cast("Any", output)


def head_of(model: nn.Module, for_trl: bool = False, lazy: Lazy = False) -> tuple[dict[str, nn.Module], str | None]:
    """The linears that are the model's head, by name; and why the loss stays unchanged, or None.

    In a LoRA head they are the layer below and lora_B, whose promises add up.
    """
    head = cast("nn.Module | None", cast("Any", model).get_output_embeddings())
    if head is None:
        return {}, "it has no output embeddings"
    everything: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())
    place = next(name for name, module in everything if module is head)
    columns = getattr(getattr(head, "base_layer", head), "out_features", None)
    layers: list[tuple[str, nn.Module]] = list(cast("Any", head).named_modules())
    linears = {
        f"{place}.{name}".rstrip("."): module
        for name, module in layers
        if not module._modules and columns is not None and getattr(module, "out_features", None) == columns
    }
    if not linears:
        return {}, f"its head is a {type(head).__name__}, which holds no linear layer"
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return linears, "its forward takes no labels"
    if (getattr(model, "tp_size", None) or 1) > 1 and (
        why := _why_not_divided(model, linears, for_trl, lazy)
    ) is not None:
        return linears, why
    if (why := _bound(model)) is not None and not (for_trl and trl.fused_head(vars(model)["forward"]) is not None):
        return linears, why
    for name, module in linears.items():
        if (why := _bound(module)) is not None and not _is_divided(module):
            return linears, f"{name}: {why}"
        if not isinstance(module, nn.Linear) or original_class(type(module)).forward is not nn.Linear.forward:
            return linears, f"{name} is a {type(module).__name__}, whose forward is not nn.Linear's"
    return linears, None


def _is_divided(head: nn.Module) -> bool:
    """Whether transformers' tensor parallelism has bound the head's forward, and divided its rows over one dimension."""
    weight, own = head.weight, vars(head).get("forward")
    by = getattr(getattr(own, "liger_replaces", own), "__module__", None)
    if tensors.full_name(type(weight)) != tensors.DTENSOR or by != "transformers.distributed.tensor_parallel":
        return False
    return [place.is_shard(0) for place in cast("Any", weight).placements] == [True]


def _why_not_divided(model: nn.Module, linears: dict[str, nn.Module], for_trl: bool, lazy: Lazy) -> str | None:
    """Why the loss of a tensor-parallel model stays unchanged, or None: liger-distributed divides the head's vocabulary."""
    place, *more = linears
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if more or not _is_divided(linears[place]) or plan.get(place) != "colwise_gather_output":
        return "its head may be divided by tensor parallelism, and not by rows as DTensors are"
    if for_trl or lazy:
        return "its head is divided by tensor parallelism, and trl and lazy take a whole one"
    if tensors.handler_of([linears[place].weight]) is None:
        return "its head is divided by tensor parallelism, whose loss takes liger-core[distributed], and that isn't installed"
    return None


def _bound(module: nn.Module) -> str | None:
    """`has_own_forward`, for a module that may have a forward which serves TRL."""
    own = vars(module).get("forward")
    if own is None or hasattr(own, "liger_replaces"):
        return None
    more = "" if trl.fused_head(own) is None else ", or pass trl=True"
    return f"{has_own_forward(module)}{more}"


def swap_head(model: nn.Module, linears: dict[str, nn.Module], lazy: Lazy, for_trl: bool) -> str:
    """Let the linears owe their logits while the model's forward has labels, or if `lazy` or TRL's trainers need it.

    An earlier call's choice stays. Returns the model's swap, as `swapped_for` does.
    """
    for module in linears.values():
        if swapped_for(module) is None:
            if _is_divided(module):
                module.forward = _divided(module, module.forward)
            module.__class__ = _head_class(type(module))
    before_lazy, before_trl = getattr(type(model), "liger_options", (False, False))
    options = (max(lazy, before_lazy, key=(False, True, "always").index), for_trl or before_trl)
    if swapped_for(model) is None or options != (before_lazy, before_trl):
        cls = type(model) if swapped_for(model) is None else original_class(type(model))
        model.__class__ = _model_class(cls, *options)
        if for_trl and (own := vars(model).get("forward")) is not None:
            model.forward = own  # it was bound before: bind it again, through __setattr__
    return swapped_for(model) or ""
