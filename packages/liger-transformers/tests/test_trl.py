"""Two steps of TRL's trainers on a swapped model log and learn what they do on the plain one, and make no logits."""

from __future__ import annotations

import copy
import types
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trainers
import trl.trainer.utils as trl_utils
from accelerate.utils import convert_outputs_to_fp32
from tiny_models import MOE, batch, build
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, set_seed
from trl.trainer.utils import add_fused_lm_head

import liger_transformers
from liger_transformers import LigerCallback
from liger_transformers.logits import Logits, State
from liger_transformers.swap import swapped_for

SLOW = pytest.mark.slow


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Logits that were made for more than a token per sequence, and calls of TRL's own op."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, key: str, when: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[key] += when(*args)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(State, "compute", "logits")
    count(nn.Linear, "forward", "logits", lambda self, x: self.out_features == trainers.VOCABULARY and x.shape[-2] > 1)
    count(trl_utils._ChunkedLogProbFunction, "apply", "TRL's op")
    return counts


def lora(name: str = "llama", **options: Any) -> nn.Module:
    model = build(name)
    torch.manual_seed(3)
    config = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**config))


def reference(options: dict[str, Any]) -> nn.Module:
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if options:
        liger_transformers.apply(model, **{**options, "lazy": "always"})
    return model


Run = tuple[list[dict[str, float]], dict[str, Tensor]]


def train(
    make: Callable[..., Any], swap: dict[str, Any], model: Any, with_reference: bool, options: dict[str, Any]
) -> Run:
    """Two steps: what they log, and the parameters behind them."""
    set_seed(0)
    model = build(model) if isinstance(model, str) else model()
    if swap:
        liger_transformers.apply(model, **swap)
    if with_reference:
        options = {**options, "reference": reference(swap)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(model, **options)
        set_seed(1)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal(want: Run, got: Run) -> None:
    assert len(want[0]) == len(got[0]) == 2
    for plain, ours in zip(want[0], got[0], strict=True):
        assert plain.keys() == ours.keys()
        for key, value in plain.items():
            if isinstance(value, float) and not any(word in key for word in ("time", "per_second", "runtime")):
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=2e-5), key
    for name, parameter in want[1].items():
        largest = float(parameter.abs().max())
        assert float((parameter - got[1][name]).abs().max()) <= 2e-3 * largest, name


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sft dft": (trainers.sft, {"loss_type": "dft"}),
    "sft assistant": (trainers.sft, {"data": "chat", "assistant_only_loss": True}),
    "sft packing": (trainers.sft, {"packing": True, "max_length": 32}),
    "sft smoothing": (trainers.sft, {"label_smoothing_factor": 0.1}),
    "sft moe": (trainers.sft, {"model": "qwen3_moe with aux loss"}),
    "dpo mixed": (trainers.dpo, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "dpo wpo": (trainers.dpo, {"use_weighting": True}),
    "dpo lora": (trainers.dpo, {"model": lora, "with_reference": False}),
    "kto": (trainers.kto, {}),
    "grpo": (trainers.grpo, {"temperature": 0.7, "num_iterations": 2, "top_entropy_quantile": 0.5}),
    "grpo fp32 head": (trainers.grpo, {"cast_lm_head_to_fp32": True}),
    "rloo": (trainers.rloo, {}),
}
"""TRL's fused head: the model's lm_head is never called."""
MORE_CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sft": (trainers.sft, {}),
    "sft completion": (trainers.sft, {"data": "completion"}),
    "sft padding free": (trainers.sft, {"padding_free": True, "max_length": None}),
    "sft granite": (trainers.sft, {"model": "granite"}),
    "dpo": (trainers.dpo, {}),
    "dpo ipo": (trainers.dpo, {"loss_type": ["ipo"]}),
    "dpo ld": (trainers.dpo, {"ld_alpha": 0.5}),
    "dpo precomputed": (trainers.dpo, {"precompute_ref_log_probs": True}),
    "dpo gemma2": (trainers.dpo, {"model": "gemma2"}),
    "dpo trained head": (
        trainers.dpo,
        {"model": lambda: lora(modules_to_save=["lm_head"]), "with_reference": False},
    ),
    "grpo beta": (trainers.grpo, {"beta": 0.1}),
    "sft lora": (trainers.sft, {"model": lora}),
    "kto lora": (trainers.kto, {"model": lora, "with_reference": False}),
    "grpo lora": (trainers.grpo, {"model": lora, "beta": 0.1}),
    "rloo lora": (trainers.rloo, {"model": lora, "beta": 0.1}),
}
ESCAPING: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "cpo": (trainers.cpo, {}),
    "orpo with lora on the head": (trainers.orpo, {"model": lambda: lora(target_modules=["q_proj", "lm_head"])}),
    "label smoothing": (trainers.hf, {"label_smoothing_factor": 0.1}),
    "compute_loss_func": (trainers.hf, {"loss": trainers.cross_entropy}),
}
"""Losses of a model's output without labels."""
MORE_ESCAPING: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "simpo": (trainers.cpo, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "cpo gemma2": (trainers.cpo, {"model": "gemma2"}),
    "orpo": (trainers.orpo, {}),
    "tpo": (trainers.tpo, {}),
}


def compared(
    make: Callable[..., Any], options: dict[str, Any], swap: dict[str, Any], dense: Counter[str], calls: Counter[str]
) -> None:
    options = dict(options)
    model, with_reference = (
        options.pop("model", "llama"),
        options.pop("with_reference", make in (trainers.dpo, trainers.kto)),
    )
    if model == "qwen3_moe with aux loss":
        model = lambda: build("qwen3_moe", **MOE, output_router_logits=True)  # noqa: E731
    want = train(make, {}, model, with_reference, options)
    assert sum(dense.values()) > 0
    dense.clear(), calls.clear()
    actual = train(make, swap, model, with_reference, options)
    assert not +dense
    assert calls["fused_linear_logit_statistics"] + calls["fused_linear_cross_entropy"] >= 2
    assert_equal(want, actual)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=SLOW) for name in MORE_CASES)])
def test_trl_trainer(name: str, dense: Counter[str], calls: Counter[str]) -> None:
    make, options = {**CASES, **MORE_CASES}[name]
    compared(make, options, {"trl": True, "lazy": "smoothing" in name}, dense, calls)


@pytest.mark.parametrize("late", [False, True])
def test_callback(late: bool, dense: Counter[str], calls: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It serves TRL's fused head without being told, whether TRL has bound it already or not."""
    callback = LigerCallback()
    trainer = trainers.sft(build("llama", num_hidden_layers=1), callbacks=None if late else [callback])
    if late:
        trainer.add_callback(callback)
    dense.clear(), calls.clear()
    trainer.train()
    assert not +dense
    assert calls["fused_linear_logit_statistics"] == 2
    assert callback.report is not None
    assert ("LlamaForCausalLM", "fused_linear_logit_statistics(trl)") in callback.report.swapped
    assert "lazy=True" not in capsys.readouterr().out


def test_callback_of_a_trainer_without_trls_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trl.experimental.cpo import CPOConfig

    arguments = CPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for lazy in (False, True):
        model, callback = build("llama", num_hidden_layers=1), LigerCallback(lazy=lazy)
        state = TrainerState(is_world_process_zero=True)
        callback.on_init_end(arguments, state, TrainerControl(), model)
        callback.on_train_begin(arguments, state, TrainerControl(), model)
        assert ("LigerCallback(lazy=True) computes it without them" in capsys.readouterr().out) is not lazy
    callback = LigerCallback(loss=False)
    callback.on_init_end(arguments, state, TrainerControl(), build("llama", num_hidden_layers=1))
    assert callback.report is not None
    assert "fused_linear_cross_entropy" not in callback.report.ops


@pytest.mark.parametrize("name", [*ESCAPING, *(pytest.param(name, marks=SLOW) for name in MORE_ESCAPING)])
def test_trainer_of_logits(name: str, dense: Counter[str], calls: Counter[str]) -> None:
    make, options = {**ESCAPING, **MORE_ESCAPING}[name]
    compared(make, options, {"lazy": True}, dense, calls)


WRONG = {"recurrent_gemma": 0.01, "gemma2": None, "granite": None}
"""By type how far TRL's own fused head is at least from the model's own logits, or None where it is right."""


@pytest.mark.parametrize("name", WRONG)
def test_types_that_trl_gets_wrong(name: str, calls: Counter[str]) -> None:
    """docs/trl.md has all of them, by tools/models.py --trl."""
    plain, swapped, ids = build(name), build(name), batch()["input_ids"]
    truth = plain(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    truth = truth.gather(-1, ids[:, 1:, None]).squeeze(-1)
    add_fused_lm_head(plain)
    liger_transformers.apply(swapped, trl=True)
    add_fused_lm_head(swapped)
    theirs = float((plain(input_ids=ids, labels=ids, fused_lm_head=True).log_probs - truth).detach().abs().max())
    ours = swapped(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    least = WRONG[name]
    assert theirs < 1e-4 if least is None else theirs > least
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    assert calls["fused_linear_logit_statistics"] == 1


@pytest.mark.parametrize("before", [True, False])
def test_fields_and_gradients(before: bool, dense: Counter[str]) -> None:
    """Whether `apply` comes before or after TRL's patch, and with a row that has no label."""
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    steps = []
    for ours in (False, True):
        model, ids = build("gemma2"), batch()["input_ids"]
        labels = ids.clone()
        labels[1] = -100
        if ours and before:
            liger_transformers.apply(model, trl=True)
        add_fused_lm_head(model, temperature=0.7, outputs=outputs)
        if ours and not before:
            report = liger_transformers.apply(model, trl=True)
            assert ("Gemma2ForCausalLM", "fused_linear_logit_statistics(trl)") in report.swapped
        dense.clear()
        actual = model(input_ids=ids, labels=labels, fused_lm_head=True)
        assert dense["TRL's op"] == (not ours)
        assert not dense["logits"]
        (actual.loss + actual.entropy.sum()).backward()
        steps.append(([actual[name] for name in outputs], {n: p.grad for n, p in model.named_parameters()}))
        nothing = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True).loss
        nothing.backward()
        assert nothing == 0
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-4, atol=2e-5)


def test_peft_model_under_trls_head(dense: Counter[str]) -> None:
    """Its forward's output has no logits; LoRA on the head is in the log-probabilities, which TRL's own head ignores."""
    model, ids = lora(target_modules=["q_proj", "lm_head"]), batch()["input_ids"]
    truth = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    liger_transformers.apply(model, trl=True)
    add_fused_lm_head(model.get_base_model())
    dense.clear()
    actual = model(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(actual.log_probs, truth, rtol=1e-4, atol=1e-5)
    assert not +dense


def test_without_the_flag_and_restored(dense: Counter[str]) -> None:
    """TRL's forward without `fused_lm_head` is the model's; `restore` binds TRL's own again."""
    model, inputs = build("llama"), batch()
    want, ids = model(**inputs).loss, inputs["input_ids"]
    add_fused_lm_head(model)
    theirs = model.forward.__func__
    liger_transformers.apply(model, trl=True, lazy=True)
    dense.clear()
    torch.testing.assert_close(model(**inputs).loss, want)
    assert isinstance(model(input_ids=ids).logits, Logits)
    assert not +dense
    assert torch.equal(model.generate(ids, max_new_tokens=2, do_sample=False)[:, :12], ids)
    twin = copy.deepcopy(model)
    assert twin(input_ids=ids).logits.state.form.terms[0].source.parameter is twin.lm_head.weight
    liger_transformers.restore(model)
    assert model.forward.__func__ is theirs
    assert swapped_for(model) is None
    model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert dense["TRL's op"] == 1


def test_another_trl_is_refused() -> None:
    def forward(self: Any, *args: Any, fused_lm_head: bool = False) -> None: ...

    model = build("llama")
    liger_transformers.apply(model, trl=True)
    with pytest.raises(RuntimeError, match=r"serves the fused head of TRL 1\.16"):
        model.forward = types.MethodType(forward, model)


def test_a_wrapped_forward_is_reported() -> None:
    """accelerate has wrapped TRL's forward: it runs, and the report says why."""
    model = build("llama")
    add_fused_lm_head(model)
    inner = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: inner(*args, **kwargs), model)
    report = liger_transformers.apply(model, trl=True)
    assert any("bound to the instance" in why and "apply before that" in why for _, why in report.left)
    assert not any("statistics" in op for _, op in report.swapped)


def test_trls_head_without_the_option_is_reported() -> None:
    model = build("llama")
    add_fused_lm_head(model)
    assert any("or pass trl=True" in why for _, why in liger_transformers.apply(model).left)


@pytest.mark.parametrize("wrapped", [False, True])
def test_trls_head_after_the_swap_is_reported(wrapped: bool) -> None:
    """It never runs the swapped head, and neither does accelerate's wrapper around it."""
    model = build("llama", num_hidden_layers=1)
    assert "fused_linear_cross_entropy" in liger_transformers.apply(model).ops
    add_fused_lm_head(model)
    if wrapped:
        model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    report = liger_transformers.report(model)
    assert "fused_linear_cross_entropy" not in report.ops
    assert any("bound to the instance" in why for _, why in report.left)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="lazy is 'sometimes'; it takes False, True or 'always'"):
        liger_transformers.apply(build("llama"), lazy="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="take loss=True"):
        liger_transformers.apply(build("llama"), trl=True, loss=False)


def test_lazy_is_for_training_without_labels() -> None:
    model, inputs = build("llama"), batch()
    ids = inputs["input_ids"]
    liger_transformers.apply(model, lazy=True)
    liger_transformers.apply(model)  # an earlier call's choice stays
    assert isinstance(model(input_ids=ids).logits, Logits)
    assert type(model(input_ids=ids, skip_logits=False).logits) is Tensor
    assert type(model.eval()(input_ids=ids).logits) is Tensor
    liger_transformers.apply(model, lazy="always")
    assert isinstance(model(input_ids=ids).logits, Logits)


def test_trls_kernel_reads_no_deferred_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, TRL's check of the logits' layout decides that a kernel reads them."""
    monkeypatch.setattr(trl_utils, "_supports_trl_loss_kernel", lambda logits, *args: True)
    model, ids = build("llama"), batch()["input_ids"]
    liger_transformers.apply(model, lazy=True)
    z = model(input_ids=ids).logits
    assert not trl_utils._supports_trl_loss_kernel(z, ids)
    assert trl_utils._supports_trl_loss_kernel(z + 0, ids)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trls_functions_of_deferred_logits(name: str, dtype: torch.dtype, dense: Counter[str]) -> None:
    plain, swapped, ids = build(name).to(dtype), build(name).to(dtype), batch()["input_ids"]
    liger_transformers.apply(swapped, lazy=True, rms_norm=False, rope=False, glu=False)
    steps = []
    for model in (plain, swapped):
        z = model(input_ids=ids).logits
        dense.clear()
        values = [
            trl_utils.selective_log_softmax(z / 0.7, ids),
            trl_utils.selective_log_softmax(z, torch.stack((ids, ids + 1), -1)),
            trl_utils.entropy_from_logits(z[:, :-1]),
            *trl_utils.selective_log_softmax_and_entropy(z, ids, temperature=1.3, row_mask=(ids > 20).long()),
            z.detach()[ids > 20].mean(-1),
        ]
        assert not +dense
        total = sum((v.float() * torch.linspace(-1, 1, v.numel()).view(v.shape)).sum() for v in values[:-1])
        total.backward()
        steps.append(([v.detach().float() for v in values], {n: p.grad.float() for n, p in model.named_parameters()}))
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(steps[1][0], steps[0][0], rtol=tolerance, atol=3 * tolerance)
    for key, gradient in steps[0][1].items():
        assert float((gradient - steps[1][1][key]).abs().max()) <= tolerance * float(gradient.abs().max()) + 1e-6, key
