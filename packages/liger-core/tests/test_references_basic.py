"""The references of all but the losses, each against another formula."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import op_calls
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import liger_core
from liger_core.contract import Op, by_name, ops
from liger_core.ops.attn_res import attn_res
from liger_core.ops.dyt import dyt
from liger_core.ops.embedding import embedding
from liger_core.ops.fused_add_rms_norm import fused_add_rms_norm
from liger_core.ops.fused_neighborhood_attention import fused_neighborhood_attention
from liger_core.ops.geglu import geglu
from liger_core.ops.group_norm import group_norm
from liger_core.ops.layer_norm import layer_norm
from liger_core.ops.llama4_rope import llama4_rope
from liger_core.ops.mhc_post import mhc_post
from liger_core.ops.mhc_pre import mhc_pre
from liger_core.ops.modulated_rms_norm import modulated_rms_norm
from liger_core.ops.poly_norm import poly_norm
from liger_core.ops.qwen2vl_mrope import qwen2vl_mrope
from liger_core.ops.relu_squared import relu_squared
from liger_core.ops.rope import rope
from liger_core.ops.softmax import softmax
from liger_core.ops.sparsemax import sparsemax
from liger_core.ops.swiglu import swiglu

Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def outcome(op: Op[..., Any], call: Callable[..., Any], arguments: Arguments) -> dict[str, Tensor]:
    """Results, and gradients of the differentiable arguments for fixed incoming gradients."""
    leaves = {
        name: value.detach().requires_grad_(name in op.differentiable) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    returned = call(**leaves)
    results = returned if isinstance(returned, tuple) else (returned,)
    generator = torch.Generator().manual_seed(1)
    # Eighths are exact in every dtype.
    incoming = [torch.randint(-20, 21, r.shape, generator=generator).to(r.dtype) / 8 for r in results]
    differentiable = {name: leaves[name] for name in op.differentiable if leaves[name] is not None}
    gradients = torch.autograd.grad(results, list(differentiable.values()), incoming)
    return {f"result {i}": r.detach() for i, r in enumerate(results)} | dict(
        zip(differentiable, gradients, strict=True)
    )


def assert_agree(op: Op[..., Any], other: Callable[..., Any], arguments: Arguments) -> None:
    """The reference and another formula, in float64."""
    expected = outcome(op, other, arguments)
    for name, value in outcome(op, op.reference, arguments).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_add_rms_norm(casting_mode: str, offset: float) -> None:
    def other(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **_: Any) -> tuple[Tensor, Tensor]:
        return F.rms_norm(x + residual, weight.shape, weight + offset, eps), x + residual

    arguments = {"x": randn(2, 3, 7), "residual": randn(2, 3, 7), "weight": randn(7), "eps": 0.1}
    assert_agree(fused_add_rms_norm, other, {**arguments, "offset": offset, "casting_mode": casting_mode})


def test_fused_add_rms_norm_rounds_by_its_casting_mode() -> None:
    x, residual, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((50, 32), (50, 32), (32,)))
    h = x + residual
    normed = F.rms_norm(h.float(), (32,), None, 1e-6)
    expected = {
        "llama": normed.bfloat16() * weight,
        "gemma": (normed * weight.float()).bfloat16(),
        "none": h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * weight,
    }
    for mode, value in expected.items():
        y, total = fused_add_rms_norm.reference(x, residual, weight, casting_mode=mode)
        torch.testing.assert_close(y, value, rtol=0, atol=0)
        torch.testing.assert_close(total, h, rtol=0, atol=0)
    assert not torch.equal(expected["llama"], expected["gemma"])


def test_fused_add_rms_norm_with_one_incoming_gradient() -> None:
    x, residual, weight = (randn(*shape).requires_grad_() for shape in ((3, 5), (3, 5), (5,)))
    y, h = fused_add_rms_norm.reference(x, residual, weight)
    dx, dresidual = torch.autograd.grad(h.sum(), (x, residual), retain_graph=True)
    assert torch.equal(dx, torch.ones_like(x))
    assert torch.equal(dresidual, torch.ones_like(x))
    dx, dresidual = torch.autograd.grad(y.square().sum(), (x, residual))
    assert torch.equal(dx, dresidual)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    arguments = {"x": randn(2, 3, 7), "weight": randn(7), "bias": randn(7) if bias else None, "eps": 0.1}
    assert_agree(layer_norm, other, arguments)


@pytest.mark.parametrize("shape", [(3, 6), (3, 6, 5), (2, 6, 3, 4), (1, 6, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "bias", ""])
def test_group_norm(shape: tuple[int, ...], affine: str) -> None:
    def other(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        # PyTorch's own backward fails for a bias without a weight.
        return F.group_norm(x, num_groups, torch.ones(6).double() if weight is None else weight, bias, eps)

    weight = randn(6) if "weight" in affine else None
    bias = randn(6) if "bias" in affine else None
    assert_agree(group_norm, other, {"x": randn(*shape), "num_groups": 3, "weight": weight, "bias": bias, "eps": 0.1})


@pytest.mark.parametrize("op", [layer_norm, group_norm], ids=["layer_norm", "group_norm"])
def test_far_from_zero(op: Op[..., Any]) -> None:
    """A mean of a thousand standard deviations costs three digits in float32, no more."""
    x = (randn(4, 6, 200) + 1000).float()
    size = 200 if op is layer_norm else 6
    arguments: Arguments = {"x": x, "weight": randn(size).float(), "bias": None}
    if op is group_norm:
        arguments["num_groups"] = 2
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    truth = outcome(op, op.reference, wide)
    for name, value in outcome(op, op.reference, arguments).items():
        error = (value - truth[name]).abs().max() / truth[name].abs().max()
        assert error < 1e-3, f"{name}: relative error {error:.1e}"


def test_poly_norm() -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        powers = torch.stack([F.rms_norm(x.pow(p), x.shape[-1:], None, eps) for p in (3, 2, 1)], -1)
        return powers @ weight + bias

    assert_agree(poly_norm, other, {"x": randn(2, 3, 7), "weight": randn(3), "bias": randn(1), "eps": 0.1})


@pytest.mark.parametrize("beta", [True, False])
def test_dyt(beta: bool) -> None:
    def other(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        y = (2 * torch.sigmoid(2 * alpha * x) - 1) * gamma
        return y if beta is None else y + beta

    assert_agree(
        dyt, other, {"x": randn(2, 3, 7), "alpha": randn(1), "gamma": randn(7), "beta": randn(7) if beta else None}
    )


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("partial", [True, False])
def test_attn_res(weight: bool, partial: bool) -> None:
    def other(blocks: Tensor, partial: Tensor | None, query: Tensor, weight: Tensor | None) -> Tensor:
        sources = [*blocks.unbind(), *([] if partial is None else [partial])]
        scores = [(query * F.rms_norm(v, v.shape[-1:], weight, 1e-6)).sum(-1) for v in sources]
        shares = torch.stack(scores, -1).softmax(-1).unbind(-1)
        return torch.stack([share[..., None] * v for share, v in zip(shares, sources, strict=True)]).sum(0)

    p, w = randn(2, 3, 7) if partial else None, randn(7) if weight else None
    assert_agree(attn_res, other, {"blocks": randn(4, 2, 3, 7), "partial": p, "query": randn(7), "weight": w})


def test_attn_res_of_a_zero_query_is_the_mean() -> None:
    blocks, partial = randn(4, 3, 7), randn(3, 7)
    y = attn_res.reference(blocks, partial, torch.zeros(7).double(), randn(7))
    torch.testing.assert_close(y, (blocks.sum(0) + partial) / 5)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("shift", [(7,), (1, 3, 7), None])
def test_modulated_rms_norm(weight: bool, shift: tuple[int, ...] | None) -> None:
    def other(x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
        return torch.addcmul(y if shift is None else y + shift, y, scale)

    w, s = randn(7) if weight else None, None if shift is None else randn(*shift)
    assert_agree(modulated_rms_norm, other, {"x": randn(2, 3, 7), "weight": w, "scale": randn(2, 1, 7), "shift": s})


def test_modulated_rms_norm_keeps_a_small_scale() -> None:
    """1 + 0.003 is 1 in bfloat16; y has the scale's effect where its own rounding lets it."""
    x, scale = torch.full((1, 4), 200.0).bfloat16(), torch.full((4,), 0.003).bfloat16()
    shift = torch.full((4,), -1.0).bfloat16()
    y = modulated_rms_norm.reference(x, None, scale, shift)
    torch.testing.assert_close(y, scale.expand(1, 4), rtol=0.01, atol=0)


@pytest.mark.parametrize("gated", [True, False])
def test_relu_squared(gated: bool) -> None:
    def other(x: Tensor, up: Tensor | None) -> Tensor:
        return torch.where(x > 0, x**2, 0 * x) * (1 if up is None else up)

    assert_agree(relu_squared, other, {"x": randn(3, 7), "up": randn(3, 7) if gated else None})
    assert relu_squared.reference(torch.tensor([float("nan")])).isnan()  # a run that diverges shows it
    zero = torch.zeros(1, requires_grad=True)
    relu_squared.reference(zero).backward(torch.tensor([float("inf")]))
    assert zero.grad is not None
    assert zero.grad.item() == 0


def test_swiglu() -> None:
    def other(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
        scaled = gate_multiplier * gate
        return down_multiplier * up * scaled / (1 + torch.exp(-scaled))

    assert_agree(swiglu, other, {"gate": randn(3, 7), "up": randn(3, 7), "gate_multiplier": 0.5, "down_multiplier": -3})
    x = randn(3, 7)
    torch.testing.assert_close(swiglu.reference(x, x), x * F.silu(x))


def test_geglu() -> None:
    def other(gate: Tensor, up: Tensor) -> Tensor:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate.pow(3))
        return 0.5 * gate * (1 + torch.tanh(inner)) * up

    assert_agree(geglu, other, {"gate": randn(3, 7), "up": randn(3, 7)})


@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1, -5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_embedding(padding_idx: int | None, dtype: torch.dtype) -> None:
    def other(indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        trained = torch.ones(5, 1, dtype=torch.bool)
        if padding_idx is not None:
            trained[padding_idx] = False
        one_hot = F.one_hot(indices.long(), 5).to(weight.dtype)
        return one_hot @ torch.where(trained, weight, weight.detach())

    indices = torch.tensor([[0, 3, 4], [3, 3, 2]], dtype=dtype)
    assert_agree(embedding, other, {"indices": indices, "weight": randn(5, 7), "padding_idx": padding_idx})


def test_embedding_of_one_index_compiled() -> None:
    """An index without dimensions, which Dynamo reads the value of where it stands in brackets."""
    weight = randn(5, 7)
    look_up = torch.compile(embedding.reference, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(look_up(torch.tensor(3), weight), weight[3])


def test_embedding_sums_its_gradient_in_float32() -> None:
    weight = randn(3, 4, dtype=torch.bfloat16).requires_grad_()
    embedding.reference(torch.ones(1000, dtype=torch.int64), weight).backward(torch.full((1000, 4), 0.01).bfloat16())
    expected = torch.zeros(3, 4)
    expected[1] = torch.tensor(0.01).bfloat16().float() * 1000
    torch.testing.assert_close(weight.grad, expected.bfloat16(), rtol=0, atol=0)  # in bfloat16 it would stop at 4


def test_embedding_out_of_range() -> None:
    weight = randn(3, 4).requires_grad_()
    for wrong in (3, -1, 1 << 40):
        indices = torch.tensor([0, wrong, 2])
        y = embedding.reference(indices, weight)
        assert y.isnan().any(-1).tolist() == [False, True, False]
        (gradient,) = torch.autograd.grad(y.sum(), weight)
        assert gradient.sum(-1).tolist() == [4, 0, 4]
        with pytest.raises(IndexError, match=f"embedding: indices holds {wrong}; it takes 0 to 2"):
            embedding(indices, weight)


def half_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By a signed permutation matrix that takes (x₁, x₂) to (−x₂, x₁)."""
    columns = cos.shape[-1]
    swap = torch.zeros(columns, columns, dtype=x.dtype)
    for j in range(columns // 2):
        swap[j + columns // 2, j], swap[j, j + columns // 2] = -1, 1
    turned = x[..., :columns]
    return torch.cat([turned * cos + turned @ swap * sin, x[..., columns:]], -1)


@pytest.mark.parametrize("tables", [(3, 5), (1, 5), (5,)], ids=["a table each", "one table", "no batch"])
@pytest.mark.parametrize("columns", [8, 4, 2])
@pytest.mark.parametrize("transposed", [True, False])
def test_rope(tables: tuple[int, ...], columns: int, transposed: bool) -> None:
    def other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tables = (t.expand(3, 5, columns).unsqueeze(1) for t in (cos, sin))
        cos, sin = tables
        return half_rotation(q, cos, sin), half_rotation(k, cos, sin)

    q, k = randn(3, 5, 4, 8).transpose(1, 2), randn(3, 5, 2, 8).transpose(1, 2)
    if not transposed:
        q, k = q.contiguous(), k.contiguous()
    assert_agree(rope, other, {"q": q, "k": k, "cos": randn(*tables, columns), "sin": randn(*tables, columns)})


def test_rope_is_a_complex_product_of_the_halves() -> None:
    x, angles = randn(2, 3, 5, 8), randn(2, 5, 4)
    y, _ = rope.reference(x, x, torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin())
    product = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(y, torch.cat([product.real, product.imag], -1))


@pytest.mark.parametrize("real", [True, False], ids=["real", "complex"])
def test_llama4_rope(real: bool) -> None:
    def other(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, ...]:
        factor = (torch.view_as_complex(freqs_cis) if real else freqs_cis)[:, None]
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
        return tuple(torch.view_as_real(x * factor).flatten(-2) for x in pairs)

    freqs = randn(5, 4, 2)
    arguments = {"q": randn(3, 5, 4, 8), "k": randn(3, 5, 2, 8)}
    assert_agree(llama4_rope, other, {**arguments, "freqs_cis": freqs if real else torch.view_as_complex(freqs)})


def test_llama4_rope_by_the_conjugate_turns_back() -> None:
    x, angles = randn(2, 5, 3, 8), randn(5, 4)
    freqs = torch.polar(torch.ones_like(angles), angles)
    turned = llama4_rope.reference(x, x, freqs)
    for back in llama4_rope.reference(*turned, freqs.conj()):
        torch.testing.assert_close(back, x)


@pytest.mark.parametrize("section", [(1, 2, 1), (4, 0, 0), (0, 4, 0), (0, 0, 4), [2, 0, 2]], ids=str)
@pytest.mark.parametrize("batch", [2, 1])
def test_qwen2vl_mrope(section: tuple[int, int, int], batch: int) -> None:
    def other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any) -> tuple[Tensor, ...]:
        plane = [i for i, size in enumerate(mrope_section) for _ in range(size)] * 2
        cos, sin = (torch.stack([t[plane[j], ..., j] for j in range(8)], -1).unsqueeze(1) for t in (cos, sin))
        return tuple(half_rotation(x, cos, sin) for x in (q, k))

    q, k = randn(2, 5, 4, 8).transpose(1, 2), randn(2, 5, 1, 8).transpose(1, 2)
    tables = {"cos": randn(3, batch, 5, 8), "sin": randn(3, batch, 5, 8)}
    assert_agree(qwen2vl_mrope, other, {"q": q, "k": k, **tables, "mrope_section": section})


def test_softmax() -> None:
    assert_agree(softmax, lambda x: (x - torch.logsumexp(x, -1, keepdim=True)).exp(), {"x": randn(2, 3, 7)})
    x = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf], [1e4, -1e4]])
    assert softmax.reference(x).isnan().tolist() == [[True, True], [False, False], [False, False]]
    assert softmax.reference(x)[1:].tolist() == [[1, 0], [1, 0]]


def bisected_sparsemax(x: Tensor, dim: int) -> Tensor:
    """Tau by bisection of Σ max(x − tau, 0) = 1, then once more from the support, for the gradient."""
    low, high = x.detach().amax(dim, keepdim=True) - 1, x.detach().amax(dim, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        enough = (x.detach() - middle).clamp(min=0).sum(dim, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    support = x.detach() > low
    tau = ((x * support).sum(dim, keepdim=True) - 1) / support.sum(dim, keepdim=True)
    return (x - tau) * support


@pytest.mark.parametrize("dim", [-1, 0, 1, 2, -3])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 1e4])
def test_sparsemax(dim: int, scale: float) -> None:
    x = randn(3, 9, 5) * scale
    assert_agree(sparsemax, bisected_sparsemax, {"x": x, "dim": dim})
    y = sparsemax.reference(x, dim)
    torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)))


def test_sparsemax_ties_with_tau_are_outside() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], requires_grad=True)
    y = sparsemax.reference(x)
    assert y.tolist() == [[1, 0, 0], [0.5, 0.5, 0]]
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([[3.0, 5.0, 7.0], [3.0, 5.0, 7.0]]))
    assert gradient.tolist() == [[0, 0, 0], [-1, 1, 0]]


def test_sparsemax_of_rows_without_a_projection() -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[-inf, -inf], [nan, 0.0], [inf, 0.0], [-inf, 3.0]], requires_grad=True)
    y = sparsemax.reference(x)
    assert y.isnan().tolist() == [[True, True], [True, True], [True, True], [False, False]]
    assert y[3].tolist() == [0, 1]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[0, 0]] * 4


def dense_attention(q: Tensor, k: Tensor, v: Tensor, kernel_size: int, dilation: int, scale: float | None) -> Tensor:
    """Over the whole sequence, with a mask."""
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    seen = (distance.abs() <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


@pytest.mark.parametrize("dilation", [1, 2, 5, 40])
@pytest.mark.parametrize("kernel_size", [1, 3, 7, 51])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_fused_neighborhood_attention(kernel_size: int, dilation: int, scale: float | None) -> None:
    arguments = {name: randn(2, 3, 17, 4) for name in "qkv"}
    options = {"kernel_size": kernel_size, "dilation": dilation, "scale": scale}
    assert_agree(fused_neighborhood_attention, dense_attention, {**arguments, **options})


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dilation", [1, 300])
def test_fused_neighborhood_attention_never_takes_the_square_of_the_sequence(dilation: int) -> None:
    arguments = {name: randn(1, 1, 3000, 2) for name in "qkv"}
    with Largest() as largest:
        outcome(
            fused_neighborhood_attention, fused_neighborhood_attention.reference, {**arguments, "dilation": dilation}
        )
    assert largest.elements == 3000 * 7 * 2


def mhc_by_rows(
    x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, iterations: int, norm_eps: float, sinkhorn_eps: float,
    pre_eps: float, post_multiplier: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """mhc_pre of ``[rows, n, C]``, row by row; Sinkhorn on lists of rows and columns."""
    n, results = x.shape[1], []
    for streams in x:
        m = weight @ F.rms_norm(streams.flatten(), (streams.numel(),), None, norm_eps)
        pre = 1 / (1 + torch.exp(-(alpha[0] * m[:n] + bias[:n]))) + pre_eps
        results.append([pre @ streams, pre])
        if len(bias) == n:
            continue
        post = post_multiplier / (1 + torch.exp(-(alpha[1] * m[n : 2 * n] + bias[n : 2 * n])))
        logits = alpha[2] * m[2 * n :] + bias[2 * n :]
        res = torch.stack([row.softmax(0) + sinkhorn_eps for row in logits.split(n)])
        for step in range(2 * iterations - 1):
            lines = list(res if step % 2 else res.T)
            lines = torch.stack([line / (line.sum() + sinkhorn_eps) for line in lines])
            res = lines if step % 2 else lines.T
        results[-1] += [post, res]
    return tuple(torch.stack(each) for each in zip(*results, strict=True))


MHC_OPTIONS = {"iterations": 3, "norm_eps": 0.1, "sinkhorn_eps": 0.05, "pre_eps": 0.2, "post_multiplier": 1.5}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_mhc_pre(n: int) -> None:
    count = n * n + 2 * n
    arguments = {"x": randn(3, n, 5), "weight": randn(count, 5 * n), "bias": randn(count), "alpha": randn(3)}
    assert_agree(mhc_pre, mhc_by_rows, arguments | MHC_OPTIONS)


def test_mhc_pre_of_the_head_has_no_coefficients_for_a_layer() -> None:
    arguments = {"x": randn(3, 4, 5), "weight": randn(4, 20), "bias": randn(4), "alpha": randn(1)}
    actual = mhc_pre.reference(**arguments, **MHC_OPTIONS)
    assert actual.post is None
    assert actual.res is None
    expected = mhc_by_rows(**arguments, **MHC_OPTIONS)
    torch.testing.assert_close(actual[:2], expected)


def test_mhc_pre_mixes_to_convex_combinations() -> None:
    """After the last step, and at equal logits after any, the streams that make a new one add up to 1."""
    x, weight, bias, alpha = randn(3, 4, 5), randn(24, 20), randn(24), randn(3)
    res = mhc_pre.reference(x, weight, bias, alpha).res
    torch.testing.assert_close(res.sum(-2), torch.ones(3, 4).double(), rtol=0, atol=2e-6)
    uniform = mhc_pre.reference(x, weight, bias * 0, alpha * 0, iterations=1).res
    torch.testing.assert_close(uniform, torch.full_like(uniform, 0.25), rtol=0, atol=1e-6)


def test_mhc_pre_of_logits_far_apart_is_a_permutation_without_gradient() -> None:
    order = torch.tensor([2, 0, 3, 1])
    far = torch.full((4, 4), -50.0).double()
    far[torch.arange(4), order] = 50.0
    bias = torch.cat([torch.zeros(8).double(), far.flatten()]).requires_grad_()
    res = mhc_pre.reference(randn(3, 4, 5), torch.zeros(24, 20).double(), bias, torch.ones(3).double()).res
    torch.testing.assert_close(res, torch.eye(4).double()[order].expand(3, 4, 4), rtol=0, atol=5e-6)
    (gradient,) = torch.autograd.grad(res, bias, randn(3, 4, 4))
    assert gradient.abs().max() < 1e-4


def test_mhc_post() -> None:
    def other(f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> Tensor:
        n = x.shape[-2]
        new = [post[..., o, None] * f + sum(res[..., i, o, None] * x[..., i, :] for i in range(n)) for o in range(n)]
        return torch.stack(new, -2)

    assert_agree(
        mhc_post, other, {"f": randn(2, 3, 5), "x": randn(2, 3, 3, 5), "post": randn(2, 3, 3), "res": randn(2, 3, 3, 3)}
    )


FOLDER = Path(op_calls.__file__).parent
MODULES = {file.stem: import_module(f"op_calls.{file.stem}") for file in sorted(FOLDER.glob("[!_]*.py"))}
SMALL: dict[str, Callable[[], Arguments]] = {
    name: module.small for name, module in MODULES.items() if hasattr(module, "small") and ops[name].differentiable
}
every_op = pytest.mark.parametrize("name", SMALL)


def cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    floats = {n: v.to(dtype) for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return arguments | floats


@every_op
def test_gradients(name: str) -> None:
    """By finite differences, first and second."""
    op = by_name(name)
    arguments = op.bind((), cast(SMALL[name](), torch.float64))
    differentiable = {n: arguments[n].requires_grad_() for n in op.differentiable}

    def call(*tensors: Tensor) -> Any:
        return op.reference(**(arguments | dict(zip(differentiable, tensors, strict=True))))

    assert torch.autograd.gradcheck(call, tuple(differentiable.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tuple(differentiable.values()), fast_mode=True)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "fused_add_rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounds_once(name: str, dtype: torch.dtype) -> None:
    """In a narrow dtype the result and each gradient are float64's, rounded to that dtype."""
    op = by_name(name)
    arguments = cast(SMALL[name](), dtype)
    truth = outcome(op, op.reference, cast(arguments, torch.float64))
    for what, value in outcome(op, op.reference, arguments).items():
        kind = torch.float32 if name == "mhc_pre" and what in ("result 1", "result 2", "result 3") else dtype
        assert value.dtype is kind
        spacing = torch.finfo(kind).eps / 2 * truth[what].abs() + torch.finfo(kind).smallest_normal
        off = (value.double() - truth[what]).abs() - spacing
        assert off.max() <= 2e-6 * truth[what].abs().max(), f"{what} is rounded more than once"


@every_op
def test_float32_parameters(name: str) -> None:
    """A float32 weight, k or table beside a bfloat16 activation: each gradient has its own input's dtype."""
    op = by_name(name)
    activations = ("x", "f", "residual", "gate", "up", "q", *("kv" if name == "fused_neighborhood_attention" else ""))
    wide = cast(SMALL[name](), torch.float32)
    arguments = wide | cast({n: v for n, v in wide.items() if n in activations}, torch.bfloat16)
    with liger_core.use("torch"):
        results = outcome(op, op, arguments)
    assert all(results[n].dtype is arguments[n].dtype for n in op.differentiable)
    first = arguments["weight" if name == "embedding" else op.names[0]]
    assert results["result 0"].dtype is first.dtype


@every_op
def test_zero_rows(name: str) -> None:
    """Empty results, and zero gradients."""
    op = by_name(name)
    arguments = cast(SMALL[name](), torch.float32)
    rows = arguments[op.names[0]].shape[0]
    shared = [n for n, v in arguments.items() if isinstance(v, Tensor) and v.shape[0] == rows]
    results = outcome(op, op.reference, arguments | {n: arguments[n][:0] for n in shared})
    for what, value in results.items():
        assert value.numel() == 0 if what.startswith("result") else not value.any(), what
    assert results["result 0"].shape[0] == 0


@pytest.mark.parametrize("name", ["rope", "llama4_rope", "qwen2vl_mrope"])
def test_tables_get_no_gradient(name: str) -> None:
    op = by_name(name)
    arguments = op.bind((), cast(SMALL[name](), torch.float64))
    tables = [n for n in op.tensors if n not in op.differentiable]
    for n in op.tensors:
        arguments[n].requires_grad_()
    for result in op.reference(**arguments):
        result.sum().backward()
    assert {n: arguments[n].grad is None for n in op.tensors} == {n: n in tables for n in op.tensors}
    for n in op.differentiable:
        arguments[n].requires_grad_(False)
    assert not any(result.requires_grad for result in op.reference(**arguments))
