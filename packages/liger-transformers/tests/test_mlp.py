"""Gated MLPs that are one op in gradient checkpointing: what is swapped, the same numbers, the products and the memory."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import Gradients, assert_same, batch, build, classes, run
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from toy_language import Seen, toy_language

import liger_transformers
from liger_transformers import mlp
from liger_transformers.swap import swapped_for

peft = pytest.importorskip("peft")

KINDS = {"none": None, "not reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def checkpoint(model: Any, kind: str) -> None:
    if (options := KINDS[kind]) is not None:
        model.gradient_checkpointing_enable(options)
        if options["use_reentrant"]:
            model.enable_input_require_grads()


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("qwen3", {}), ("gemma2", {}), ("falcon_h1", {"mlp_multipliers": [1.7, 0.6]})]
)
def test_gradients_are_the_plain_models(
    name: str, options: dict[str, Any], kind: str, lean: bool, calls: Counter[str]
) -> None:
    plain = build(name, **options)
    model = copy.deepcopy(plain)
    report = liger_transformers.apply(model, mlp=True, lean=lean)
    assert report.ops["gated_mlp"] == 2, report
    checkpoint(model, kind)
    calls.clear()
    assert_same(run(plain, batch()), run(model, batch()))
    assert calls["gated_mlp"] == (4 if kind == "not reentrant" else 0)  # forward, and again in backward
    liger_transformers.restore(model)
    assert classes(model.modules()) == classes(plain.modules())
    calls.clear()
    assert_same(run(plain, batch()), run(model, batch()))
    assert not calls


def test_report() -> None:
    model = build("falcon_h1", mlp_multipliers=[1.7, 0.6])
    swapped = {op for (module, op) in liger_transformers.apply(model, mlp=True).swapped if module == "FalconH1MLP"}
    options = "activation='silu', gate_multiplier=1.7, down_multiplier=0.6"
    assert swapped == {f"gated_mlp(in checkpointing, {options})"}
    assert liger_transformers.apply(model, mlp=True).ops["gated_mlp"] == 2  # again: nothing is swapped twice
    assert "gated_mlp" not in liger_transformers.apply(build("llama")).ops  # only on request


class Linear4(nn.Linear):
    """As a quantised one: a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


def _quantise(layer: Any) -> None:
    layer.gate_proj.__class__ = Linear4


def _bind(layer: Any) -> None:
    layer.up_proj.forward = functools.partial(nn.Linear.forward, layer.up_proj)


CHANGES: dict[str, tuple[Any, str]] = {
    "quantised": (_quantise, "gate_proj is a Linear4, whose forward is not nn.Linear's"),
    "bound": (
        _bind,
        "up_proj stays: its forward is bound to the instance, by functools; apply before that",
    ),
    "hooked": (
        lambda layer: layer.down_proj.register_forward_hook(lambda *_: None),
        "down_proj has hooks, which would not be called",
    ),
    "hooked backward": (
        lambda layer: layer.up_proj.register_full_backward_hook(lambda *_: None),
        "up_proj has hooks, which would not be called",
    ),
    "hooked activation": (
        lambda layer: layer.act_fn.register_forward_pre_hook(lambda *_: None),
        "act_fn has hooks, which would not be called",
    ),
    "parametrized": (
        lambda layer: parametrizations.weight_norm(layer.gate_proj),
        "gate_proj has parametrizations",
    ),
    "with a bias": (
        lambda layer: layer.gate_proj.register_parameter("bias", nn.Parameter(torch.ones(48))),
        "gate_proj has a bias, and gated_mlp takes none",
    ),
    "another activation": (
        lambda layer: setattr(layer, "act_fn", nn.Tanh()),
        "its activation is neither SiLU nor GELU's tanh approximation",
    ),
}


@pytest.mark.parametrize("first", [True, False], ids=["apply before", "apply after"])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_more_than_a_product_are_left(change: str, first: bool, calls: Counter[str]) -> None:
    """Also if they become so after `apply`: the module's own forward runs then."""
    function, why = CHANGES[change]
    plain, model = build("llama"), build("llama")
    function(plain.model.layers[0].mlp)
    if first:
        liger_transformers.apply(model, mlp=True)
    function(model.model.layers[0].mlp)
    if not first:
        report = liger_transformers.apply(model, mlp=True)
        assert ("LlamaMLP", why) in report.left
        assert report.ops["gated_mlp"] == 1
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.clear()
    assert_same(run(plain, batch()), run(model, batch()))
    assert calls["gated_mlp"] == 2


class Other(nn.Module):
    """Looks like a gated MLP and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8, False), nn.Linear(8, 8, False), nn.Linear(8, 8, False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * (1 + self.up(x)))


class Many(Other):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 8)


class Two(Other):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(y))


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Other, "it is not gated_mlp"),
        (Many, "it holds something else than three linear layers and an activation"),
        (Two, "its forward raises TypeError on a tensor"),
    ],
)
def test_modules_that_are_left(cls: Any, why: str) -> None:
    assert liger_transformers.apply(nn.Sequential(cls()), mlp=True).left == {(cls.__name__, why): 1}


def test_phi3_is_left() -> None:
    """Its gate and up are halves of one layer's result."""
    report = liger_transformers.apply(build("phi3"), mlp=True)
    assert "gated_mlp" not in report.ops
    assert any(module == "Phi3MLP" for module, _ in report.left)


@pytest.mark.parametrize("order", ["peft", "apply"])
@pytest.mark.parametrize(("target", "count"), [(["gate_proj"], 0), (["q_proj"], 4)])
def test_lora(target: list[str], count: int, order: str, calls: Counter[str]) -> None:
    """On a layer of the MLP it stays. Elsewhere the MLP's weights are frozen, and its op gives x's gradient alone."""
    config = peft.LoraConfig(r=4, target_modules=target, init_lora_weights=False)

    def wrapped(model: nn.Module) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, copy.deepcopy(config)).train()

    want, model = wrapped(build("llama")), build("llama")
    if order == "apply":
        liger_transformers.apply(model, mlp=True)
    model = wrapped(model)
    if order == "peft":
        report = liger_transformers.apply(model, mlp=True)
        assert any("gate_proj is a Linear, whose forward" in why for _, why in report.left) is (count == 0)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.clear()
    assert_same(run(want, batch()), run(model, batch()))
    assert calls["gated_mlp"] == count


def test_autocast(calls: Counter[str]) -> None:
    """The gradients are about as far from float32's as the plain model's in autocast."""
    model, inputs = build("llama"), batch()
    truth = run(copy.deepcopy(model), inputs)[1]
    swapped = copy.deepcopy(model)
    liger_transformers.apply(swapped, mlp=True)
    for each in (model, swapped):
        each.gradient_checkpointing_enable({"use_reentrant": False})
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = run(model, inputs)[1], run(swapped, inputs)[1]
    assert calls["gated_mlp"] == 4
    for name, exact in truth.items():
        errors = [float((gradients[name] - exact).abs().max()) for gradients in (ours, plain)]
        assert errors[0] <= 2 * errors[1] + 2**-8 * float(exact.abs().max()), name


def test_weights_of_another_dtype_take_the_modules_own_path(calls: Counter[str]) -> None:
    """So that the error is the one of before."""
    model = build("llama")
    liger_transformers.apply(model, mlp=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[0].mlp.double()
    calls.clear()
    with pytest.raises(RuntimeError, match="same dtype"):
        run(model, batch())
    assert calls["gated_mlp"] == 0


@pytest.mark.parametrize("checkpointing", [True, False])
def test_compile(checkpointing: bool) -> None:
    """A single graph, in which the partitioner chooses what is made again: the module's own code."""
    model, inputs = build("llama"), batch()
    del inputs["attention_mask"]
    want = run(copy.deepcopy(model), inputs)
    liger_transformers.apply(model, mlp=True)
    checkpoint(model, "not reentrant" if checkpointing else "none")
    torch._dynamo.reset()
    output, gradients = run(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    assert_same(want, (output, {key.removeprefix("_orig_mod."): gradient for key, gradient in gradients.items()}))


def test_a_compiled_layer_in_a_checkpoint() -> None:
    model, inputs = build("llama"), batch()
    want = run(copy.deepcopy(model), inputs)
    liger_transformers.apply(model, mlp=True)
    checkpoint(model, "not reentrant")
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    assert_same(want, run(model, inputs))


def test_generate_copy_and_store() -> None:
    model = build("llama")
    swapped = copy.deepcopy(model)
    liger_transformers.apply(swapped, mlp=True)
    assert all(swapped_for(layer.mlp) is not None for layer in copy.deepcopy(swapped).model.layers)
    file = io.BytesIO()
    torch.save(swapped, file)
    again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert classes(again.modules()) == classes(model.modules())
    swapped.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"max_new_tokens": 4, "do_sample": False}
    ids = batch()["input_ids"]
    assert torch.equal(swapped.eval().generate(ids, **options), model.eval().generate(ids, **options))


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "max_position_embeddings": 512}


def step(monkeypatch: pytest.MonkeyPatch, kind: str, **options: Any) -> tuple[Seen, tuple[Any, Gradients]]:
    """A step of a model whose MLPs take most memory, by the toy language."""
    model = build("llama", **SIZES)
    liger_transformers.apply(model, **options)
    checkpoint(model, kind)
    ids = torch.randint(8, 99, (2, 512), generator=torch.Generator().manual_seed(0))
    gc.disable()  # when it frees what refers to itself depends on what ran before, and with it the peak
    try:
        with toy_language(monkeypatch), Seen() as seen:
            result = run(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    finally:
        gc.enable()
    return seen, result


@pytest.mark.parametrize("lean", [False, True])
def test_a_step_makes_as_many_products(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up twice in a layer, down once: by the op in its own backward, without it in the recomputation."""
    before, want = step(monkeypatch, "not reentrant", lean=lean)
    after, actual = step(monkeypatch, "not reentrant", lean=lean, mlp=True)
    assert_same(want, actual)
    assert after.products == before.products
    every, _ = step(monkeypatch, "none", lean=lean)
    # Each layer repeats q, k, v, o, gate and up, but neither the last product of its MLP nor the head.
    assert after.products > every.products


def test_a_step_without_checkpointing_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before, want = step(monkeypatch, "none")
    after, actual = step(monkeypatch, "none", mlp=True)
    assert_same(want, actual, rtol=0)
    assert (after.products, after.peak) == (before.products, before.peak)


def test_a_step_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its peak it holds five of a layer's branches; with a budget, a third of that, and sums."""
    branch = 2 * 512 * SIZES["intermediate_size"] * 4
    before, want = step(monkeypatch, "not reentrant", lean=True)
    whole, _ = step(monkeypatch, "not reentrant", lean=True, mlp=True)
    monkeypatch.setattr(mlp, "SMALL", 0)
    after, actual = step(monkeypatch, "not reentrant", lean=True, mlp=True)
    assert_same(want, actual)
    assert before.peak >= 5 * branch
    assert whole.peak <= before.peak + branch // 8
    assert after.peak <= before.peak - 3 * branch


@pytest.mark.parametrize(("tokens", "expected"), [(64, None), (65536, 5 * 65536 * 8192 * 2 // 3)])
def test_the_budget(tokens: int, expected: int | None) -> None:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((tokens, 2048), (8192, 2048)))
    assert mlp.memory_budget(x, weight) == expected
