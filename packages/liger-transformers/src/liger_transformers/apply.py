"""Swap the leaf modules of one model for liger_core's ops, and undo it."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

import liger_core as liger
from liger_core.checks import flag
from liger_transformers.activations import activations
from liger_transformers.experts import experts as mixture_experts
from liger_transformers.experts import gate as own_gate
from liger_transformers.head import Lazy, head_of, swap_head
from liger_transformers.lean import layer
from liger_transformers.mlp import mlp as gated_mlp
from liger_transformers.norms import norm
from liger_transformers.rotary import OPS as ROTARY_OPS
from liger_transformers.rotary import rotary
from liger_transformers.swap import Swap, original_class, replaced_by, swapped_for

log = logging.getLogger("liger_transformers")


@dataclass
class Report:
    """A model's modules, as `apply` swapped or left them.

    Attributes:
        model: the model's class.
        swapped: modules by (what, op with its options), including those that an earlier `apply` swapped.
        left: modules by (what, the reason why they are unchanged).
    """

    model: str
    swapped: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    left: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    @property
    def ops(self) -> dict[str, int]:
        """Swapped modules by op, without options."""
        counts: dict[str, int] = {}
        for (_, op), count in self.swapped.items():
            for name in names(op) if names(op) != ["lean"] else ():
                counts[name] = counts.get(name, 0) + count
        return counts

    def __str__(self) -> str:
        width = max((len(what) for what, _ in (*self.swapped, *self.left)), default=0)
        lines = [self.model]
        for title, counts in (("swapped", self.swapped), ("left as it is", self.left)):
            if counts:
                lines.append(f"  {title}:")
            lines += [f"    {what:{width}}  {count:4} × {why}" for (what, why), count in counts.items()]
        return "\n".join(lines)


def names(swap: str) -> list[str]:
    """The ops of a swap, without their options."""
    return re.sub(r"\(.*?\)", "", swap).split(", ")


# Swaps are proved on the CPU, on which a language that the caller requested may not run.
@liger.use("torch")
def apply(
    model: nn.Module,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    rope: bool = True,
    glu: bool = True,
    mlp: bool = False,
    experts: bool = False,
    loss: bool = True,
    trl: bool = False,
    lazy: Lazy = False,
    lean: bool | None = None,
    strict: bool = True,
) -> Report:
    """Let a transformers model train on liger_core's ops. Only this instance changes, and `restore` undoes it.

    Norms, gated activations, rotary functions and the head are swapped. Before that, each is run beside the op on random
    numbers, and has to be equal. The model's own forward stays. In training with labels the output's logits are None, because
    they are never made. Pass ``skip_logits=False`` to the model to have them, or ``skip_logits=True`` to do without them in
    evaluation.

    You may call it before or after PEFT, FSDP2 and checkpointing, and again: a later call swaps what PEFT has wrapped since,
    such as the head.

    Args:
        model: a transformers model, or a module around one, such as a PeftModel.
        rms_norm: swap norms for `rms_norm`.
        layer_norm: swap norms for `layer_norm`.
        rope: swap rotary functions for `rope`, `qwen2vl_mrope` and `llama4_rope`.
        glu: swap activations for `swiglu`, `geglu` and `relu_squared`.
        mlp: run gated MLPs as `gated_mlp` in gradient checkpointing with ``use_reentrant=False``. It takes less memory and the
            same matrix products, if nothing after the MLP keeps a tensor in its layer, such as a norm of the MLP's result.
        experts: swap the experts of mixtures for `fused_moe`. If no kernel takes the call, the reference runs, which takes
            longer than transformers' grouped products. Without `experts` they stay, and their activation is a gate.
        loss: swap the head and the loss for `fused_linear_cross_entropy`.
        trl: serve the fused head of TRL 1.16's trainers with `fused_linear_logit_statistics`, from the model's own forward.
            Call `apply` before or after the trainer is made.
        lazy: let logits leave the model before they are computed, in training without labels. ``"always"``: in evaluation
            as well, for reference models. Log-probabilities, entropies and cross-entropies of such logits take one op each.
            Anything else that is done to the logits computes them first.
        lean: run the model's layers in `liger_core.lean`: it takes less memory, and another forward of its norms and gates. None:
            in eager mode alone. True: under torch.compile as well.
        strict: raise an error if nothing is swapped. False logs a warning.

    Returns:
        What was swapped, and what was left and why. It prints as a table.

    Raises:
        TypeError: `model` is no module, or a switch is neither True nor False.
        ValueError: nothing in the model could be swapped, and the message says why. Or `lazy` is something else, or `trl` or
            `lazy` is set with ``loss=False``.
        RuntimeError: `trl` is set, and the model has the fused head of another TRL than 1.16.
    """
    _is_module("apply", model)
    switches = {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "glu": glu, "loss": loss}
    flag("liger_transformers.apply", **switches, mlp=mlp, experts=experts, trl=trl, strict=strict)
    if lean is not None:
        flag("liger_transformers.apply", lean=lean)
    if lazy not in (False, True, "always"):
        raise ValueError(f"liger_transformers.apply: lazy is {lazy!r}; it takes False, True or 'always'")
    if (trl or lazy) and not loss:
        raise ValueError("liger_transformers.apply: trl and lazy take loss=True, since the head is what they are about")
    report = Report(type(_pretrained(model) or model).__name__)
    enabled = {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        **dict.fromkeys(ROTARY_OPS, rope),
        "swiglu": glu,
        "geglu": glu,
        "relu_squared": glu,
        "gated_mlp": mlp,
        "fused_moe": experts,
        "lean": lean is not False,
    }
    for module in list(model.modules()):
        if rms_norm or layer_norm:
            _become(module, norm(module), enabled, report)
        if lean is not False:
            _become(module, layer(module, bool(lean)), enabled, report)
        if rope:
            _become(module, rotary(module), enabled, report)
        if mlp:
            _become(module, gated_mlp(module), enabled, report)
        _become(module, mixture_experts(module), enabled, report)
        gates = glu and "fused_moe" not in (swapped_for(module) or "")
        if gates:
            _become(module, own_gate(module), enabled, report, f"{type(module).__name__}._apply_gate")
        for name, child, swap in activations(module) if gates else ():
            if isinstance(swap, type) and swap is not type(child):
                child = copy.copy(child)  # some models share one activation between modules
                module._modules[name] = child
            _become(child, swap, enabled, report, f"{type(module).__name__}.{name}")
    if loss and (pretrained := _pretrained(model)) is not None:
        linears, why = head_of(pretrained, trl, lazy)
        for name in linears or ("head",):
            counts = report.swapped if why is None else report.left
            counts[f"{report.model}.{name}", why or "fused_linear_cross_entropy"] = 1
        if why is None and (op := swap_head(pretrained, linears, lazy, trl)):
            report.swapped[report.model, op] = 1
    if not report.ops:
        off = [name for name, on in switches.items() if not on]
        reasons = "; ".join(f"{what}: {why}" for what, why in report.left)
        if not reasons:
            reasons = f"it holds no {'other ' if off else ''}norm, rotary function, gate or head"
        if off:
            reasons = f"{', '.join(f'{name}=False' for name in off)} left such modules out; {reasons}"
        message = f"liger_transformers.apply swapped nothing in {report.model}: {reasons}"
        if strict:
            raise ValueError(message)
        log.warning(message)
    return report


def _is_module(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"liger_transformers.{function}: model is a {type(model).__name__}; it takes a torch.nn.Module, such as a "
            "transformers model"
        )


def _pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model: the module itself, or one inside PEFT's, DDP's or torch.compile's module."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def _become(module: nn.Module, swap: Swap, enabled: dict[str, bool], report: Report, what: str = "") -> None:
    """Swap the module if every op of its swap is enabled, and report it."""
    if swap is None:
        return
    what = what or type(module).__name__
    if isinstance(swap, str):
        report.left[what, swap] = report.left.get((what, swap), 0) + 1
        return
    op = cast("str", cast("Any", swap).liger_op)
    if all(enabled[name] for name in names(op)):
        module.__class__ = swap
        report.swapped[what, op] = report.swapped.get((what, op), 0) + 1


def restore(model: nn.Module) -> None:
    """Give every module of the model its class from before `apply`. A model without swaps stays as it is."""
    _is_module("restore", model)
    for module in model.modules():
        if swapped_for(module) is not None:
            module.__class__ = original_class(type(module))
        if (replaced := replaced_by(vars(module).get("forward"), module)) is not None:
            module.forward = replaced
