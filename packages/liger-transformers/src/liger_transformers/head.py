"""The head: while the model's forward runs, `lm_head` defers its logits, and the model's output does without them."""

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

from liger_core import subclasses
from liger_transformers import trl
from liger_transformers.deferred import DeferredTensor
from liger_transformers.logits import Logits
from liger_transformers.swap import has_own_forward, original_class, subclass, swapped_for

Lazy = bool | Literal["always"]
"""When deferred logits may leave the model, if there are no labels: never, in training, or in evaluation as well."""


class _Deferring(threading.local):
    """Whether heads defer their logits: they do while a model's forward has labels, in the thread that runs it."""

    def __init__(self) -> None:
        self.on = False


_deferring = _Deferring()


@contextmanager
def deferred_logits() -> Generator[None, None, None]:
    """A context in which heads defer their logits."""
    before, _deferring.on = _deferring.on, True
    try:
        yield
    finally:
        _deferring.on = before


@functools.cache
def head_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a linear layer that may defer its logits. It is called with the function of x, weight and bias to run."""

    def forward(self: nn.Module, x: Tensor, function: Callable[..., Any] | None = None) -> Any:
        if function is not None:
            return function(x, self.weight, self.bias)
        # A forward bound to the instance doesn't know `function`. The shard of a tensor-parallel weight is not the weight.
        if _deferring.on and "forward" not in vars(self) and type(self.weight) in (nn.Parameter, Tensor):
            return Logits.of(x, self)
        return cls.forward(self, x)

    return subclass(cls, forward, "fused_linear_cross_entropy")


def _widened(head: nn.Module, dense: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that defers a head's float32 logits, and otherwise does the same as `dense`, which computes them."""

    def forward(x: Tensor, function: Callable[..., Any] | None = None) -> Any:
        bias: Any = head.bias
        if function is not None:
            return function(x.float(), head.weight.float(), bias if bias is None else bias.float())
        if _deferring.on and type(head.weight) in (nn.Parameter, Tensor):
            with torch.autocast(x.device.type, enabled=False):
                return Logits.of(x.float(), head)
        return dense(x)

    forward.liger_replaces = dense  # type: ignore[attr-defined]
    return forward


def _tensor_parallel(head: nn.Module, dense: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that defers the logits of the whole vocabulary, in place of transformers' tensor-parallel forward `dense`.

    Its input is a DTensor, as the weight is, of which each process has rows. So an op divides the vocabulary, and no process
    makes the logits of another one. Its result is the same on all processes.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def forward(x: Tensor, function: Callable[..., Any] | None = None) -> Any:
        if function is None:
            return Logits.of(x, head) if _deferring.on else dense(x)
        mesh = cast("DTensor", head.weight).device_mesh
        replicated = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        result = function(replicated, head.weight, head.bias)
        return result.full_tensor() if isinstance(result, DTensor) else result

    forward.liger_replaces = dense  # type: ignore[attr-defined]
    return forward


@functools.cache
def _model_class(cls: type[nn.Module], lazy: Lazy, for_trl: bool) -> type[nn.Module]:
    original = cls.forward
    names = [*inspect.signature(original).parameters][1:]
    position = names.index("labels") if "labels" in names else None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[position] if position is not None and len(args) > position else kwargs.get("labels")
        labelled = labels is not None or kwargs.get("shift_labels") is not None
        lazily = lazy and not labelled and skip_logits is None and (self.training or lazy == "always")
        lazily = lazily and not kwargs.get("use_cache") and kwargs.get("past_key_values") is None
        if lazily:
            _check_wrappers(self)
        elif not (labelled and (self.training if skip_logits is None else skip_logits)):
            return original(self, *args, **kwargs)
        with deferred_logits():
            output = original(self, *args, **kwargs)
        return output if lazily else _without_deferred(output)

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name == "forward" and for_trl:
            value = serve_trl(self, original, value)
        super(swapped, self).__setattr__(name, value)

    options = [*(["trl"] if for_trl else []), *([f"lazy={lazy!r}"] if lazy else [])]
    swapped = subclass(cls, forward, f"fused_linear_logit_statistics({', '.join(options)})" if options else "")
    swapped.liger_options = lazy, for_trl  # type: ignore[attr-defined]
    if for_trl:
        swapped.__setattr__ = __setattr__
    return swapped


def _check_wrappers(model: nn.Module) -> None:
    """Raise RuntimeError if a wrapper looks for tensors in the output, and would not see deferred ones."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and ddp.find_unused_parameters:
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
    """`method`; or, if it is TRL's fused head, a replacement that reads the deferred logits of the model's own forward."""
    head = trl.fused_head(method)
    if head is None:
        return method
    if head.cast_lm_head_to_fp32:
        for linear in head_of(model)[0].values():
            bound = vars(linear).get("forward")
            if bound is not None and swapped_for(linear) is not None and not hasattr(bound, "liger_replaces"):
                linear.forward = _widened(linear, bound)
    return head.served(model, original, deferred_logits)


def _without_deferred(output: Any) -> Any:
    """A model's output. If there is a loss, deferred tensors in it are removed; otherwise they are computed."""
    if isinstance(output, DeferredTensor):
        return output.tensor()
    if isinstance(output, tuple):
        values = cast("tuple[Any, ...]", output)
        if not any(isinstance(value, DeferredTensor) for value in values):
            return values
        if isinstance(values[0], Tensor) and values[0].dim() == 0:
            return tuple(value for value in values if not isinstance(value, DeferredTensor))
        return tuple(value.tensor() if isinstance(value, DeferredTensor) else value for value in values)
    if isinstance(output, dict):
        named = cast("dict[str, Any]", output)
        for name, value in list(named.items()):
            if isinstance(value, DeferredTensor):
                named[name] = value.tensor() if named.get("loss") is None else None
    return cast("Any", output)


def head_of(model: nn.Module, for_trl: bool = False, lazy: Lazy = False) -> tuple[dict[str, nn.Module], str | None]:
    """The linears that are the model's head, by name; and why the loss stays unchanged, or None.

    In a LoRA head they are the layer below and lora_B, whose logits add up.
    """
    head = cast("nn.Module | None", cast("Any", model).get_output_embeddings())
    if head is None:
        return {}, "it has no output embeddings"
    modules: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())
    place = next(name for name, module in modules if module is head)
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
        why := _why_not_parallel(model, linears, for_trl, lazy)
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
    weight, bound = head.weight, vars(head).get("forward")
    binder = getattr(getattr(bound, "liger_replaces", bound), "__module__", None)
    if subclasses.full_name(type(weight)) != subclasses.DTENSOR or binder != "transformers.distributed.tensor_parallel":
        return False
    return [placement.is_shard(0) for placement in cast("Any", weight).placements] == [True]


def _why_not_parallel(model: nn.Module, linears: dict[str, nn.Module], for_trl: bool, lazy: Lazy) -> str | None:
    """Why the loss of a tensor-parallel model stays unchanged, or None: liger-distributed divides the head's vocabulary."""
    place, *others = linears
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if others or not _is_divided(linears[place]) or plan.get(place) != "colwise_gather_output":
        return "its head may be divided by tensor parallelism, and not by rows as DTensors are"
    if for_trl or lazy:
        return "its head is divided by tensor parallelism, and trl and lazy take a whole one"
    if subclasses.handler_of([linears[place].weight]) is None:
        return "its head is divided by tensor parallelism, whose loss takes liger-core[distributed], and that isn't installed"
    return None


def _bound(module: nn.Module) -> str | None:
    """`has_own_forward`, for a module that may have a forward which serves TRL."""
    bound = vars(module).get("forward")
    if bound is None or hasattr(bound, "liger_replaces"):
        return None
    advice = "" if trl.fused_head(bound) is None else ", or pass trl=True"
    return f"{has_own_forward(module)}{advice}"


def swap_head(model: nn.Module, linears: dict[str, nn.Module], lazy: Lazy, for_trl: bool) -> str:
    """Let the linears defer their logits while the model's forward has labels, or if `lazy` or TRL's trainers need it.

    An earlier call's choice stays. Returns the model's swap, as `swapped_for` does.
    """
    for module in linears.values():
        if swapped_for(module) is None:
            if _is_divided(module):
                module.forward = _tensor_parallel(module, module.forward)
            module.__class__ = head_class(type(module))
    before_lazy, before_trl = getattr(type(model), "liger_options", (False, False))
    options = (max(lazy, before_lazy, key=(False, True, "always").index), for_trl or before_trl)
    if swapped_for(model) is None or options != (before_lazy, before_trl):
        cls = type(model) if swapped_for(model) is None else original_class(type(model))
        model.__class__ = _model_class(cls, *options)
        if for_trl and (bound := vars(model).get("forward")) is not None:
            model.forward = bound  # it was bound before: bind it again, through __setattr__
    return swapped_for(model) or ""
