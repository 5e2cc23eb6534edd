"""`apply(precision="fp8")`: linear layers of a model's layers in 8 bits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_models import batch, build, classes
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_core as liger
import liger_transformers
from liger_core import scaled as scaled_module


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_hand(model: PreTrainedModel) -> None:
    """Calls `scaled_linear` for each linear layer of the attention, and `scaled_gated_mlp`."""
    for layer in model.model.layers:
        for linear in layer.self_attn.modules():
            if isinstance(linear, nn.Linear):
                linear.forward = lambda x, linear=linear: liger.scaled_linear(x, linear.weight, linear.bias)
        mlp, act = layer.mlp, "gelu_tanh" if model.config.model_type == "gemma2" else "silu"
        weights = [linear.weight for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        mlp.forward = lambda x, weights=weights, act=act: liger.scaled_gated_mlp(x, *weights, activation=act)


@pytest.mark.parametrize(("kind", "count"), [("llama", 7), ("qwen2", 7), ("gemma2", 7)])
def test_a_step(kind: str, count: int) -> None:
    """The step is that of a model whose layers call the op; beside the plain model's it has the error of 8 bits."""
    model = build(kind).train()
    hand, plain = copy.deepcopy(model), copy.deepcopy(model)
    by_hand(hand)
    report = liger_transformers.apply(model, precision="fp8")
    assert report.swapped["Linear", "scaled_linear"] == 2 * count, report
    assert report.ops["scaled_linear"] == 2 * count
    assert report.ops["scaled_gated_mlp"] == 2
    assert [count for (_, op), count in report.swapped.items() if op == "lean(in eager mode), shared_inputs"] == [2]
    assert liger_transformers.report(model).swapped == report.swapped
    assert "liger: scaled_linear" in repr(model)
    loss, gradients = step(model)
    hand_loss, hand_gradients = step(hand)
    torch.testing.assert_close(loss, hand_loss)
    for name, gradient in hand_gradients.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item(), msg=name
        )
    plain_loss, plain_gradients = step(plain)
    assert 0 < abs(loss - plain_loss) / plain_loss < 0.02
    error = sum((gradients[n] - g).norm() ** 2 for n, g in plain_gradients.items()) ** 0.5
    assert 0.01 < error / sum(g.norm() ** 2 for g in plain_gradients.values()) ** 0.5 < 0.3
    liger_transformers.restore(model)
    assert classes(model.modules()) == classes(plain.modules())
    torch.testing.assert_close(step(model)[0], plain_loss)


def quantized(run: Callable[[], object]) -> tuple[list[tuple[int, ...]], object]:
    """The shapes of the matrices that are quantized as rows, and the result."""
    shapes: list[tuple[int, ...]] = []
    original = scaled_module.quantize

    def quantize(x: Tensor, **options: Any) -> Any:
        shapes.extend([tuple(x.shape)] if options.get("block") is None and options.get("rows", True) else [])
        return original(x, **options)

    with mock.patch.object(scaled_module, "quantize", quantize):
        result = run()
    return shapes, result


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_input_is_quantized_once(lean: bool, checkpointing: bool) -> None:
    """q, k and v share theirs; backward quantizes the gradients of their results, of o's and of the MLP's. The step is equal to
    the bit, lean or not.
    """
    model = build("llama").train()
    alone = copy.deepcopy(model)
    liger_transformers.apply(model, precision="fp8", lean=lean)
    by_hand(alone)
    liger_transformers.apply(alone, lean=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        alone.gradient_checkpointing_enable({"use_reentrant": False})
    shapes, grads = quantized(lambda: step(model))
    assert len(shapes) == 2 * (3 * (1 + checkpointing) + 5)
    shapes, want = quantized(lambda: step(alone))
    assert len(shapes) == 2 * (5 * (1 + checkpointing) + 5)
    torch.testing.assert_close(grads, want, rtol=0, atol=0)


def test_an_input_that_changes_is_quantized_again() -> None:
    """In place, or before another call of the layer, where its version may stay; in inference mode it has none."""

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor, change: bool) -> tuple[Tensor, Tensor]:
            first = self.one(x)
            if change:
                x.mul_(2)
            return first, self.two(x)

    layer = Layer()
    liger_transformers.apply(nn.ModuleList([layer]), precision="fp8")
    x = torch.randn(4, 16)
    shapes, grads = quantized(lambda: layer(x, False))
    assert shapes == [(16, 16)]
    shapes, changed = quantized(lambda: layer(x, True))
    assert len(shapes) == 2
    torch.testing.assert_close(changed, (grads[0], 2 * grads[1]), rtol=0, atol=0)  # type: ignore[index]
    x.data.div_(2)  # no new version
    with torch.no_grad():
        torch.testing.assert_close(layer(x, False), grads, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x.clone(), False), grads, rtol=0, atol=0)
    restored = nn.ModuleList([copy.deepcopy(layer)])
    liger_transformers.restore(restored)
    assert type(restored[0]) is Layer


def saved(model: nn.Module) -> list[Tensor]:
    """The tensors that a forward saves, one of each memory."""
    tensors: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.setdefault(t.data_ptr(), t), lambda t: t):
        model(**batch())
    return [*tensors.values()]


def test_lean_keeps_no_columns_of_what_it_recomputes() -> None:
    """Norms' results; that of the attention is kept, in 8 bits. The product of an MLP's branches is never kept."""
    saved_shapes = {}
    for lean in (False, True):
        model = build("llama").train()
        liger_transformers.apply(model, precision="fp8", lean=lean)
        saved_shapes[lean] = [t.shape for t in saved(model) if t.dtype == torch.float8_e4m3fn]
    widths = {False: {32: 3}, True: {32: 1}}
    for lean, counts in widths.items():
        columns = [shape[0] for shape in saved_shapes[lean]]
        assert {width: columns.count(width) / 2 for width in {*columns}} == counts


def test_leaves_what_it_is_told_to() -> None:
    model = build("llama")
    report = liger_transformers.apply(model, precision="fp8", skip=("layers.0.mlp", "o_proj"))
    assert report.swapped["Linear", "scaled_linear"] == 14 - 3 - 2
    assert report.left["Linear", "skip names it"] == 5
    assert not any("scaled_linear" in why for what, why in liger_transformers.apply(build("llama")).swapped)


def test_a_size_that_does_not_fit() -> None:
    report = liger_transformers.apply(build("llama", intermediate_size=72), precision="fp8")
    assert report.left["Linear", "its 72 outputs are no multiple of 16"] == 4
    assert report.left["Linear", "its 72 inputs are no multiple of 16"] == 2
    assert report.swapped["Linear", "scaled_linear"] == 8


def test_copies_and_files_and_checkpointing() -> None:
    model = build("llama").train()
    keys = [*model.state_dict()]
    liger_transformers.apply(model, precision="fp8")
    assert [*model.state_dict()] == keys
    want = step(model)[0]
    assert torch.equal(step(copy.deepcopy(model))[0], want)
    assert {type(m) for m in pickle.loads(pickle.dumps(model)).modules()} == {type(m) for m in build("llama").modules()}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(step(model)[0], want)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(step(model)[0], want, rtol=0.02, atol=0.02)


def test_compiled_whole() -> None:
    """torch.compile makes one graph, whose step is the eager one."""
    model = build("llama", num_hidden_layers=1).train()
    liger_transformers.apply(model, precision="fp8")
    want_loss, want = step(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    loss, gradients = step(model)
    torch.testing.assert_close(loss, want_loss)
    for name, gradient in want.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-3 * largest, msg=name)


@pytest.mark.parametrize("before", [True, False])
def test_adapters_stay(before: bool) -> None:
    """LoRA on a frozen base: the base's layers are in 8 bits and have no gradient, adapters are as they were."""
    peft = pytest.importorskip("peft")
    model = build("llama").train()
    if before:
        liger_transformers.apply(model, precision="fp8")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    report = liger_transformers.apply(tuned, precision="fp8")
    assert report.swapped["Linear", "scaled_linear"] == 14
    assert report.left["Linear", "it belongs to an adapter, whose products are small"] == 28
    torch.manual_seed(0)
    _, gradients = step(tuned)
    assert len(gradients) == 28
    assert all("lora" in name and gradient.any() for name, gradient in gradients.items())


def test_a_language_and_a_gated_mlp() -> None:
    """An MLP of which one layer is left runs by its layers; so does one whose layer has a hook."""
    model, plain = build("llama"), build("llama")
    report = liger_transformers.apply(model, precision="fp8", mlp=True, skip=["layers.1.mlp.down_proj"])
    assert report.kernels == ["no kernel: PyTorch reference on cpu"]
    assert report.ops["scaled_gated_mlp"] == 1
    assert report.left["LlamaMLP", "down_proj is not in 8 bits"] == 1
    calls: list[Tensor] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, y: calls.append(y))
    with mock.patch.object(liger, "scaled_gated_mlp", side_effect=AssertionError):
        loss = model(**batch()).loss
    assert len(calls) == 1
    assert abs(loss - plain(**batch()).loss) / loss < 0.02


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "int8"}, ValueError, "precision is 'int8'; it takes None or 'fp8'"),
        ({"skip": ["o_proj"]}, ValueError, "skip takes precision='fp8'"),
        ({"precision": "fp8", "skip": "o_proj"}, TypeError, "skip is 'o_proj'; it takes a list"),
        ({"precision": "fp8", "skip": ["proj"]}, ValueError, "skip has 'proj', which no linear layer's name has"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        liger_transformers.apply(build("llama"), **options)
