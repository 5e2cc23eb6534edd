"""Layers that keep less for backward, alone and inside of gradient checkpointing."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import batch, build, classes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import liger_transformers
from liger_transformers import layers


def gradients(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step, and the bytes that it saves for them beside the model's own."""
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(**batch()).loss
    size = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in parameters)
    saved.clear()
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, size


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_gradients_are_equal_and_less_is_kept(kind: str, checkpointing: dict[str, Any] | None) -> None:
    model = build(kind).train()
    liger_transformers.apply(model, lean=False)
    leaner = copy.deepcopy(model)
    report = liger_transformers.apply(leaner, lean=True)
    layers = {module: count for (module, op), count in report.swapped.items() if op == "lean"}
    assert sum(layers.values()) == 2, report
    assert "lean" not in report.ops
    for each in (model, leaner) if checkpointing is not None else ():
        each.gradient_checkpointing_enable(checkpointing)
    (expected, most), (actual, least) = gradients(model), gradients(leaner)
    assert {*actual} == {*expected}
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert least < most if checkpointing is None else least <= most
    liger_transformers.restore(leaner)
    assert classes(leaner.modules()) == classes(build(kind).modules())


def test_a_layer_whose_forward_is_bound_is_left() -> None:
    model = build("llama")
    model.model.layers[0].forward = functools.partial(type(model.model.layers[0]).forward, model.model.layers[0])
    report = liger_transformers.apply(model, lean=True)
    assert report.swapped["LlamaDecoderLayer", "lean"] == 1
    assert any(module == "LlamaDecoderLayer" and "bound to the instance" in why for module, why in report.left)


def test_it_is_the_default_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("llama").train(), batch()
    report = liger_transformers.apply(model)
    assert report.swapped["LlamaDecoderLayer", "lean(in eager mode)"] == 2
    want = model(**inputs).loss
    entered: list[int] = []
    original = layers.liger.lean
    monkeypatch.setattr(layers.liger, "lean", lambda: (entered.append(1), original())[1])
    model(**inputs)
    assert len(entered) == 2
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).loss, want)
    assert len(entered) == 2
    liger_transformers.apply(model)  # a later call that asks for it compiled gets it, and keeps it
    for options in ({"lean": True}, {}):
        assert liger_transformers.apply(model, **options).swapped["LlamaDecoderLayer", "lean"] == 2


def test_under_compile_the_layers_are_one_graph() -> None:
    model = build("llama").train()
    liger_transformers.apply(model, lean=True)
    inputs = batch()
    torch.compiler.reset()
    compiled = torch.compile(lambda: model(**inputs).loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), model(**inputs).loss)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_norms_that_are_units_of_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP frees such a norm's weight behind its call. Its consumer's backward comes before it is gathered again."""
    model = build("llama").train()
    liger_transformers.apply(model)
    expected = gradients(model)[0]
    entered: list[int] = []
    original = layers.liger.lean
    monkeypatch.setattr(layers.liger, "lean", lambda: (entered.append(1), original())[1])
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        first, second = model.model.layers
        for module in (first.input_layernorm, first, second.mlp, second, model):
            fully_shard(module, mesh=mesh)
        model.zero_grad()
        model(**batch()).loss.backward()
        assert len(entered) == 1  # the second layer
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])
    finally:
        dist.destroy_process_group()
