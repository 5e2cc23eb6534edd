"""The experts of mixtures: those that are fused_moe run it, the others keep their own code and the report says why."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny_models import assert_same, batch, build, run
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import liger_transformers


@pytest.mark.parametrize(("name", "layers"), [("mixtral", 2), ("qwen3_moe", 2), ("deepseek_v3", 1), ("olmoe", 2)])
def test_models(name: str, layers: int, calls: Counter[str]) -> None:
    model, inputs = build(name), batch(name)
    swapped = copy.deepcopy(model)
    report = liger_transformers.apply(swapped, experts=True)
    assert report.ops["fused_moe"] == layers
    assert liger_transformers.apply(swapped, experts=True) == report
    want = run(model, inputs)
    calls.clear()
    assert_same(want, run(swapped, inputs))
    assert calls["fused_moe"] == layers
    liger_transformers.restore(swapped)
    calls.clear()
    assert_same(want, run(swapped, inputs))
    assert not calls


def test_they_stay_by_default(calls: Counter[str]) -> None:
    model = build("mixtral")
    report = liger_transformers.apply(model)
    assert ("MixtralExperts.act_fn", "swiglu") in report.swapped
    calls.clear()  # the proof of what the experts are, if no test before this one asked for it
    run(model, batch())
    assert calls["fused_moe"] == 0


def test_unlike_experts_are_reported(calls: Counter[str]) -> None:
    """gpt_oss has biases: its experts stay. Their gate is swiglu: clamped, of columns by turns, with one added."""
    model = build("gpt_oss")
    swapped = copy.deepcopy(model)
    report = liger_transformers.apply(swapped, experts=True)
    why = "it has down_proj_bias, gate_up_proj_bias; fused_moe takes gate_up_proj and down_proj"
    assert report.left == {("GptOssExperts", why): 2}
    assert report.swapped["GptOssExperts._apply_gate", "swiglu(turns=1, limit=7, alpha=1.702, shift=1)"] == 2
    want = run(model, batch())
    calls.clear()
    assert_same(want, run(swapped, batch()))
    assert calls["fused_moe"] == 0
    assert calls["swiglu"] >= 2


class Experts(nn.Module):
    """A loop over experts, in the few forms that models have."""

    def __init__(self, act: str = "silu", limit: float | None = None, transposed: bool = False, early: bool = False):
        super().__init__()
        self.num_experts, self.limit, self.is_transposed, self.early = 5, limit, transposed, early
        shapes = ((5, 16, 12), (5, 6, 16)) if transposed else ((5, 12, 16), (5, 16, 6))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(*shape)) for shape in shapes)
        self.act_fn = ACT2FN[act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            rows, place = torch.where(top_k_index == e)
            gate_up, down = self.gate_up_proj[e], self.down_proj[e]
            gate_up, down = (gate_up, down) if self.is_transposed else (gate_up.T, down.T)
            weight = top_k_weights[rows, place, None]
            x = hidden_states[rows] * weight if self.early else hidden_states[rows]
            gate, up = (x @ gate_up).chunk(2, -1)
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            z = (self.act_fn(gate) * up) @ down
            y = y.index_add(0, rows, z if self.early else z * weight)
        return y


def routed() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(7, 16), torch.randn(7, 5).topk(3).indices, torch.rand(7, 3)


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ({}, "fused_moe(activation='silu')"),
        ({"act": "gelu_pytorch_tanh"}, "fused_moe(activation='gelu_tanh')"),
        ({"limit": 1.5}, "fused_moe(activation='silu', limit=1.5)"),
        ({"transposed": True}, "fused_moe(activation='silu')"),
    ],
)
def test_forms(options: dict[str, Any], op: str, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    model, arguments = nn.Sequential(Experts(**options)), routed()
    want = model[0](*arguments)
    gradients = torch.autograd.grad(want.square().sum(), list(model.parameters()))
    assert liger_transformers.apply(model, experts=True).swapped == {("Experts", op): 1}
    calls.clear()
    actual = model[0](*arguments)
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-4)
    assert calls == {"fused_moe": 1}
    ours = torch.autograd.grad(actual.square().sum(), list(model.parameters()))
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"early": True}, "it is not fused_moe"),
        ({"act": "gelu"}, "its activation is neither SiLU nor GELU's tanh approximation"),
    ],
)
def test_forms_that_are_left(options: dict[str, Any], why: str) -> None:
    torch.manual_seed(0)
    report = liger_transformers.apply(nn.Sequential(Experts(**options)), experts=True, strict=False)
    assert ("Experts", why) in report.left


@pytest.mark.parametrize("case", ["expert parallel", "by keyword", "other dtype"])
def test_calls_that_the_op_does_not_take(case: str, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    model, (x, index, weights) = nn.Sequential(Experts()), routed()
    keywords = {"top_k_weights": weights} if case == "by keyword" else {}
    x = x.double() if case == "other dtype" else x
    model = model.double() if case == "other dtype" else model
    want = model[0](x, index, weights)
    liger_transformers.apply(model, experts=True)
    if case == "expert parallel":
        model[0]._is_expert_parallel = True
    if case == "other dtype":
        model[0].down_proj.data = model[0].down_proj.data.float()
        with pytest.raises(RuntimeError, match="dtype"):  # its own, not the op's
            model[0](x, index, weights)
        assert calls["fused_moe"] == 0
        return
    calls.clear()
    torch.testing.assert_close(model[0](x, index, *([] if keywords else [weights]), **keywords), want)
    assert not calls["fused_moe"]


class OwnGate(nn.Module):
    """A gate that is no module, in the few forms that models have."""

    def __init__(self, turns: bool, limit: float | None, alpha: float, shift: float, square: bool = False) -> None:
        super().__init__()
        self.turns, self.limit, self.alpha, self.shift, self.square = turns, limit, alpha, shift, square

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.turns else gate_up.chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        y = (up + self.shift) * (gate * torch.sigmoid(gate * self.alpha))
        return y * y if self.square else y

    def forward(self, gate_up: Tensor) -> Tensor:
        return self._apply_gate(gate_up)


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ((False, None, 1.0, 0.0), "swiglu"),
        ((True, 7.0, 1.702, 1.0), "swiglu(turns=1, limit=7, alpha=1.702, shift=1)"),
        ((False, 7.0, 1.702, 1.0), "swiglu(limit=7, alpha=1.702, shift=1)"),
        ((False, 500.0, 1.0, 0.0), "swiglu(limit=500)"),
    ],
)
def test_gates_that_are_no_modules(options: tuple[Any, ...], op: str, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(OwnGate(*options)), (torch.randn(9, 12) * 9).requires_grad_()
    want = model(x)
    (gradient,) = torch.autograd.grad(want.square().sum(), x)
    report = liger_transformers.apply(model)
    assert report.swapped == {("OwnGate._apply_gate", op): 1}
    assert liger_transformers.apply(model) == report
    calls.clear()
    actual = model(x)
    assert calls == {"swiglu": 1}
    torch.testing.assert_close(actual, want)
    torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), x)[0], gradient)
    liger_transformers.restore(model)
    assert type(model[0]) is OwnGate


def test_a_gate_that_is_left() -> None:
    model = nn.Sequential(OwnGate(False, 7.0, 1.702, 1.0, square=True))
    report = liger_transformers.apply(model, strict=False)
    assert report.left == {("OwnGate._apply_gate", "its _apply_gate is not swiglu"): 1}
    assert not liger_transformers.apply(nn.Sequential(OwnGate(False, 7.0, 1.0, 1.0)), glu=False, strict=False).swapped


@pytest.fixture
def interface() -> Iterator[None]:
    """transformers' interface with our name in it, and without it afterwards."""
    liger_transformers.register_experts()
    yield
    del type(ALL_EXPERTS_FUNCTIONS)._global_mapping["liger"]


def choose(model: Any) -> None:
    try:
        model.set_experts_implementation("liger")
    except ValueError as error:
        if "The only possible arguments are" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} takes no other names than its own")


@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("applied", [False, True])
def test_the_interface(applied: bool, calls: Counter[str]) -> None:
    model, inputs = build("qwen3_moe"), batch()
    want = run(model, inputs)
    if applied:
        liger_transformers.apply(model, experts=True)
    choose(model)
    assert_same(want, run(model, inputs))
    calls.clear()  # the proof of what the experts are, if no test before this one asked for it
    assert_same(want, run(model, inputs))
    assert calls["fused_moe"] == 2
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    calls.clear()
    assert_same(want, run(model, inputs))  # transformers' loop, for what the op doesn't take
    assert calls["fused_moe"] == 1


@pytest.mark.usefixtures("interface")
def test_the_interface_refuses_unlike_experts() -> None:
    model = build("gpt_oss")
    choose(model)
    with pytest.raises(ValueError, match="GptOssExperts can't run fused_moe: it has down_proj_bias"):
        run(model, batch())
