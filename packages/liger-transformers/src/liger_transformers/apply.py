"""Swap the leaf modules of one model for liger_core's ops, and undo it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
from liger_core.checks import flag
from liger_transformers.activations import GATED, activation_call, activations
from liger_transformers.experts import experts as mixture_experts
from liger_transformers.experts import gate as own_gate
from liger_transformers.head import Lazy, LossOptions, head_of, head_options, swap_head
from liger_transformers.layers import LEAN, SHARED, layer
from liger_transformers.linear import LOSS_OPTIONS
from liger_transformers.mlp import SCALED_MLP
from liger_transformers.mlp import mlp as gated_mlp
from liger_transformers.norms import norm
from liger_transformers.rotary import OPS as ROTARY_OPS
from liger_transformers.rotary import rotary
from liger_transformers.scaled import OP as SCALED
from liger_transformers.scaled import linears, matches, named_modules, scaled
from liger_transformers.swap import Swap, original_class, replaced_by, set_class, swapped_for
from liger_transformers.trl import serves

QUANTIZED_BY = {SCALED: "quantize", SCALED_MLP: "quantize_gated"}
"""The op whose kernel quantizes for a function of liger_core that is no op itself."""

log = logging.getLogger("liger_transformers")


@dataclass
class Report:
    """A model's modules, as `apply` swapped or left them.

    Attributes:
        model: the model's class.
        swapped: modules by (what, op with its options), including those that an earlier `apply` swapped.
        left: modules by (what, the reason why they are unchanged).
        kernels: the language that runs the ops, for each device type on which the model has parameters. A kernel may still refuse
            a call: `liger_core.explain` with the call's arguments says so.
    """

    model: str
    swapped: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    left: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    kernels: list[str] = field(default_factory=list[str])

    @property
    def ops(self) -> dict[str, int]:
        """Swapped modules by op, without options."""
        counts: dict[str, int] = {}
        for (_, op), count in self.swapped.items():
            for name in names(op):
                counts[name] = counts.get(name, 0) + count
        return {name: count for name, count in counts.items() if name not in (LEAN, SHARED)}

    def __str__(self) -> str:
        width = max((len(what) for what, _ in (*self.swapped, *self.left)), default=0)
        lines = [self.model, *(() if self.swapped else ("  nothing is swapped",))]
        for title, counts in (("swapped", self.swapped), ("left as it is", self.left)):
            if counts:
                lines.append(f"  {title}:")
            lines += [f"    {what:{width}}  {count:4} × {why}" for (what, why), count in counts.items()]
        return "\n".join([*lines, *(f"  {line}" for line in self.kernels)])


def names(swap: str) -> list[str]:
    """The ops of a swap, without their options."""
    return re.sub(r"\(.*?\)", "", swap).split(", ")


def apply(
    model: nn.Module,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    rope: bool = True,
    glu: bool = True,
    mlp: bool = False,
    experts: bool = False,
    loss: bool | Mapping[str, Any] = True,
    trl: bool = False,
    lazy: Lazy = False,
    lean: bool | None = None,
    precision: str | None = None,
    skip: Sequence[str] = (),
    strict: bool = True,
) -> Report:
    """Let a transformers model train on liger_core's ops. Only this instance changes, and `restore` undoes it.

    Norms, gated activations, rotary functions and the head are swapped. Before that, each is run beside the op on random
    numbers, and has to be equal. The model's own forward stays. In training with labels the output's logits are made only if
    somebody reads them; under torch.compile they are None. Pass ``skip_logits=False`` to the model to have them, or
    ``skip_logits=True`` to do without them in evaluation.

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
        loss: swap the head and the loss for `fused_linear_cross_entropy`. A dict has options of it: ``lse_square_scale`` (z-loss)
            and ``token_scaling``, which are for training, ``accum_dtype`` and ``memory_budget``. If the logits are made before
            the loss, which then lacks one of the first two, the model's forward raises RuntimeError.
        trl: serve the fused head of TRL 1.16's trainers with `fused_linear_logit_statistics`, from the model's own forward.
            Call `apply` before or after the trainer is made.
        lazy: let logits leave the model before they are computed, in training without labels. ``"always"``: in evaluation
            as well, for reference models. Log-probabilities, entropies and cross-entropies of such logits take one op each.
            Anything else that is done to the logits computes them first.
        lean: run the model's layers in `liger_core.lean`: it takes less memory, and another forward of its norms and gates. None:
            in eager mode alone. True: under torch.compile as well.
        precision: ``"fp8"``: linear layers inside of the model's layers run as `liger_core.scaled_linear`, with operands in 8
            bits, on an NVIDIA GPU of compute capability 9.0; on a CPU with the same numbers, slowly. Those that get the same
            tensor one after another, such as q, k and v, quantize it once, and a gated MLP is `scaled_gated_mlp`, but under
            torch.compile. The head, embeddings, adapters and weights stay as they are, and so do layers whose sizes are no
            multiples of 16.
        skip: names of modules, or parts of them such as ``"layers.0"`` or ``"mlp.down_proj"``, that `precision` leaves out.
        strict: raise an error if nothing is swapped. False logs a warning.

    Returns:
        What was swapped, and what was left and why. It prints as a table.

    Raises:
        TypeError: `model` is no module, a switch is neither True nor False, or `loss` is no dict either.
        ValueError: nothing in the model could be swapped, and the message says why. Or `lazy` is something else, `loss` has an
            unknown option, `trl` or `lazy` is set with ``loss=False``, or `trl` with options of the loss. Or `precision` is
            unknown, or `skip` is set without it or names nothing.
        RuntimeError: `trl` is set, and the model has the fused head of another TRL than 1.16.
    """
    _is_module("apply", model)
    options, loss = _loss_options(loss), loss is not False
    switches = {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "glu": glu, "loss": loss}
    flag("liger_transformers.apply", **switches, mlp=mlp, experts=experts, trl=trl, strict=strict)
    if lean is not None:
        flag("liger_transformers.apply", lean=lean)
    if lazy not in (False, True, "always"):
        raise ValueError(f"liger_transformers.apply: lazy is {lazy!r}; it takes False, True or 'always'")
    if (trl or lazy) and not loss:
        raise ValueError("liger_transformers.apply: trl and lazy take loss=True, since the head is what they are about")
    if trl and options:
        raise ValueError(
            "liger_transformers.apply: loss has options, which the loss of TRL's head, by trl=True, doesn't take"
        )
    if precision not in (None, "fp8"):
        raise ValueError(f"liger_transformers.apply: precision is {precision!r}; it takes None or 'fp8'")
    _check_skip(model, precision, skip)
    kinds = _kinds(rms_norm, layer_norm, rope, glu, mlp, experts, lean is not False, precision is not None)
    found = _swap(model, kinds, bool(lean), (trl, lazy, options) if loss else None, skip)
    if not found.ops:
        off = [name for name, on in switches.items() if not on]
        reasons = "; ".join(f"{what}: {why}" for what, why in found.left)
        if not reasons:
            reasons = f"it holds no {'other ' if off else ''}norm, rotary function, gate or head"
        if off:
            reasons = f"{', '.join(f'{name}=False' for name in off)} left such modules out; {reasons}"
        message = f"liger_transformers.apply swapped nothing in {found.model}: {reasons}"
        if strict:
            raise ValueError(message)
        log.warning(message)
    found.kernels = _kernels(found, model)
    return found


def _check_skip(model: nn.Module, precision: str | None, skip: Any) -> None:
    if isinstance(skip, str) or not all(isinstance(part, str) for part in skip):
        raise TypeError(f"liger_transformers.apply: skip is {skip!r}; it takes a list of modules' names")
    if skip and precision is None:
        raise ValueError("liger_transformers.apply: skip takes precision='fp8', since it is what it is about")
    for part in skip:
        if not any(matches(name, part) for name, module in named_modules(model) if isinstance(module, nn.Linear)):
            raise ValueError(f"liger_transformers.apply: skip has {part!r}, which no linear layer's name has")


@liger.use("torch")
def _loss_options(loss: Any) -> LossOptions:
    """The options in apply's `loss`, which the op itself checks."""
    if isinstance(loss, bool):
        return ()
    if not isinstance(loss, Mapping):
        raise TypeError(f"liger_transformers.apply: loss is {loss!r}; it takes True, False or a dict of options")
    options = cast("Mapping[str, Any]", loss)
    if unknown := [name for name in options if name not in LOSS_OPTIONS]:
        names = ", ".join(map(repr, unknown))
        raise ValueError(f"liger_transformers.apply: loss has {names}; it takes {', '.join(LOSS_OPTIONS)}")
    x = torch.zeros(1, 1)
    liger.fused_linear_cross_entropy(x, x, torch.zeros(1, dtype=torch.int64), **options)
    return tuple(options.items())


def report(model: nn.Module) -> Report:
    """The report of `apply` for the model as it is now: its swaps, and the modules that are left and why. Nothing is swapped.

    It is read from the modules. So it is right for a copy of the model, and after PEFT has changed the model.

    Raises:
        TypeError: `model` is no module.
    """
    _is_module("report", model)
    swaps = {swapped_for(module) or "" for module in model.modules()}
    kinds = _kinds(mlp=any("gated_mlp" in swap for swap in swaps), precision=SCALED in swaps)
    lazy, trl, options = head_options(pretrained_in(model))
    found = _swap(model, kinds, False, (trl, lazy, options), look=True)
    found.kernels = _kernels(found, model)
    return found


def _kinds(
    rms_norm: bool = True,
    layer_norm: bool = True,
    rope: bool = True,
    glu: bool = True,
    mlp: bool = False,
    experts: bool = False,
    lean: bool = True,
    precision: bool = False,
) -> dict[str, bool]:
    """By op, whether modules are swapped for it."""
    return {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        **dict.fromkeys(ROTARY_OPS, rope),
        **dict.fromkeys(GATED, glu),
        "gated_mlp": mlp,
        "fused_moe": experts,
        LEAN: lean,
        SCALED: precision,
        SCALED_MLP: precision,
        SHARED: precision,
    }


# Swaps are proved on the CPU, on which a language that the caller requested may not run.
@liger.use("torch")
def _swap(
    model: nn.Module,
    kinds: dict[str, bool],
    compiled: bool,
    head: tuple[bool, Lazy, LossOptions] | None,
    skip: Sequence[str] = (),
    look: bool = False,
) -> Report:
    """Swap the modules of these kinds, and the head for (`trl`, `lazy`, options of the loss); or only `look` for swapped ones."""
    report = Report(type(pretrained_in(model) or model).__name__)

    def become(module: nn.Module, swap: Swap, what: str = "") -> None:
        """Swap the module if every op of its swap is enabled, and report it."""
        what = what or type(module).__name__
        if isinstance(swap, str):
            _count(report.left, what, swap)
        elif swap is not None:
            op = cast("str", cast("Any", swap).liger_op)
            if look:
                swap = type(module)
            if swapped_for(module) == op if look else all(kinds[name] for name in names(op)):
                set_class(module, swap)
                _count(report.swapped, what, op)

    for name, module in named_modules(model):
        if kinds[SCALED] and isinstance(module, GradientCheckpointingLayer):
            for path, linear, adapter in linears(module, name):
                become(linear, scaled(path, linear, adapter, skip))
        if kinds["rms_norm"] or kinds["layer_norm"]:
            become(module, norm(module))
        if kinds[LEAN] or kinds[SCALED]:
            become(module, layer(module, None if look else kinds[LEAN], compiled))
        if kinds["rope"]:
            become(module, rotary(module))
        if kinds["gated_mlp"] or kinds[SCALED_MLP]:
            become(module, gated_mlp(module, scaled=kinds[SCALED_MLP]))
        become(module, mixture_experts(module))
        gates = kinds["swiglu"] and "fused_moe" not in (swapped_for(module) or "")
        if gates:
            become(module, own_gate(module), f"{type(module).__name__}._apply_gate")
            become(module, activation_call(module))
        for name, child, swap in activations(module) if gates else ():
            if not look and isinstance(swap, type) and swap is not type(child):
                child = copy.copy(child)  # some models share one activation between modules
                module._modules[name] = child
            become(child, swap, f"{type(module).__name__}.{name}")
    if head is not None and (pretrained := pretrained_in(model)) is not None:
        _swap_head(pretrained, *head, report, look)
    return report


def _swap_head(model: PreTrainedModel, trl: bool, lazy: Lazy, options: LossOptions, report: Report, look: bool) -> None:
    """Swap the head and the model's class, or only `look` at them, and report both."""
    linears, why = head_of(model, trl, lazy)
    swapped = why is None
    if look:
        # A forward that was bound after the swap calls it. TRL's doesn't.
        swapped = swapped_for(model) is not None and serves(vars(model).get("forward")) is not False
        if why is None and not swapped:
            return
    op = swapped_for(model) if look else swap_head(model, linears, lazy, trl, options) if swapped else ""
    described = ", ".join(f"{name}={value!r}" for name, value in head_options(model)[2])
    loss = f"fused_linear_cross_entropy({described})" if described else "fused_linear_cross_entropy"
    for name, linear in linears.items() or (("head", model),):
        reason = why
        if swapped:
            reason = None if swapped_for(linear) is not None else why or "it came after the swap; call apply again"
        _count(report.left if reason else report.swapped, f"{report.model}.{name}", reason or loss)
    if swapped and op:
        _count(report.swapped, report.model, op)


def _count(counts: dict[tuple[str, str], int], what: str, why: str) -> None:
    counts[what, why] = counts.get((what, why), 0) + 1


def _kernels(report: Report, model: nn.Module) -> list[str]:
    """The report's `kernels`, as the dispatcher chooses them now. A model on the meta device runs nowhere and has none."""
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return [_kernels_on(device, sorted(report.ops)) for device in sorted(devices) if report.ops]


def _kernels_on(device: str, ops: list[str]) -> str:
    """The line of a device in `Report.kernels`."""
    languages: dict[str, list[str]] = {}
    for op in ops:
        try:
            resolution = liger.explain(QUANTIZED_BY.get(op, op), device=device)
        except liger.Unsupported as error:
            return f"no kernel: calls on {device} raise Unsupported: {error}"
        if resolution.chosen is None:
            return f"no kernel: {op} on {device} raises Unsupported: {resolution.candidates[0].why_not}"
        languages.setdefault(resolution.chosen.language, []).append(op)
    if [*languages] == ["torch"]:
        return f"no kernel: PyTorch reference on {device}"
    if len(languages) == 1:
        return f"kernels: {next(iter(languages))} on {device}"
    parts = [f"{'PyTorch reference' if one == 'torch' else one} ({', '.join(its)})" for one, its in languages.items()]
    return f"kernels: {'; '.join(parts)} on {device}"


def _is_module(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"liger_transformers.{function}: model is a {type(model).__name__}; it takes a torch.nn.Module, such as a "
            "transformers model"
        )


def pretrained_in(model: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model: the module itself, or one inside PEFT's, DDP's or torch.compile's module."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def restore(model: nn.Module) -> None:
    """Give every module of the model its class from before `apply`. A model without swaps stays as it is."""
    _is_module("restore", model)
    for module in model.modules():
        if swapped_for(module) is not None:
            set_class(module, original_class(type(module)))
        if (replaced := replaced_by(vars(module).get("forward"), module)) is not None:
            module.forward = replaced
