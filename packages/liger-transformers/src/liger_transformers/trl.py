"""TRL's fused head, served by the deferred logits of the model's own forward.

TRL's trainers bind a forward to the model (`add_fused_lm_head`). It runs the backbone, reads the head's weight and returns
log-probabilities of the labels. It takes scales and softcaps from names in the configuration, and ignores what else the model's
own forward does to its logits. A model whose class is swapped for TRL sees that forward when TRL binds it, and binds this one
instead.

TRL is not imported. Its forward is recognised by its keyword `fused_lm_head`, and its options are the variables that it closes
over.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

import liger_core as liger
from liger_core.contract import compiling
from liger_transformers.answers import statistics, waits
from liger_transformers.deferred import materialize
from liger_transformers.logits import Form
from liger_transformers.traced import TracedLogits

CLOSED_OVER = ("original_forward", "text_config", "temperature", "cast_lm_head_to_fp32", "outputs")
"""Variables of TRL's forward that are its options."""

FIELDS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Outputs that TRL may request besides log_probs."""


class FusedHead(NamedTuple):
    """TRL's forward and its options."""

    forward: types.FunctionType
    original_forward: Callable[..., Any]
    text_config: Any
    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    result: Callable[..., Any]

    def served(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        deferring: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> types.MethodType:
        """A method for the model that does what TRL's does.

        Args:
            model: the model.
            original: its class's own forward.
            deferring: a context in which heads defer their logits.
        """

        @functools.wraps(self.forward)
        def forward(
            module: nn.Module,
            *args: Any,
            fused_lm_head: bool = False,
            labels: Tensor | None = None,
            shift_labels: Tensor | None = None,
            num_items_in_batch: Any = None,
            **kwargs: Any,
        ) -> Any:
            if not fused_lm_head:
                labelling = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
                labelling = {name: value for name, value in labelling.items() if value is not None}
                return self._unfused(module, original)(*args, **kwargs, **labelling)
            with deferring(module):
                output = original(module, *args, **{**kwargs, "use_cache": False, "return_dict": True})
            return self._output(output, labels, shift_labels, num_items_in_batch)

        forward.liger_replaces = self.forward  # type: ignore[attr-defined]
        return types.MethodType(forward, model)

    def _unfused(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """The forward that TRL replaced, for this module.

        If a model is copied, the copy still has the first model's variables in TRL's closure.
        """
        function = getattr(self.original_forward, "__func__", None)
        if function is None:
            return self.original_forward
        return types.MethodType(type(module).forward if function is original else function, module)

    def _output(self, output: Any, labels: Tensor | None, shift_labels: Tensor | None, items: Any) -> Any:
        z = output.logits
        if shift_labels is None:
            if labels is None:
                raise ValueError("fused_lm_head=True takes labels or shift_labels")
            z, shift_labels = z[:, :-1, :], labels[:, 1:]
        shift_labels = shift_labels.to(z.device)
        mask = shift_labels != IGNORED
        if not compiling():  # compiled, the number of rows stays, and an op skips ignored rows
            z, target = z[mask], shift_labels[mask]
        else:
            z, target = z.reshape(-1, z.shape[-1]), shift_labels.reshape(-1)
        if self.temperature != 1.0:
            z = torch.div(z, self.temperature)
        values = [self._spread(of_rows, mask) for of_rows in _fields(z, target, self.outputs)]
        log_probs = values[0]
        assert log_probs is not None
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
        aux_loss = output.get("aux_loss")
        if aux_loss is not None:
            loss = loss + getattr(self.text_config, "router_aux_loss_coef", 0.0) * aux_loss
        fields = dict(zip(("log_probs", *FIELDS), values, strict=True))
        return self.result(loss=loss, **fields, label_mask=mask, aux_loss=aux_loss)

    def _spread(self, values: Tensor | None, mask: Tensor) -> Tensor | None:
        """Values of the rows that count at their places, 0 elsewhere."""
        if values is None or compiling():
            return None if values is None else values.view(mask.shape)
        # The result depends on the values even if there are none, so that backward has something to run through.
        return values.new_zeros(mask.shape).masked_scatter(mask, values)


IGNORED = -100


def _fields(z: Any, target: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """log_probs and FIELDS of rows of logits, deferred or computed."""
    returns: dict[str, Any] = {
        "return_entropy": "entropy" in outputs,
        "return_total": "mean_logits" in outputs,
        "return_log_sum_squares": "log_sum_sq_probs" in outputs,
        "return_best": "is_top1" in outputs,
    }
    if waits(z, Form):
        rows = statistics(z, target, ignore_index=IGNORED, **returns)
    elif isinstance(z, TracedLogits) and not z.materialized:
        op: Any = functools.partial(liger.fused_linear_logit_statistics, target=target, ignore_index=IGNORED, **returns)
        rows = z.run(lambda x, weight, bias, **how: op(x, weight, bias=bias, **how))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    else:
        rows = liger.logit_statistics(materialize(z), target, ignore_index=IGNORED, **returns)
    return (
        rows.picked - rows.lse,
        rows.entropy,
        rows.log_sum_squares,
        None if rows.total is None else rows.total.detach() / z.shape[-1],
        None if rows.best_index is None else rows.best_index == target,
    )


def spare_deferred_logits() -> None:
    """Let TRL compute log-probabilities of deferred logits by PyTorch's functions, and not by its kernel, which reads memory."""
    utils: Any = sys.modules.get("trl.trainer.utils")
    supports = getattr(utils, "_supports_trl_loss_kernel", None)
    if supports is None or hasattr(supports, "liger_replaces"):
        return

    @functools.wraps(supports)
    def spared(logits: Any, *args: Any, **kwargs: Any) -> bool:
        return not waits(logits, Form) and supports(logits, *args, **kwargs)

    spared.liger_replaces = supports  # type: ignore[attr-defined]
    utils._supports_trl_loss_kernel = spared


def fused_head(method: Any) -> FusedHead | None:
    """TRL's fused head, if `method` is one that this module has not replaced yet.

    RuntimeError: it is one, but of a TRL whose forward differs from TRL 1.16's.
    """
    forward = getattr(method, "__func__", None)
    if not _takes_the_flag(forward) or hasattr(forward, "liger_replaces"):
        return None
    variables = inspect.getclosurevars(forward).nonlocals
    result = forward.__globals__.get("FusedCausalLMOutput")
    if result is None or not {*CLOSED_OVER} <= {*variables} or not {*variables["outputs"]} <= {"log_probs", *FIELDS}:
        raise RuntimeError(
            f"liger_transformers.apply(model, trl=True) serves the fused head of TRL 1.16, and {forward.__module__} binds "
            "another one; install trl>=1.16,<1.17, or pass trl=False: TRL's own head then runs on the swapped model"
        )
    return FusedHead(forward, **{name: variables[name] for name in CLOSED_OVER}, result=result)


def _takes_the_flag(function: Any) -> TypeGuard[types.FunctionType]:
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    return "fused_lm_head" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def serves(method: Any) -> bool | None:
    """Whether a bound forward, or one that it wraps as accelerate's does, serves TRL's fused head (True) or is that head (False).

    None if it is neither.
    """
    function = getattr(method, "__func__", method)
    while function is not None:
        if hasattr(function, "liger_replaces") or _takes_the_flag(function):
            return hasattr(function, "liger_replaces")
        function = getattr(function, "__wrapped__", None)
    return None
