"""Two steps of TRL's trainers on a swapped model log and learn what they do on the plain one, and make no logits."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import trainers
import trl.trainer.utils as trl_utils
from tiny_models import MOE, build
from torch import Tensor, nn
from transformers import set_seed

import liger_transformers
from liger_transformers.logits import Logits
from liger_transformers.logprobs import LogSoftmax, Softmax, Surprise

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

    for cls in (Logits, LogSoftmax, Softmax, Surprise):
        count(cls, "compute", "logits")
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
    got = train(make, swap, model, with_reference, options)
    assert not +dense
    assert calls["fused_linear_logit_statistics"] + calls["fused_linear_cross_entropy"] >= 2
    assert_equal(want, got)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=SLOW) for name in MORE_CASES)])
def test_trl_trainer(name: str, dense: Counter[str], calls: Counter[str]) -> None:
    make, options = {**CASES, **MORE_CASES}[name]
    compared(make, options, {"trl": True, "lazy": "smoothing" in name}, dense, calls)


@pytest.mark.parametrize("name", [*ESCAPING, *(pytest.param(name, marks=SLOW) for name in MORE_ESCAPING)])
def test_trainer_of_logits(name: str, dense: Counter[str], calls: Counter[str]) -> None:
    make, options = {**ESCAPING, **MORE_ESCAPING}[name]
    compared(make, options, {"lazy": True}, dense, calls)
