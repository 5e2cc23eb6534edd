"""Functions that the kernels are compared with: the formula that PyTorch users write, and other libraries' functions.

The former, and liger-kernel's functions, are those of the ops' case files. Each takes the contract's arguments by name, those
of the timed cases. A case with another option is a TypeError, which `compare.py` reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_conformance.case import cases_of
from liger_core.contract import ops

Functions = dict[str, Callable[..., Any]]


def eager() -> Functions:
    """Each op as a user of PyTorch writes it."""
    return {op: cases_of(op).eager for op in sorted(ops)}


def compiled() -> Functions:
    """The same through torch.compile, for the very shapes of a case.

    Of `fused_moe` it is PyTorch's grouped product: a loop over experts is a graph for each of them.
    """
    torch.compiler.reset()  # else the graphs of earlier cases count towards the limit of recompilations
    return {name: torch.compile(function, dynamic=False) for name, function in (eager() | grouped()).items()}


def grouped() -> Functions:
    """Functions that PyTorch's grouped product makes quicker than a loop. For torch 2.10 and later."""

    def fused_moe(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_indices: Tensor, expert_weights: Tensor
    ) -> Tensor:
        experts, slots = expert_indices.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(1, len(gate_up_weight) + 1, device=x.device)).to(torch.int32)
        token = slots // expert_indices.shape[1]
        gate, up = F.grouped_mm(x[token], gate_up_weight.transpose(1, 2), offs=ends).chunk(2, -1)
        z = F.grouped_mm(F.silu(gate) * up, down_weight.transpose(1, 2), offs=ends)
        weighted = (z * expert_weights.flatten()[slots, None]).to(x.dtype)
        return torch.zeros_like(x).index_add_(0, token, weighted)

    return {"fused_moe": fused_moe}


def liger(module: str = "liger_kernel.ops") -> Functions:
    """liger-kernel 0.8.5 through its autograd Functions, with the contract's options and otherwise its own defaults.

    Args:
        module: ``liger_kernel.ops`` has the Functions in Triton, ``liger_kernel.ops.cutile.ops`` those in cuTile.

    Raises:
        ImportError: liger-kernel isn't installed, or lacks what `module` needs.
    """
    functions = import_module(module)
    return {op: partial(function, functions) for op in sorted(ops) if (function := cases_of(op).liger) is not None}


def liger_cutedsl() -> Functions:
    """liger-kernel 0.8.5's functions in CuTe DSL, demanded by name: where that can't run, they raise.

    For that LIGER_KERNEL_STRICT is set, for the whole process; else kl_div, though demanded in CuTe DSL, runs in Triton
    where rows are long.

    Raises:
        ImportError: liger-kernel isn't installed.
    """
    functional = import_module("liger_kernel.functional")
    os.environ["LIGER_KERNEL_STRICT"] = "1"
    impl = "nvidia-cutedsl"
    return {
        "cross_entropy": lambda logits, target: functional.cross_entropy(logits, target, impl=impl)[0],
        "fused_add_rms_norm": lambda x, residual, weight: functional.fused_add_rms_norm(
            x, residual, weight, 1e-6, impl=impl
        ),
        "fused_linear_cross_entropy": lambda x, linear_weight, target: functional.fused_linear_cross_entropy(
            x, linear_weight, target, impl=impl
        )[0],
        "fused_linear_jsd": lambda student_x, student_weight, teacher_x, teacher_weight: functional.fused_linear_jsd(
            student_x, student_weight, teacher_x, teacher_weight, impl=impl
        ),
        "geglu": lambda gate, up: functional.geglu(gate, up, impl=impl),
        "jsd": lambda student_logprobs, teacher_logprobs: functional.jsd(student_logprobs, teacher_logprobs, impl=impl),
        "kl_div": lambda log_pred, target, log_target=False: functional.kl_div(
            log_pred, target, log_target=log_target, impl=impl
        ),
        "layer_norm": lambda x, weight, bias: functional.layer_norm(x, weight, bias, 1e-5, impl=impl),
        "rms_norm": lambda x, weight: functional.rms_norm(x, weight, 1e-6, impl=impl),
        "rope": lambda q, k, cos, sin: functional.rope(q, k, cos, sin, impl=impl),
        "softmax": lambda x: functional.softmax(x, impl=impl),
        "swiglu": lambda gate, up: functional.swiglu(gate, up, impl=impl),
    }


def quack() -> Functions:
    """quack-kernels 0.6.5, in CuTe DSL: the ops that it differentiates and that take the contract's layout.

    Raises:
        ImportError: quack-kernels isn't installed, or lacks what it needs.
    """
    library = import_module("quack")

    def linear_cross_entropy(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        # Imported when called: the other ops don't need what this module needs.
        module = import_module("quack.linear_cross_entropy")
        return module.chunked_linear_cross_entropy(x, linear_weight, target)

    return {
        "cross_entropy": lambda logits, target: library.cross_entropy(logits, target),
        "fused_add_rms_norm": lambda x, residual, weight: library.rmsnorm(
            x, weight, residual=residual, eps=1e-6, prenorm=True
        ),
        "fused_linear_cross_entropy": linear_cross_entropy,
        "rms_norm": lambda x, weight: library.rmsnorm(x, weight, eps=1e-6),
        "softmax": lambda x: library.softmax(x),
    }
