"""The host code of mhc_pre, by kernels in PyTorch that take what a language's take."""

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core.contract import Saved
from liger_core.host.mhc_pre import Coefficients, MHCPreHost, MHCPreKernels
from liger_core.ops.mhc_pre import MHCPre, mhc_pre

NAMES = ("x", "weight", "bias", "alpha")
DEFAULTS: dict[str, Any] = {
    "iterations": 20,
    "norm_eps": 1e-6,
    "sinkhorn_eps": 1e-6,
    "pre_eps": 0.0,
    "post_multiplier": 2.0,
}


def _made(m: Tensor, bias: Tensor, alpha: Tensor, streams: int, options: Coefficients) -> list[Tensor]:
    """pre, and if there are as many products post and res, of the products of each row."""
    pre = torch.sigmoid(alpha[0] * m[:, :streams] + bias[:streams]) + options.pre_eps
    if m.shape[1] == streams:
        return [pre]
    columns = slice(streams, 2 * streams)
    post = options.post_multiplier * torch.sigmoid(alpha[1] * m[:, columns] + bias[columns])
    logits = (alpha[2] * m[:, 2 * streams :] + bias[2 * streams :]).view(-1, streams, streams)
    res = logits.softmax(-1) + options.sinkhorn_eps
    res = res / (res.sum(-2, keepdim=True) + options.sinkhorn_eps)
    for _ in range(options.iterations - 1):
        for dim in (-1, -2):
            res = res / (res.sum(dim, keepdim=True) + options.sinkhorn_eps)
    return [pre, post, res]


class Kernels(MHCPreKernels):
    """The formulas; sums over rows come in two parts."""

    def forward(
        self,
        results: MHCPre,
        m: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        alpha: Tensor,
        options: Coefficients,
    ) -> None:
        (h, *coefficients), (streams, width) = results, x.shape[-2:]
        v = x.reshape(-1, streams * width).float()
        r = torch.rsqrt(v.square().mean(1, keepdim=True) + options.norm_eps)
        products = v @ weight.float().T * r
        for to, made in zip(coefficients, _made(products, bias, alpha, streams, options), strict=False):
            assert to is not None
            to.copy_(made)
        h.copy_((results.pre[:, :, None] * v.view(-1, streams, width)).sum(1))
        if m is not None:
            m.copy_(torch.cat([products, r], 1))

    def dot(self, dots: Tensor, dh: Tensor, x: Tensor) -> None:
        dots.copy_((dh.float()[..., None, :] * x.float()).sum(-1).view(dots.shape))

    def plan(
        self,
        plan: Tensor,
        rest: Tensor,
        dots: Tensor | None,
        dpre: Tensor | None,
        dpost: Tensor | None,
        dres: Tensor | None,
        m: Tensor,
        bias: Tensor,
        alpha: Tensor,
        columns: int,
        options: Coefficients,
    ) -> Tensor:
        streams, count = rest.shape[1] - 1, bias.shape[0]
        leaves = [t.detach().float().requires_grad_() for t in (m[:, :-1], bias, alpha)]
        with torch.enable_grad():
            results = _made(*leaves, streams, options)
            total = (results[0] * 0.0).sum()
            if dots is not None:
                total = total + (results[0] * dots).sum()
            for d, result in zip((dpre, dpost, dres), results, strict=False):
                if d is not None:
                    total = total + (result * d.reshape(result.shape)).sum()
            g, dbias, dalpha = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        r = m[:, -1:]
        assert not plan.any()
        rest_of = g * r
        for part in range(3):
            plan[:, part, :count] = rest_of.to(torch.bfloat16)
            rest_of = rest_of - plan[:, part, :count]
        rest[:, :streams] = results[0].detach()
        rest[:, streams:] = (g * m[:, :-1]).sum(1, keepdim=True) * r * r / columns
        sums = torch.zeros(2, count + 3)
        sums[:, :count] = dbias / 2
        sums[:, count : count + alpha.numel()] = dalpha / 2
        return sums

    def gradients(
        self, dx: Tensor | None, dweight: bool, dh: Tensor | None, x: Tensor, weight: Tensor, plan: Tensor, rest: Tensor
    ) -> Tensor | None:
        streams, width = x.shape[-2:]
        v, g = x.reshape(-1, streams * width).float(), plan.float().sum(1)[:, : weight.shape[0]]
        if dx is not None:
            dv = (g @ weight.float() - rest[:, streams:] * v).view(-1, streams, width)
            if dh is not None:
                dv = dv + rest[:, :streams, None] * dh.reshape(-1, 1, width)
            dx.copy_(dv.view(dx.shape))
        return torch.stack([g[::2].T @ v[::2], g[1::2].T @ v[1::2]]) if dweight else None


def _arguments(head: bool) -> dict[str, Tensor]:
    count = 3 if head else 15
    return {
        "x": torch.randn(2, 3, 3, 5),
        "weight": torch.randn(count, 15) / 4,
        "bias": torch.randn(count),
        "alpha": torch.rand(1 if head else 3) + 0.5,
    }


@pytest.mark.parametrize("wanted", [NAMES, ("x",), ("weight",), ("bias",), ("alpha",), ()])
@pytest.mark.parametrize(
    ("head", "used"),
    [(False, (0, 1, 2, 3)), (False, (0,)), (False, (1,)), (False, (2,)), (False, (3,)), (True, (0, 1)), (True, (1,))],
)
def test_results_and_gradients(head: bool, wanted: tuple[str, ...], used: tuple[int, ...]) -> None:
    """Results, and gradients of the wanted arguments through the results that are used."""
    options: dict[str, Any] = {
        **DEFAULTS,
        "iterations": 3,
        "sinkhorn_eps": 1e-2,
        "pre_eps": 0.1,
        "post_multiplier": 1.5,
    }
    arguments = _arguments(head)
    leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in arguments.items()}
    expected = mhc_pre.reference(**leaves, **options)
    op, needs = MHCPreHost(Kernels()), tuple(name in wanted for name in NAMES)
    actual, saved = op.forward(needs, *arguments.values(), **options)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)
    if not wanted:
        assert saved == ()
        return
    _check_gradients(op, needs, saved, [e if i in used else None for i, e in enumerate(expected)], leaves, options)


def _check_gradients(
    op: MHCPreHost,
    needs: tuple[bool, ...],
    saved: Saved,
    expected: list[Tensor | None],
    leaves: dict[str, Tensor],
    options: dict[str, Any],
) -> None:
    incoming = [None if e is None else torch.randn_like(e) for e in expected]
    gradients = op.backward(needs, saved, *incoming, **options)
    outputs = [e for e in expected if e is not None]
    differentiable = [t for t in leaves.values() if t.requires_grad]
    truth = torch.autograd.grad(
        outputs, differentiable, [d for d in incoming if d is not None], allow_unused=True, materialize_grads=True
    )
    assert [g is not None for g in gradients] == list(needs)
    for one, other in zip((g for g in gradients if g is not None), truth, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_parameters_keep_their_dtypes() -> None:
    arguments = {"x": torch.randn(4, 2, 8).bfloat16(), "weight": torch.randn(8, 16) / 4}
    arguments |= {"bias": torch.randn(8).half(), "alpha": torch.rand(3)}
    op = MHCPreHost(Kernels())
    results, saved = op.forward((True,) * 4, *arguments.values())
    assert (results.h.dtype, results.pre.dtype) == (torch.bfloat16, torch.float32)
    gradients = op.backward((True,) * 4, saved, results.h, None, None, results.res, **DEFAULTS)
    assert [g.dtype for g in gradients if g is not None] == [t.dtype for t in arguments.values()]
