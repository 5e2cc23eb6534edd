"""The head: while the model's forward runs with labels, `lm_head` defers its logits, which a loss may do without."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from liger_core import subclasses
from liger_core.contract import compiling
from liger_transformers import trl
from liger_transformers.answers import defer
from liger_transformers.deferred import DeferredTensor, materialize
from liger_transformers.linear import OTHER_VALUE, loss_options
from liger_transformers.swap import (
    by_forward,
    has_hooks,
    has_own_forward,
    original_class,
    set_class,
    subclass,
    swapped_for,
)
from liger_transformers.traced import TracedLogits

log = logging.getLogger("liger_transformers")

Lazy = bool | Literal["always"]
"""When deferred logits may leave the model, if there are no labels: never, in training, or in evaluation as well."""


LossOptions = tuple[tuple[str, Any], ...]
"""Options of `fused_linear_cross_entropy`, by name."""


def head_options(model: object) -> tuple[Lazy, bool, LossOptions]:
    """`lazy`, `trl` and the loss's options with which a model was swapped."""
    return getattr(type(model), "liger_options", (False, False, ()))


class _Window(threading.local):
    """The kind of logits that heads defer in the thread that runs a model's forward: none, `Logits` or `TracedLogits`."""

    def __init__(self) -> None:
        # An attribute of the class alone, which a forward shadows for a while, fails Dynamo's guards at the next compilation.
        self.kind: Literal["logits", "traced"] | None = None
        self.unit: Any = None
        """The model's head, in which LoRA may have put the linear layer. It may be an FSDP2 unit."""


_window = _Window()


@contextmanager
def deferred_logits(model: nn.Module, on: bool = True, leaving: bool = False) -> Generator[None, None, None]:
    """A context in which the model's head defers its logits, if `on`. Each model's forward answers for itself.

    An object that isn't a tensor can't be `leaving` the model.
    """
    before = _window.kind, _window.unit
    _window.kind = _kind(model, leaving) if on else None
    _window.unit = cast("Any", model).get_output_embeddings() if _window.kind == "logits" else None
    try:
        yield
    finally:
        _window.kind, _window.unit = before


def _kind(model: Any, leaving: bool) -> Literal["logits", "traced"] | None:
    head = model.get_output_embeddings()
    if head is None:
        return None
    if compiling() or _is_divided(getattr(head, "base_layer", head)):
        return "traced" if not leaving and _known(model, head) else None
    # FSDP1 frees a head of its own behind its call, and has no public way to gather it again.
    freed = any(type(module).__name__ == "FullyShardedDataParallel" for module in head.modules())
    return None if freed else "logits"


def _known(model: Any, head: nn.Module) -> bool:
    """Whether logits meet code of transformers alone."""
    loss = str(getattr(model.loss_function, "__module__", None))
    cls = cast("Any", type(model))
    forward = str(cls.liger_class.forward.__module__)
    known = not any(has_hooks(module) for module in head.modules())
    return known and loss.startswith("transformers.loss.") and forward.startswith("transformers.models.")


@by_forward
def head_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a linear layer that may defer its logits."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        x = materialize(x)
        z = _deferred(x, self.weight, self.bias, self) if _window.kind is not None else None
        return cls.forward(self, x) if z is None else z

    return subclass(cls, forward, "fused_linear_cross_entropy")


def _deferred(x: Tensor, weight: Any, bias: Any, head: nn.Module) -> Any:
    """The logits, if heads defer them now and this one can."""
    if _window.kind == "traced" and type(weight) in (nn.Parameter, Tensor):
        return TracedLogits.of(x, weight, bias)
    return (
        defer(x, weight, bias, head if hasattr(head, "unshard") else _window.unit) if _window.kind == "logits" else None
    )


def _widened(head: nn.Module, dense: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that defers a head's float32 logits, and otherwise does the same as `dense`, which computes them."""

    def forward(x: Tensor) -> Any:
        bias: Any = head.bias
        with torch.autocast(x.device.type, enabled=False):
            z = None
            if _window.kind is not None:
                z = _deferred(x.float(), head.weight.float(), bias if bias is None else bias.float(), head)
        return dense(x) if z is None else z

    forward.liger_replaces = dense  # type: ignore[attr-defined]
    return forward


def _tensor_parallel(head: nn.Module, dense: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that defers the logits of the whole vocabulary, in place of transformers' tensor-parallel forward `dense`."""

    def forward(x: Tensor) -> Any:
        weight, bias = cast("Any", (head.weight, head.bias))
        return TracedLogits.of(x, weight, bias) if _window.kind == "traced" else dense(x)

    forward.liger_replaces = dense  # type: ignore[attr-defined]
    return forward


@by_forward
def _model_class(cls: type[nn.Module], lazy: Lazy, for_trl: bool, loss: LossOptions) -> type[nn.Module]:
    in_training = dict(loss)
    in_evaluation = {name: value for name, value in loss if name not in OTHER_VALUE}
    original = cls.forward
    names = [*inspect.signature(original).parameters][1:]
    position = names.index("labels") if "labels" in names else None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[position] if position is not None and len(args) > position else kwargs.get("labels")
        labelled = labels is not None or kwargs.get("shift_labels") is not None
        lazily = bool(lazy) and not labelled and skip_logits is None and (self.training or lazy == "always")
        lazily = lazily and not kwargs.get("use_cache") and kwargs.get("past_key_values") is None
        leaving = lazily or (skip_logits is None and not self.training)
        if lazily and not compiling():
            trl.spare_deferred_logits()
        options = {} if not labelled else in_training if self.training else in_evaluation
        with deferred_logits(self, lazily or (labelled and skip_logits is not False), leaving), loss_options(options):
            output = cls.forward(self, *args, **kwargs)  # looked up now, since somebody may have patched it
        return _without_deferred(output)

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name == "forward" and for_trl:
            value = serve_trl(self, original, value)
        super(swapped, self).__setattr__(name, value)

    def set_output_embeddings(self: nn.Module, new_embeddings: nn.Module) -> None:
        """Set another head, as `resize_token_embeddings` does, and swap it."""
        cast("Any", cls).set_output_embeddings(self, new_embeddings)
        linears, why = head_of(self, for_trl, lazy)
        if why is None:
            swap_head(self, linears, lazy, for_trl, loss)
        else:
            log.warning("liger_transformers: the new head of %s stays as it is: %s", cls.__name__, why)

    options = [*(["trl"] if for_trl else []), *([f"lazy={lazy!r}"] if lazy else [])]
    swapped = subclass(cls, forward, f"fused_linear_logit_statistics({', '.join(options)})" if options else "")
    swapped.liger_options = lazy, for_trl, loss  # type: ignore[attr-defined]
    swapped.liger_class = cls  # type: ignore[attr-defined]
    swapped.set_output_embeddings = set_output_embeddings  # type: ignore[attr-defined]
    if for_trl:
        swapped.__setattr__ = __setattr__
    return swapped


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
    if (why := bound_forward(model, for_trl)) is not None:
        return linears, why
    for name, module in linears.items():
        if (why := _bound(module)) is not None and not _is_divided(module):
            return linears, f"{name}: {why}"
        if not isinstance(module, nn.Linear) or original_class(type(module)).forward is not nn.Linear.forward:
            return linears, f"{name} is a {type(module).__name__}, whose forward is not nn.Linear's"
    return linears, None


def _is_divided(head: nn.Module) -> bool:
    """Whether transformers' tensor parallelism has bound the head's forward, and divided its rows over one dimension."""
    bound = vars(head).get("forward")
    if bound is None:
        return False
    weight: Any = head.weight
    binder = getattr(getattr(bound, "liger_replaces", bound), "__module__", None)
    if (
        subclasses.full_name(cast("type[Any]", type(weight))) != subclasses.DTENSOR
        or binder != "transformers.distributed.tensor_parallel"
    ):
        return False
    return [placement.is_shard(0) for placement in weight.placements] == [True]


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


def bound_forward(model: nn.Module, for_trl: bool) -> str | None:
    """Why another forward of the class has no effect: one is bound to the instance, and is not TRL's that `for_trl` replaces."""
    why = _bound(model)
    return None if why is None or (for_trl and trl.fused_head(vars(model)["forward"]) is not None) else why


def _bound(module: nn.Module) -> str | None:
    """`has_own_forward`, for a module that may have a forward which serves TRL."""
    bound = vars(module).get("forward")
    if bound is None or hasattr(bound, "liger_replaces"):
        return None
    why = has_own_forward(module)
    return why if why is None or trl.fused_head(bound) is None else f"{why}, or pass trl=True"


def swap_head(
    model: nn.Module, linears: dict[str, nn.Module], lazy: Lazy, for_trl: bool, loss: LossOptions = ()
) -> str:
    """Let the linears defer their logits while the model's forward has labels, or if `lazy` or TRL's trainers need it.

    An earlier call's choice stays. Returns the model's swap, as `swapped_for` does.
    """
    for module in linears.values():
        if swapped_for(module) is None:
            if _is_divided(module):
                module.forward = _tensor_parallel(module, module.forward)
            set_class(module, head_class(type(module)))
    before = before_lazy, before_trl, before_loss = head_options(model)
    options: Any = (
        max(lazy, before_lazy, key=(False, True, "always").index),
        for_trl or before_trl,
        loss or before_loss,
    )
    if swapped_for(model) is None or options != before:
        cls = type(model) if swapped_for(model) is None else original_class(type(model))
        set_class(model, _model_class(cls, *options))
        if for_trl and (bound := vars(model).get("forward")) is not None:
            model.forward = bound  # it was bound before: bind it again, through __setattr__
    return swapped_for(model) or ""
