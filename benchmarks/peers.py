"""What the kernels are compared with: the formula that a user of PyTorch writes, and the functions of other libraries.

Each function is named after its op and takes the contract's arguments by name, those of the timed cases. A case with
another option is a TypeError, which `compare.py` reports.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Functions = dict[str, Callable[..., Any]]


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Eager:
    """PyTorch's own function where there is one, else the formula, in float32 where bfloat16 would not do."""

    @staticmethod
    def attn_res(blocks: Tensor, partial: Tensor, query: Tensor, weight: Tensor) -> Tensor:
        v = torch.cat((blocks, partial[None]))
        scores = F.rms_norm(v, v.shape[-1:], weight, 1e-6) @ query
        return torch.einsum("n...,n...d->...d", torch.softmax(scores.float(), 0).to(v.dtype), v)

    @staticmethod
    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)

    @staticmethod
    def distillation(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, hard_weight: float) -> Tensor:
        student, teacher = torch.log_softmax(student_logits.float(), -1), torch.log_softmax(teacher_logits.float(), -1)
        return Eager.jsd(student, teacher) + hard_weight * F.nll_loss(student, labels)

    @staticmethod
    def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return gamma * torch.tanh(alpha * x) + beta

    @staticmethod
    def embedding(indices: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(indices, weight)

    @staticmethod
    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h

    @staticmethod
    def fused_linear_cross_entropy(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ linear_weight.T).float(), target)

    @staticmethod
    def fused_linear_distillation(
        student_x: Tensor,
        student_weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        labels: Tensor,
        hard_weight: float,
    ) -> Tensor:
        return Eager.distillation(student_x @ student_weight.T, teacher_x @ teacher_weight.T, labels, hard_weight)

    @staticmethod
    def fused_linear_jsd(
        student_x: Tensor, student_weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor
    ) -> Tensor:
        student = torch.log_softmax((student_x @ student_weight.T).float(), -1)
        return Eager.jsd(student, torch.log_softmax((teacher_x @ teacher_weight.T).float(), -1))

    @staticmethod
    def fused_linear_kl_div(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(torch.log_softmax((x @ linear_weight.T).float(), -1), target.float(), reduction="batchmean")

    @staticmethod
    def fused_linear_logit_statistics(x: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x @ linear_weight.T).float()
        return logits.logsumexp(-1), logits.gather(-1, target[:, None])[:, 0]

    @staticmethod
    def fused_moe(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_indices: Tensor, expert_weights: Tensor
    ) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(gate_up_weight.shape[0]):
            token, slot = torch.where(expert_indices == expert)
            gate, up = (x[token] @ gate_up_weight[expert].T).chunk(2, -1)
            z = (F.silu(gate) * up) @ down_weight[expert].T
            y.index_add_(0, token, (z * expert_weights[token, slot, None]).to(y.dtype))
        return y

    @staticmethod
    def fused_neighborhood_attention(q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7) -> Tensor:
        position = torch.arange(q.shape[2], device=q.device)
        near = (position[:, None] - position).abs() <= kernel_size // 2
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)

    @staticmethod
    def gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)

    @staticmethod
    def geglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up

    @staticmethod
    def group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, weight, bias, 1e-5)

    @staticmethod
    def grpo_loss(
        logits: Tensor,
        old_logps: Tensor,
        ref_logps: Tensor,
        completion_ids: Tensor,
        advantages: Tensor,
        completion_mask: Tensor,
    ) -> Tensor:
        logps = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, completion_ids[..., None])[..., 0]
        ratio = (logps - old_logps).exp()
        loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        loss = loss + 0.04 * ((ref_logps - logps).exp() - (ref_logps - logps) - 1)
        return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1)).mean()

    @staticmethod
    def jsd(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        student, teacher = student_logprobs.float(), teacher_logprobs.float()
        mixture = torch.logaddexp(student, teacher) - math.log(2)
        divergence = (teacher.exp() * (teacher - mixture)).sum(-1) + (student.exp() * (student - mixture)).sum(-1)
        return 0.5 * divergence.mean()

    @staticmethod
    def kl_div(log_pred: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
        return F.kl_div(log_pred.float(), target.float(), reduction="batchmean", log_target=log_target)

    @staticmethod
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    @staticmethod
    def llama4_rope(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        def rotated(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3).to(x.dtype)

        return rotated(q), rotated(k)

    @staticmethod
    def logit_statistics(logits: Tensor, target: Tensor, return_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        z = logits.float()
        lse = z.logsumexp(-1)
        log_p = z - lse[:, None]
        return lse, z.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    @staticmethod
    def modulated_rms_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6) * (1 + scale) + shift

    @staticmethod
    def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = x.float()
        powers = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-6) for p in (wide**3, wide**2, wide)]
        return (weight[0] * powers[0] + weight[1] * powers[1] + weight[2] * powers[2] + bias).to(x.dtype)

    @staticmethod
    def qwen2vl_mrope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        def picked(table: Tensor) -> Tensor:
            return torch.cat([part[i % 3] for i, part in enumerate(table.split([*mrope_section] * 2, -1))], -1)

        return Eager.rope(q, k, picked(cos), picked(sin))

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)

    @staticmethod
    def mhc_post(f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> Tensor:
        return (post[..., None] * f[..., None, :] + torch.einsum("...io,...ic->...oc", res, x.float())).to(x.dtype)

    @staticmethod
    def mhc_pre(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n, v = x.shape[-2], x.flatten(-2).float()
        pre, post, res = F.linear(F.rms_norm(v, v.shape[-1:], None, 1e-6), weight.float()).split((n, n, n * n), -1)
        pre = torch.sigmoid(alpha[0] * pre + bias[:n])
        post = 2 * torch.sigmoid(alpha[1] * post + bias[n : 2 * n])
        res = torch.softmax((alpha[2] * res + bias[2 * n :]).unflatten(-1, (n, n)), -1) + 1e-6
        for step in range(39):
            res = res / (res.sum(-1 if step % 2 else -2, keepdim=True) + 1e-6)
        return torch.einsum("...n,...nc->...c", pre, x.float()).to(x.dtype), pre, post, res

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    @staticmethod
    def softmax(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    @staticmethod
    def relu_squared(x: Tensor) -> Tensor:
        return F.relu(x).square()

    @staticmethod
    def sparsemax(x: Tensor) -> Tensor:
        wide = x.float()
        descending = wide.sort(-1, descending=True).values
        excess = descending.cumsum(-1) - 1
        support = (descending > excess / torch.arange(1, x.shape[-1] + 1, device=x.device)).sum(-1, keepdim=True)
        return F.relu(wide - excess.gather(-1, support - 1) / support).to(x.dtype)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def tvd(p: Tensor, q: Tensor) -> Tensor:
        return 0.5 * (p.float() - q.float()).abs().sum() / p.shape[0]


def eager() -> Functions:
    """Each op as a user of PyTorch writes it."""
    return {name: getattr(Eager, name) for name in vars(Eager) if not name.startswith("_")}


def compiled() -> Functions:
    """The same through torch.compile, for the very shapes of a case.

    Of `fused_moe` it is PyTorch's grouped product: a loop over experts is a graph for each of them.
    """
    torch.compiler.reset()  # else the graphs of earlier cases count towards the limit of recompilations
    return {name: torch.compile(function, dynamic=False) for name, function in (eager() | grouped()).items()}


def grouped() -> Functions:
    """What PyTorch's grouped product makes quicker than a loop. For torch 2.10 and later."""

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


def _liger_distillation(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    hard_weight: float,
) -> Any:
    """liger-kernel's chunked loss: plain PyTorch through torch.compile, whatever the language."""
    losses = import_module("liger_kernel.chunked_loss")
    loss = losses.LigerFusedLinearJSDLoss(hard_weight, 1.0)
    return loss(student_x, student_weight, teacher_x, teacher_weight, labels)


def liger(module: str = "liger_kernel.ops") -> Functions:
    """liger-kernel 0.8.5 through its autograd Functions, with the contract's options and otherwise its own defaults.

    Args:
        module: ``liger_kernel.ops`` has the Functions in Triton, ``liger_kernel.ops.cutile.ops`` those in cuTile.

    Raises:
        ImportError: liger-kernel isn't installed, or lacks what `module` needs.
    """
    ops = import_module(module)

    def mhc_pre(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        options = x.dtype is torch.float32, 20, 1e-6, 0.0, 1e-6, 2.0
        coefficients = ops.LigerMHCCoeffsFunction.apply(x, weight.T, bias, *alpha.unbind(), *options)
        return ops.LigerMHCPreFunction.apply(x, coefficients[0]), *coefficients

    return {
        "attn_res": lambda blocks, partial, query, weight: ops.LigerAttnResFunction.apply(
            torch.cat((blocks, partial[None])), query, weight, 1e-6
        ),
        "cross_entropy": lambda logits, target: ops.LigerCrossEntropyFunction.apply(logits, target, None)[0],
        "dyt": lambda x, alpha, gamma, beta: ops.LigerDyTFunction.apply(x, alpha, gamma, beta),
        "embedding": lambda indices, weight: ops.LigerEmbeddingFunction.apply(weight, indices),
        "fused_add_rms_norm": lambda x, residual, weight: ops.LigerFusedAddRMSNormFunction.apply(
            x, residual, weight, 1e-6, 0.0, "llama", False
        ),
        "fused_linear_cross_entropy": lambda x, linear_weight, target: ops.LigerFusedLinearCrossEntropyFunction.apply(
            x, linear_weight, target
        )[0],
        "fused_linear_distillation": _liger_distillation,
        "fused_linear_jsd": lambda student_x, student_weight, teacher_x, teacher_weight: (
            ops.LigerFusedLinearJSDFunction.apply(student_x, student_weight, teacher_x, teacher_weight)
        ),
        "fused_linear_kl_div": lambda x, linear_weight, target: ops.LigerFusedLinearKLDivFunction.apply(
            x, linear_weight, target
        ),
        "fused_moe": lambda x, gate_up_weight, down_weight, expert_indices, expert_weights: (
            ops.LigerFusedMoEFunction.apply(x, gate_up_weight, down_weight, expert_indices.int(), expert_weights)
        ),
        "fused_neighborhood_attention": lambda q, k, v: ops.LigerFusedNeighborhoodAttentionFunction.apply(
            q, k, v, 7, 1, None
        ),
        "gated_mlp": lambda x, gate_weight, up_weight, down_weight: ops.LigerMLPFunction.apply(
            x[None], gate_weight, up_weight, down_weight, 1.0, 1.0
        )[0],
        "geglu": lambda gate, up: ops.LigerGELUMulFunction.apply(gate, up),
        "group_norm": lambda x, num_groups, weight, bias: ops.LigerGroupNormFunction.apply(
            x, weight, bias, x.shape[1], num_groups, 1e-5
        ),
        "grpo_loss": lambda logits, old_logps, ref_logps, completion_ids, advantages, completion_mask: (
            ops.GrpoLossFunction.apply(
                logits, old_logps, ref_logps, completion_ids, advantages, completion_mask, 1.0, 0.04, 0.2, 0.2, False
            )[0]
        ),
        "jsd": lambda student_logprobs, teacher_logprobs: ops.LigerJSDFunction.apply(
            student_logprobs, teacher_logprobs, None, 0.5, -100
        ),
        "kl_div": lambda log_pred, target, log_target=False: ops.LigerKLDivLossFunction.apply(
            log_pred, target, "batchmean", log_target, 1e-10
        ),
        "layer_norm": lambda x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, 1e-5),
        "llama4_rope": lambda q, k, freqs_cis: ops.LigerLlama4RopeFunction.apply(q, k, freqs_cis),
        "mhc_post": lambda f, x, post, res: ops.LigerMHCPostResFunction.apply(x, f, post, res.transpose(-1, -2)),
        "mhc_pre": mhc_pre,
        "modulated_rms_norm": lambda x, weight, scale, shift: ops.LigerModulatedRMSNormFunction.apply(
            x, weight, scale, shift, 1e-6, 0.0, "llama", False
        ),
        "poly_norm": lambda x, weight, bias: ops.LigerPolyNormFunction.apply(x, weight, bias, 1e-6, False),
        "qwen2vl_mrope": lambda q, k, cos, sin, mrope_section: ops.LigerQwen2VLMRopeFunction.apply(
            q, k, cos, sin, [*mrope_section]
        ),
        "relu_squared": lambda x: ops.LigerReLUSquaredFunction.apply(x),
        "rms_norm": lambda x, weight: ops.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False),
        "rope": lambda q, k, cos, sin: ops.LigerRopeFunction.apply(q, k, cos, sin),
        "softmax": lambda x: ops.LigerSoftmaxFunction.apply(x),
        "sparsemax": lambda x: ops.LigerSparsemaxFunction.apply(x, -1),
        "swiglu": lambda gate, up: ops.LigerSiLUMulFunction.apply(gate, up),
        "tvd": lambda p, q: ops.LigerTVDLossFunction.apply(p, q),
    }


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
