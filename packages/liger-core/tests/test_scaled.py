"""`scaled_linear` and `scaled_gated_mlp` beside products in float64 of the same operands, and beside what they stand for."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import liger_core as liger

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def operand(x: Tensor, block: str, scales: str) -> Tensor:
    """Numbers that the 8 bits of x stand for, in float64, by a loop over blocks."""
    height, width = {"1x128": (1, 128), "128x128": (128, 128)}[block]
    result = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            part = x[i : i + height, j : j + width].float()
            largest = part.abs().max()
            scale = (
                largest / torch.full_like(largest, 448) if scales == "float32" else 2.0 ** (largest / 448).log2().ceil()
            )
            result[i : i + height, j : j + width] = (part / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return result


def inputs(tokens: int, k: int, n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(*shape, generator=draw) for shape in ((tokens, k), (n, k), (tokens, n)))
    return x.to(device, dtype).requires_grad_(), (weight / 8).to(device, dtype).requires_grad_(), dy.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
@pytest.mark.parametrize(("tokens", "k", "n"), [(128, 128, 256), (80, 272, 144), (37, 144, 400)])
def test_products(tokens: int, k: int, n: int, scales: str, dtype: torch.dtype, device: str) -> None:
    x, weight, dy = inputs(tokens, k, n, dtype, device)
    y = liger.scaled_linear(x, weight, scales=scales)
    y.backward(dy)
    qx, qw, qy = operand(x, "1x128", scales), operand(weight, "128x128", scales), operand(dy, "1x128", scales)
    pairs = {
        "y": (y, qx @ qw.mT),
        "dx": (x.grad, qy @ qw),
        "dweight": (weight.grad, operand(dy.mT, "1x128", scales) @ operand(x.mT, "1x128", scales).mT),
    }
    # Sums in float32, or on a GPU in 14 bits of 128 products, and one rounding.
    eps = torch.finfo(dtype).eps
    sums = 1e-3 if device == "cuda" else 1e-5
    for name, (actual, want) in pairs.items():
        assert actual is not None
        assert actual.dtype == dtype
        worst = ((actual.double() - want).abs() / (eps * want.abs() + sums * want.abs().max())).max().item()
        assert worst < 1, (name, worst)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_a_linear_layer(device: str) -> None:
    """The error of a product is that of two operands, each rounded to 4 bits; and it has no bias."""
    x, weight, dy = inputs(512, 256, 384, torch.float32, device)
    bias = torch.randn(384, device=device, requires_grad=True)
    liger.scaled_linear(x.view(2, 256, 256), weight, bias).backward(dy.view(2, 256, 384))
    assert not liger.scaled_linear(x.view(2, 256, 256), weight)._is_view()
    actual = {
        "y": liger.scaled_linear(x, weight, bias) - bias,
        "dx": x.grad,
        "dweight": weight.grad,
        "dbias": bias.grad,
    }
    want = {"y": x @ weight.mT, "dx": dy @ weight, "dweight": dy.mT @ x}
    for name, right in want.items():
        error = actual[name] - right  # type: ignore[operator]
        assert 0.03 < error.norm() / right.norm() < 0.045, name
        mean, deviation = error.mean(), error.std() / error.numel() ** 0.5
        # Elements of a row share roundings of x, so their mean has fewer independent parts than elements.
        assert abs(mean) < 5 * 16 * deviation, name
    torch.testing.assert_close(actual["dbias"], dy.sum(0))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_gradient(needs: tuple[bool, bool]) -> None:
    """A frozen weight's layer keeps nothing of x; a single gradient is that of both."""
    x, weight, dy = inputs(48, 64, 32, torch.float32, "cpu")
    both = torch.autograd.grad(liger.scaled_linear(x, weight), (x, weight), dy)
    leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip((x, weight), needs, strict=True)]
    saved: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        y = liger.scaled_linear(leaves[0], leaves[1])
    y.backward(dy)
    assert (torch.float8_e4m3fn in saved) == needs[1]
    for tensor, need, want in zip(leaves, needs, both, strict=True):
        assert tensor.grad is None if not need else torch.equal(tensor.grad, want)  # type: ignore[arg-type]


def gated_inputs(tokens: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """x and the weights of a gated MLP, and the gradient of its result."""
    draw = torch.Generator().manual_seed(0)
    shapes = (tokens, 144), (272, 144), (272, 144), (80, 272), (tokens, 80)
    x, *weights, dy = (torch.randn(*shape, generator=draw) for shape in shapes)
    arguments = [x, *(weight / 8 for weight in weights)]
    return [argument.to(device, dtype).requires_grad_() for argument in arguments], dy.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [128, 37])
def test_a_gated_mlp_is_its_parts(tokens: int, activation: str, device: str) -> None:
    """In float32, where the activation's result is not rounded in between, and where few elements lie at a tie."""
    (x, *weights), dy = gated_inputs(tokens, torch.float32, device)
    y = liger.scaled_gated_mlp(x, *weights, activation=activation)
    assert not y._is_view()
    got = y, *torch.autograd.grad(y, (x, *weights), dy)
    gate, up = (liger.scaled_linear(x, weight) for weight in weights[:2])
    product = liger.swiglu(gate, up) if activation == "silu" else liger.geglu(gate, up)
    y = liger.scaled_linear(product, weights[2])
    for name, left, right in zip(
        ("y", "x", "gate", "up", "down"), got, (y, *torch.autograd.grad(y, (x, *weights), dy)), strict=True
    ):
        assert (left - right).norm() < 2e-3 * right.norm(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_mlp_is_one(dtype: torch.dtype, device: str) -> None:
    """Beside the MLP without 8 bits, its error is that of three roundings to 4 bits."""
    (x, *weights), dy = gated_inputs(256, dtype, device)
    y = liger.scaled_gated_mlp(x.view(2, 128, 144), *weights)
    assert (y.shape, y.dtype) == ((2, 128, 80), dtype)
    got = y.view_as(dy), *torch.autograd.grad(y, (x, *weights), dy.view_as(y))
    y = liger.gated_mlp(x, *weights)
    for left, right in zip(got, (y, *torch.autograd.grad(y, (x, *weights), dy)), strict=True):
        assert left.dtype == dtype
        assert 0.05 < (left.float() - right.float()).norm() / right.float().norm() < 0.08


@pytest.mark.parametrize("needs", [(True, False, False, False), (False, True, False, True), (True, False, True, False)])
def test_some_gradients_of_a_gated_mlp(needs: tuple[bool, ...]) -> None:
    """They are those of all; x in 8 bits is kept for the weights of the branches alone."""
    arguments, dy = gated_inputs(48, torch.float32, "cpu")
    want = torch.autograd.grad(liger.scaled_gated_mlp(*arguments), arguments, dy)
    some = [tensor.detach().requires_grad_(need) for tensor, need in zip(arguments, needs, strict=True)]
    saved: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        y = liger.scaled_gated_mlp(*some)
    y.backward(dy)
    assert (torch.float8_e4m3fn in saved) == (needs[1] or needs[2])
    for tensor, need, gradient in zip(some, needs, want, strict=True):
        assert tensor.grad is None if not need else torch.equal(tensor.grad, gradient)  # type: ignore[arg-type]


def test_a_lean_gated_mlp_keeps_its_branches_alone() -> None:
    (x, *weights), dy = gated_inputs(20, torch.float32, "cpu")
    scale = torch.ones(144, requires_grad=True)
    want = torch.autograd.grad(liger.scaled_gated_mlp(liger.rms_norm(x, scale), *weights), (x, scale, *weights), dy)
    kept: dict[int, Tensor] = {}
    saving = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t)
    with saving, liger.lean():
        y = liger.scaled_gated_mlp(liger.rms_norm(x, scale), *weights)
    assert torch.float8_e4m3fn not in {t.dtype for t in kept.values()}
    assert [tuple(t.shape) for t in kept.values()].count((32, 272)) == 2
    torch.testing.assert_close(torch.autograd.grad(y, (x, scale, *weights), dy), want, rtol=0, atol=0)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("tokens", [48, 20])
def test_weights_that_share_an_input(tokens: int, lean: bool) -> None:
    """Results and gradients are those of calls by themselves. Lean keeps no columns of what an op can recompute."""
    x, weight, dy = inputs(tokens, 64, 32, torch.float32, "cpu")
    other, scale = weight.detach().flip(0).requires_grad_(), torch.ones(64, requires_grad=True)

    def gradients(shared: bool) -> tuple[Tensor, ...]:
        normed = liger.rms_norm(x, scale)
        once = liger.quantize_input(normed) if shared else None
        results = [liger.scaled_linear(normed, w, quantized=once) for w in (weight, other)]
        return torch.autograd.grad(results, (x, scale, weight, other), (dy, dy * 2))

    want = gradients(False)
    saved: dict[int, Tensor] = {}
    saving = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t)
    with saving, liger.lean() if lean else contextlib.nullcontext():
        grads = gradients(True)
    assert [t.dtype for t in saved.values()].count(torch.float8_e4m3fn) == (0 if lean else 1)
    torch.testing.assert_close(grads, want, rtol=0, atol=0)


def test_a_weight_that_changes() -> None:
    """Fused AdamW changes a weight without a new version of it, so nothing of it may be kept."""
    x, weight, _ = inputs(16, 32, 32, torch.float32, "cpu")
    before = liger.scaled_linear(x, weight)
    weight.data.mul_(2)
    torch.testing.assert_close(liger.scaled_linear(x, weight), 2 * before)


def test_nothing_but_what_it_reaches_is_nan() -> None:
    x, weight, dy = inputs(20, 160, 16, torch.float32, "cpu")
    with torch.no_grad():
        x[3, 140] = torch.inf
    y = liger.scaled_linear(x, weight)
    assert not y._is_view()
    y.backward(dy)
    assert y.isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert weight.grad is not None
    assert weight.grad.isnan().nonzero()[:, 1].unique().tolist() == [140]


def test_empty() -> None:
    x, weight, dy = inputs(0, 32, 16, torch.float32, "cpu")
    y = liger.scaled_linear(x, weight)
    y.backward(dy)
    assert y.shape == (0, 16)
    assert weight.grad is not None
    assert not weight.grad.any()


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, **options: str) -> Tensor:
    return liger.scaled_gated_mlp(x, gate, up, down, **options)


def shared(x: Tensor, weight: Tensor, quantized: liger.Quantized) -> Tensor:
    return liger.scaled_linear(x, weight, quantized=quantized)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, w: liger.scaled_linear(x, w.double()), TypeError, "weight has dtype float64"),
        (lambda x, w: liger.scaled_linear(x, w.bfloat16()), TypeError, "bfloat16"),
        (lambda x, w: liger.scaled_linear(x, w[:, :16]), ValueError, r"weight has shape \(32, 16\)"),
        (lambda x, w: liger.scaled_linear(x, w[:24]), ValueError, "multiples of 16"),
        (lambda x, w: liger.scaled_linear(x, w, w[0, :16]), ValueError, "bias has shape"),
        (lambda x, w: liger.scaled_linear(x, w, scales="row"), ValueError, "scales is 'row'; it takes"),
        (lambda x, w: shared(x, w, liger.quantize_input(x.repeat(2, 1))), ValueError, r"rows of shape \(32, 32\)"),
        (lambda x, w: shared(x, w, liger.quantize_input(x, columns=False)), ValueError, "no columns"),
        (lambda x, w: shared(x, w, liger.quantize(x, rows=False, columns=True)), ValueError, "no rows"),
        (
            lambda x, w: shared(x, w, liger.quantize(x, block="128x128", columns=True)),
            ValueError,
            "those of block '1x128'",
        ),
        (lambda x, w: liger.quantize_input(x.int()), TypeError, "x has dtype int32"),
        (lambda x, w: liger.quantize_input(x, columns=1), TypeError, "columns is 1"),
        (lambda x, w: liger.scaled_linear(x.to("meta"), w.to("meta")), liger.Unsupported, "capability 9.0"),
        (lambda x, w: mlp(x, w, w.bfloat16(), w), TypeError, "up_weight has dtype bfloat16"),
        (lambda x, w: mlp(x, w[:, :16], w, w), ValueError, r"gate_weight has shape \(32, 16\)"),
        (lambda x, w: mlp(x, w, w[:16], w), ValueError, r"up_weight has shape \(16, 32\); it takes \(32, 32\)"),
        (lambda x, w: mlp(x, w, w, w[:, :16]), ValueError, r"down_weight has shape \(32, 16\)"),
        (lambda x, w: mlp(x, w[:24], w[:24], w[:, :24]), ValueError, r"gate_weight.*multiples of 16"),
        (lambda x, w: mlp(x, w, w, w, activation="relu"), ValueError, "activation is 'relu'; it takes 'silu'"),
        (lambda x, w: mlp(*(t.to("meta") for t in (x, w, w, w))), liger.Unsupported, "scaled_gated_mlp on meta"),
    ],
)
def test_errors(call: object, error: type[Exception], message: str) -> None:
    x, weight, _ = inputs(16, 32, 32, torch.float32, "cpu")
    with pytest.raises(error, match=message):
        call(x, weight)  # type: ignore[operator]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """torch.compile makes one graph, of sizes that are known or vary."""
    x, weight, dy = inputs(48, 64, 32, torch.float32, "cpu")
    want = torch.autograd.grad(liger.scaled_linear(x * 2, weight), (x, weight), dy)
    compiled = torch.compile(
        lambda x, weight: liger.scaled_linear(x * 2, weight), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    grads = torch.autograd.grad(compiled(x, weight), (x, weight), dy)
    torch.testing.assert_close(grads, want, rtol=0, atol=0)


def test_a_compiled_gated_mlp() -> None:
    arguments, dy = gated_inputs(48, torch.float32, "cpu")
    want = torch.autograd.grad(liger.scaled_gated_mlp(*arguments), arguments, dy)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*arguments), arguments, dy), want, rtol=0, atol=0)


def test_an_empty_gated_mlp() -> None:
    (x, *weights), _ = gated_inputs(0, torch.float32, "cpu")
    y = liger.scaled_gated_mlp(x, *weights)
    y.sum().backward()
    assert y.shape == (0, 80)
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights)
