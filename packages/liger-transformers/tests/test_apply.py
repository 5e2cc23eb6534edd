"""Modules that `apply` swaps, leaves and reports, and a swapped model that is copied, stored, generated from and restored."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from tiny_models import VOCABULARY, assert_same, batch, build, classes, run, skip_unknown
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_language import toy_language
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.activations import ReLUSquaredActivation

import liger_core
import liger_transformers
from liger_core import dispatch
from liger_transformers import norms, rotary
from liger_transformers.logits import Logits
from liger_transformers.swap import swapped_for


def test_report() -> None:
    model = build("olmo2")
    report = liger_transformers.apply(model)
    assert report.swapped == {
        ("Olmo2DecoderLayer", "lean(in eager mode)"): 2,
        ("Olmo2Attention", "rope"): 2,
        ("Olmo2RMSNorm", "rms_norm(offset=0, casting_mode='gemma')"): 9,
        ("Olmo2MLP.act_fn", "swiglu"): 2,
        ("Olmo2ForCausalLM.lm_head", "fused_linear_cross_entropy"): 1,
    }
    assert not report.left
    assert "9 × rms_norm(offset=0, casting_mode='gemma')" in str(report)
    assert str(report).endswith("\n  no kernel: PyTorch reference on cpu")
    assert liger_transformers.apply(model) == report  # again: the same, and nothing is swapped twice
    assert liger_transformers.report(copy.deepcopy(model)) == report
    assert "Olmo2RMSNorm((32,), eps=1e-05, liger: rms_norm(offset=0, casting_mode='gemma'))" in str(model)
    liger_transformers.restore(model)
    assert str(liger_transformers.report(model)) == "Olmo2ForCausalLM\n  nothing is swapped"
    assert "liger" not in str(model)
    assert classes(model.modules()) == classes(build("olmo2").modules())


def test_report_at_another_time() -> None:
    """It has the swaps' options. A forward that was bound later calls the swapped one; a head that came later isn't swapped."""
    model = build("qwen3_moe", num_hidden_layers=1)
    report = liger_transformers.apply(model, mlp=True, experts=True, lean=True, lazy=True)
    assert "fused_moe" in report.ops
    assert liger_transformers.report(model) == report
    model.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), model)
    assert liger_transformers.report(model) == report
    del model.forward
    model.lm_head = nn.Linear(32, 99)
    why = "it came after the swap; call apply again"
    assert liger_transformers.report(model).left["Qwen3MoeForCausalLM.lm_head", why] == 1


def test_report_of_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", num_hidden_layers=1)
    with toy_language(monkeypatch):
        gates = liger_transformers.apply(model, rms_norm=False, rope=False, loss=False)
        assert gates.kernels == ["kernels: toy on cpu"]
        text = "kernels: PyTorch reference (rms_norm, rope); toy (swiglu) on cpu"
        assert liger_transformers.apply(model, loss=False).kernels == [text]
        with liger_core.use("toy"):
            (line,) = liger_transformers.report(model).kernels
            assert line.startswith("no kernel: rms_norm on cpu raises Unsupported: toy")
    assert liger_transformers.report(model).kernels == ["no kernel: PyTorch reference on cpu"]


@pytest.mark.parametrize(
    ("kind", "op"),
    [("rms_norm", "rms_norm"), ("rope", "rope"), ("glu", "swiglu"), ("loss", "fused_linear_cross_entropy")],
)
def test_kinds(kind: str, op: str, calls: Counter[str]) -> None:
    model = build("llama")
    report = liger_transformers.apply(model, **{kind: False})
    calls.clear()
    model(**batch())
    assert op not in report.ops
    assert calls[op] == 0
    assert len(calls) == 3


def test_swaps_are_proved_under_a_demand_that_a_cpu_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for proof in (norms._norm_class, rotary._rotary_class):
        proof.cache_clear()
    monkeypatch.setattr(dispatch.state, "demand", "acme")
    assert liger_transformers.apply(build("llama")).ops.keys() >= {"rms_norm", "rope", "swiglu"}
    assert dispatch.state.demand == "acme"


class Odd(nn.Module):
    """Named like a norm, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_nothing_to_swap(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Odd())
    with pytest.raises(ValueError, match="swapped nothing in Sequential: Odd: it is neither rms_norm"):
        liger_transformers.apply(model)
    with caplog.at_level(logging.WARNING):
        report = liger_transformers.apply(model, strict=False)
    assert "swapped nothing in Sequential" in caplog.text
    assert sum(report.left.values()) == 1
    off = dict.fromkeys(("rms_norm", "layer_norm", "rope", "glu", "loss"), False)
    with pytest.raises(
        ValueError, match=r"in LlamaForCausalLM: rms_norm=False, .*, loss=False left such modules out; it"
    ):
        liger_transformers.apply(build("llama"), **off)
    with pytest.raises(
        ValueError, match="in Sequential: loss=False left such modules out; Odd: it is neither rms_norm"
    ):
        liger_transformers.apply(model, loss=False)


def test_other_arguments() -> None:
    for function in (liger_transformers.apply, liger_transformers.restore):
        with pytest.raises(TypeError, match=f"{function.__name__}: model is a str; it takes a torch.nn.Module"):
            function(cast("Any", "gpt2"))
    with pytest.raises(TypeError, match="apply: rope is 'no'; it takes True or False"):
        liger_transformers.apply(build("llama"), rope=cast("Any", "no"))
    with pytest.raises(TypeError, match="apply: mlp is 'no'; it takes True or False"):
        liger_transformers.apply(build("llama"), mlp=cast("Any", "no"))


def test_another_instance_is_untouched(calls: Counter[str]) -> None:
    one, two = build("llama"), build("llama")
    liger_transformers.apply(one)
    calls.clear()
    assert two(**batch()).logits is not None
    assert not calls


@pytest.mark.parametrize(
    "place", ["model.norm", "model.layers.0.mlp.act_fn", "model.layers.0.self_attn", "lm_head", ""]
)
def test_forward_bound_before(place: str, calls: Counter[str]) -> None:
    """A forward that is bound to the instance calls the old class's: left, and said so."""
    model = build("llama")
    module = model.get_submodule(place)
    old: Any = type(module).forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: old(self, *args, **kwargs), module)
    report = liger_transformers.apply(model)
    assert ["bound to the instance" in why for _, why in report.left] == [True]
    calls.clear()
    model(**batch())
    assert calls == report.ops


def test_forward_bound_afterwards(calls: Counter[str]) -> None:
    """A head whose logits an instance's forward casts to float32, as TRL's does."""
    model, inputs = build("llama"), batch()
    want = run(copy.deepcopy(model), inputs)
    liger_transformers.apply(model)
    original = model.lm_head.forward
    model.lm_head.forward = types.MethodType(lambda self, x: original(x).float(), model.lm_head)
    assert_same(want, run(model, inputs))
    assert calls["fused_linear_cross_entropy"] == 1


HOOKS: dict[str, Callable[[Any], Any]] = {
    "dispatched": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "offloaded to disk": lambda model: disk_offload(model, tempfile.mkdtemp(), execution_device=torch.device("cpu")),
    "removed": lambda model: remove_hook_from_module(HOOKS["dispatched"](model), recurse=True),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hooks", HOOKS)
def test_accelerate_hooks(hooks: str, first: bool, calls: Counter[str]) -> None:
    """Hooks of a device_map bind a forward to each module. The swap is beneath them, and `restore` undoes it there."""
    want, model, inputs = run(HOOKS[hooks](build("llama")), batch()), build("llama"), batch()
    if first:
        liger_transformers.apply(model)
    model = HOOKS[hooks](model)
    report = liger_transformers.report(model) if first else liger_transformers.apply(model)
    assert report.ops == {"rms_norm": 5, "rope": 2, "swiglu": 2, "fused_linear_cross_entropy": 1}
    assert not report.left
    calls.clear()
    assert_same(want, run(model, inputs))
    assert calls == report.ops
    if hooks != "offloaded to disk":  # accelerate keeps such weights beside the model, which a copy doesn't
        calls.clear()
        assert_same(want, run(copy.deepcopy(model), inputs))
        assert calls == report.ops
    calls.clear()
    liger_transformers.restore(model)
    assert_same(want, run(model, inputs))
    assert not calls


def test_accelerate_hooks_that_a_swap_would_skip() -> None:
    """An activation whose product is deferred, and linear layers whose weights an MLP's forward reads."""
    model = build("llama")
    HOOKS["dispatched"](model.model.layers[0].mlp)
    add_hook_to_module(model.model.layers[1].mlp.act_fn, AlignDevicesHook("cpu"))
    report = liger_transformers.apply(model, mlp=True)
    assert report.left == {
        ("LlamaMLP", "gate_proj has hooks, which would not be called"): 1,
        ("LlamaMLP", "act_fn has hooks, which would not be called"): 1,
        ("LlamaMLP.act_fn", "it has hooks, which get a tensor"): 1,
    }


@pytest.mark.parametrize("name", ["llama", "gemma2", "starcoder2"])
def test_parameters_that_are_attributes(name: str) -> None:
    """FSDP1 takes parameters out of their modules, and sets views of what it gathered as attributes."""
    model, inputs = build(name), batch()
    want = run(model, inputs)
    model.zero_grad()
    liger_transformers.apply(model)
    parameters = dict(model.named_parameters())
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, key)
            setattr(module, key, parameter.view_as(parameter))
    loss = model(**inputs).loss
    loss.backward()
    assert_same(
        want, (types.SimpleNamespace(loss=loss), {key: p.grad for key, p in parameters.items() if p.grad is not None})
    )


def test_quantised_head() -> None:
    """A subclass of Linear with a forward of its own is left, and the plain loss is right."""

    class Linear4(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    model, inputs = build("llama"), batch()
    want = run(model, inputs)
    model.lm_head.__class__ = Linear4
    report = liger_transformers.apply(model)
    assert ("LlamaForCausalLM.lm_head", "lm_head is a Linear4, whose forward is not nn.Linear's") in report.left
    actual = run(model, inputs)
    assert_same(want, actual)
    assert actual[0].logits is not None


def test_logits_in_training() -> None:
    model, inputs = build("llama"), batch()
    want = model(**inputs).logits
    liger_transformers.apply(model)
    torch.testing.assert_close(model(**inputs).logits + 0, want)
    assert type(model(**inputs, skip_logits=False).logits) is Tensor
    torch.testing.assert_close(model(**inputs, skip_logits=False).logits, want)
    torch.testing.assert_close(model(**{**inputs, "labels": None}).logits, want)
    torch.testing.assert_close(model(**{**inputs, "labels": None}, skip_logits=True).logits, want)


def test_tuples() -> None:
    model, inputs = build("llama"), batch()
    liger_transformers.apply(model)
    loss, logits = model(**inputs, return_dict=False)
    torch.testing.assert_close(loss, model(**inputs).loss)
    torch.testing.assert_close(logits + 0, model(**inputs, skip_logits=False).logits)


OTHER_LOSSES: list[dict[str, Any]] = [
    {"lse_square_scale": 0.1},
    {"token_scaling": True, "memory_budget": 2**20},
    {"lse_square_scale": 0.1, "token_scaling": True, "accum_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OTHER_LOSSES)
def test_options_of_the_loss(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In training it is the op's own loss with these options, compiled as well, and if a hook changes its gradient."""
    model, inputs = build("llama", num_hidden_layers=1), batch()
    del inputs["attention_mask"]
    ids, labels = inputs["input_ids"], inputs["labels"]
    plain = model(**inputs).loss
    x, target = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = liger_core.fused_linear_cross_entropy(x, model.lm_head.weight, target, **options)
    loss.backward()
    output = types.SimpleNamespace(loss=loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert float((loss - plain).detach().abs()) > 0.1
    report = liger_transformers.apply(model, loss=options)
    described = ", ".join(f"{name}={value!r}" for name, value in options.items())
    assert ("LlamaForCausalLM.lm_head", f"fused_linear_cross_entropy({described})") in report.swapped
    # An earlier call's choice stays.
    assert liger_transformers.report(model) == liger_transformers.apply(model) == report
    calls: list[dict[str, Any]] = []
    op = liger_core.fused_linear_cross_entropy
    with monkeypatch.context() as patch:
        patch.setattr(liger_core, "fused_linear_cross_entropy", lambda *a, **k: (calls.append(k), op(*a, **k))[1])
        assert_same((output, gradients), run(model, inputs))
    assert calls[0].items() >= options.items()
    if options is OTHER_LOSSES[-1]:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(**inputs).loss, loss)
    handle = model.lm_head.register_forward_hook(lambda module, args, z: z.register_hook(lambda g: 2 * g) and None)
    assert_same((output, {name: 2 * gradient for name, gradient in gradients.items()}), run(model, inputs))
    handle.remove()
    with pytest.raises(RuntimeError, match=f"the loss lacks {next(iter(options))}.* made, as by skip_logits=False"):
        model(**inputs, skip_logits=False)
    torch.testing.assert_close(model.eval()(**inputs).loss, plain)


def test_options_of_the_loss_are_checked() -> None:
    model = build("llama", num_hidden_layers=1)
    for error, loss, message in (
        (
            ValueError,
            {"z_loss": 1.0},
            "loss has 'z_loss'; it takes lse_square_scale, token_scaling, accum_dtype, memory_budget",
        ),
        (TypeError, {"token_scaling": "yes"}, "token_scaling is 'yes'"),
        (TypeError, "yes", "loss is 'yes'; it takes True, False or a dict of options"),
    ):
        with pytest.raises(error, match=message):
            liger_transformers.apply(model, loss=cast("Any", loss))
    with pytest.raises(ValueError, match="loss has options, which the loss of TRL's head"):
        liger_transformers.apply(model, trl=True, loss={"token_scaling": True})


def test_labels_by_position(calls: Counter[str]) -> None:
    model, inputs = build("llama"), batch()
    liger_transformers.apply(model)
    ids, labels = inputs["input_ids"], inputs["labels"]
    model(ids, None, None, None, None, labels)
    assert calls["fused_linear_cross_entropy"] == 1


def test_shift_labels(calls: Counter[str]) -> None:
    """Context parallelism passes labels that are shifted already."""
    model, inputs = build("llama"), batch()
    labels = inputs.pop("labels")
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), 1)
    more = {"labels": labels, "shift_labels": shifted}
    want = model(**inputs, **more).loss
    liger_transformers.apply(model)
    torch.testing.assert_close(model(**inputs, **more).loss, want)
    assert calls["fused_linear_cross_entropy"] == 1


def test_generate() -> None:
    model = build("llama").eval()
    swapped = copy.deepcopy(model)
    liger_transformers.apply(swapped)
    ids = batch()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(swapped.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("tied", [True, False])
def test_another_head(tied: bool, calls: Counter[str], caplog: pytest.LogCaptureFixture) -> None:
    """A head that transformers puts in the place of a swapped one is swapped, or a warning says why not."""
    results = []
    for swap in (False, True):
        model = build("llama", num_hidden_layers=1, tie_word_embeddings=tied)
        if swap:
            liger_transformers.apply(model)
        torch.manual_seed(2)
        model.resize_token_embeddings(VOCABULARY + 4, mean_resizing=False)
        results.append(run(model, batch()))
    assert_same(*results)
    assert calls["fused_linear_cross_entropy"] == 1
    model.set_output_embeddings(nn.Linear(32, VOCABULARY + 4, bias=False))
    model(**batch())
    assert calls["fused_linear_cross_entropy"] == 2
    assert not caplog.text
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 4), nn.Linear(4, VOCABULARY + 4)))
    assert "the new head of LlamaForCausalLM stays as it is: " in caplog.text
    liger_transformers.restore(model)
    assert all(swapped_for(module) is None for module in model.modules())


def test_save_pretrained(tmp_path: Path) -> None:
    model = build("qwen3")
    liger_transformers.apply(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == "Qwen3ForCausalLM"
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(swapped_for(module) is None for module in again.modules())


def test_pickle_is_of_the_plain_model() -> None:
    model, inputs = build("llama"), batch()
    want = run(model, inputs)
    plain = classes(model.modules())
    liger_transformers.apply(model)
    file = io.BytesIO()
    torch.save(model, file)
    again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert b"liger" not in pickle.dumps(model)
    assert classes(again.modules()) == plain
    assert_same(want, run(again, inputs))


def test_deepcopy(calls: Counter[str]) -> None:
    model, inputs = build("llama"), batch()
    liger_transformers.apply(model)
    again = copy.deepcopy(model)
    assert classes(again.modules()) == classes(model.modules())
    assert_same(run(model, inputs), run(again, inputs))
    liger_transformers.restore(again)
    calls.clear()
    run(again, inputs)
    assert not calls
    run(model, inputs)
    assert calls["fused_linear_cross_entropy"] == 1


def test_meta_device() -> None:
    """Nothing of a model's weights is read."""
    config = AutoConfig.for_model("qwen3_moe", num_experts=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    report = liger_transformers.apply(model)
    layers = config.num_hidden_layers
    assert report.ops == {
        "rms_norm": 4 * layers + 1,
        "rope": layers,
        "swiglu": layers,
        "fused_linear_cross_entropy": 1,
    }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other by spinning, which is processor time if something else runs beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gpt_oss", "falcon_h1", "mistral_large4", "minimax_m3_vl", "qwen2_5_vl"]
)
def test_no_model_takes_a_second(name: str) -> None:
    """Models of their own size, with most modules, of most kinds."""
    skip_unknown(name)
    config = AutoConfig.for_model(name)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config)
    start = time.process_time()
    assert liger_transformers.apply(model, experts=True).ops["rms_norm"]
    assert time.process_time() - start < 1.0


class Operators(TorchDispatchMode):
    """How many operators run."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_class_is_proved_once() -> None:
    """Norms and rotary functions are proved for the first model alone; an activation in each layer, by six operators."""
    counts = []
    for layers in (2, 2, 40):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", num_hidden_layers=layers))
        with Operators() as operators:
            liger_transformers.apply(model)
        counts.append(operators.count)
    assert counts[0] < 5000
    assert counts[1:] == [6 * 2, 6 * 40]


class Unweighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OnePlus(nn.LayerNorm):
    """As Nemotron's: its weight is the difference to one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


@pytest.mark.parametrize(
    ("norm", "op"),
    [
        (lambda: Unweighted(), "rms_norm(offset=0, casting_mode='llama')"),
        (lambda: nn.RMSNorm(8, eps=1e-5), "rms_norm(offset=0, casting_mode='gemma')"),
        (lambda: nn.LayerNorm(8), "layer_norm"),
        (lambda: nn.LayerNorm(8, bias=False), "layer_norm"),
        (lambda: OnePlus(8), "layer_norm(weight + 1)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(norm: Any, op: str, dtype: torch.dtype, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm()).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, 8, dtype=dtype)
    want = model(x)
    assert {o for _, o in liger_transformers.apply(model).swapped} == {op}
    calls.clear()
    torch.testing.assert_close(model(x), want)
    assert sum(calls.values()) == 1


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8, elementwise_affine=False), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), Odd()]
)
def test_norms_that_are_left(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    assert not liger_transformers.apply(model, strict=False).swapped
    assert type(model[0]) is type(norm)


class Called(nn.Module):
    """A gated MLP that calls its activation as a function, as LFM 2's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate, self.up = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(self.norm(x))) * self.up(x)


def test_an_activation_that_is_no_module_and_a_norm_without_eps_are_reported() -> None:
    report = liger_transformers.apply(Called(), strict=False)
    assert not report.swapped
    assert [what for what, _ in report.left] == ["Called", "RMSNorm"]
    activation, norm = (why for _, why in report.left)
    assert "its code calls silu as a function" in activation
    assert "its eps is None" in norm


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5])
def test_norms_as_wide_as_models(eps: float) -> None:
    """Among many columns a bias nearly cancels some product, so that rounding decides most digits of that element."""
    for width in (768, 1024, 1152, 4096):
        for norm, op in ((nn.LayerNorm, "layer_norm"), (OnePlus, "layer_norm(weight + 1)")):
            report = liger_transformers.apply(nn.Sequential(norm(width, eps=eps)), strict=False)
            assert {o for _, o in report.swapped} == {op}, (width, report)


def test_a_norm_in_mixed_dtypes_returns_what_it_did() -> None:
    """A weight in float32 widens bfloat16, in modes that multiply by it last."""
    model = build("llama")
    norm = model.model.norm
    x = torch.randn(2, 3, 32).bfloat16()
    want = norm(x)
    liger_transformers.apply(model)
    assert norm(x).dtype == want.dtype == torch.float32
    torch.testing.assert_close(norm(x), want, rtol=2**-7, atol=2**-7)


class Gated(nn.Module):
    """A norm times silu(gate), or with `early` the norm of the product, as in Mamba 2."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.weight, self.epsilon, self.early = nn.Parameter(torch.randn(8)), 1e-5, early

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide, factor = x.float(), 1.0 if gate is None else nn.functional.silu(gate.float())
        wide = wide * factor if self.early else wide
        y = self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)
        return y if self.early else (y * factor).to(x.dtype)


@pytest.mark.parametrize("early", [True, False])
def test_gated_norms(early: bool, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(early))
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    want = [model[0](x, gate), model[0](x), model[0](x, gate=gate)]
    report = liger_transformers.apply(model, strict=False)
    calls.clear()
    torch.testing.assert_close([model[0](x, gate), model[0](x), model[0](x, gate=gate)], want)
    assert bool(report.swapped) is not early
    assert calls == ({} if early else {"rms_norm": 1, "swiglu": 1})


class Squared(nn.Module):
    """A feed-forward network around the square of ReLU, alone or as a gate."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.act, self.up, self.down = ReLUSquaredActivation(), nn.Linear(8, 12), nn.Linear(12, 8)
        self.gate = nn.Linear(8, 12) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class SquaredGate(Squared):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("cls", [Squared, SquaredGate])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_squared(cls: Any, dtype: torch.dtype, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(cls(cls is SquaredGate)).to(dtype), torch.randn(4, 8, dtype=dtype)
    want = model(x)
    report = liger_transformers.apply(model)
    assert report.swapped == {(f"{cls.__name__}.act", "relu_squared"): 1}
    calls.clear()
    torch.testing.assert_close(model(x), want, rtol=2**-7, atol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    assert calls == {"relu_squared": 1}
    liger_transformers.restore(model)
    assert torch.equal(model(x), want)
    assert calls == {"relu_squared": 1}


def test_norm_called_by_keyword() -> None:
    model = build("llama")
    x = torch.randn(2, 3, 32)
    want = model.model.norm(hidden_states=x)
    liger_transformers.apply(model)
    torch.testing.assert_close(model.model.norm(hidden_states=x), want)


def test_tensor_parallel_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has a part of the head's columns, so cross-entropy of them is not the loss: no DTensor, no swap."""
    model = build("llama")
    monkeypatch.setattr(model, "_tp_size", 2)
    report = liger_transformers.apply(model)
    why = "its head may be divided by tensor parallelism, and not by rows as DTensors are"
    assert ("LlamaForCausalLM.lm_head", why) in report.left
    assert "fused_linear_cross_entropy" not in report.ops


def test_another_thread_keeps_its_logits() -> None:
    """A forward with labels in one thread doesn't tell the head of a forward in another one."""
    model, inputs = build("llama"), batch()
    liger_transformers.apply(model)
    started, finish = threading.Event(), threading.Event()
    outputs = []

    def wait(*_: Any) -> None:
        started.set()
        assert finish.wait(60)

    def train() -> None:
        outputs.append(model(**inputs))

    handle = model.model.norm.register_forward_hook(wait)
    thread = threading.Thread(target=train)
    thread.start()
    assert started.wait(60)
    handle.remove()
    assert type(model.lm_head(torch.randn(1, 32))) is Tensor
    finish.set()
    thread.join()
    assert type(outputs[0].logits) is Logits
