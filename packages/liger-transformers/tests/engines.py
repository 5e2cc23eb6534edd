r"""Swapped models in the engines that train them, beside plain ones. The engines are not installed with the rest:

UV_PROJECT_ENVIRONMENT=.venv-transformers uv run --no-default-groups --group transformers --with "deepspeed==0.19.8" \
    --with "bitsandbytes==0.50.2" --with "lightning==2.6.*" --with setuptools \
    pytest packages/liger-transformers/tests/engines.py -n 0
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "liger-distributed/tests/helpers"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pool import Pool
from tiny_models import assert_same, batch, build, run

import liger_transformers
from liger_core.contract import Op


class Engine(NamedTuple):
    """A model in an engine: what is called, backward of a loss, a step of the optimizer, and the whole parameters."""

    module: Any
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    parameters: Callable[[], dict[str, Tensor]]
    end: Callable[[], Any] = lambda: None


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, whose steps are the gradients."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def deepspeed(model: nn.Module, apply: Callable[[Any], Any] | None, stage: int, bf16: bool = False) -> Engine:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if not deepspeed.comm.is_initialized():
        os.environ.update(
            RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size())
        )
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=settings)
    if apply is not None:
        apply(engine)

    def parameters() -> dict[str, Tensor]:
        named = dict(engine.module.named_parameters())
        if bf16:  # the optimizer's copies, in float32
            trained = {name: p for name, p in named.items() if p.requires_grad}
            return {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}
        with deepspeed.zero.GatheredParameters([*named.values()], enabled=stage == 3):
            return {name: p.detach().clone() for name, p in named.items()}

    return Engine(engine, engine.backward, engine.step, parameters, engine.destroy)


def fsdp1(model: nn.Module, apply: Callable[[Any], Any] | None, units: str) -> Engine:
    """`units`: the layers; the layers and the head; or those of PEFT's policy."""
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    layers = [module for name, module in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    layers += [module for name, module in model.named_modules() if units == "head" and name.endswith("lm_head")]
    policy: Any = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in layers)
    if units == "peft":
        policy = fsdp_auto_wrap_policy(model)
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=units != "peft"
    )
    if apply is not None:
        apply(sharded)
    optimizer = optimizer_of(sharded)

    def parameters() -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(sharded):
            return {name: p.detach().clone() for name, p in sharded.named_parameters()}

    return Engine(sharded, Tensor.backward, lambda: stepped(optimizer), parameters)


def fsdp2(model: nn.Module, apply: Callable[[Any], Any] | None, units: str) -> Engine:
    """As `fsdp1`. PEFT's policy is accelerate's for FSDP1 alone."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if name.endswith(("layers.0", "layers.1")) or (units == "head" and name.endswith("lm_head")):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if apply is not None:
        apply(model)
    optimizer = optimizer_of(model)

    def parameters() -> dict[str, Tensor]:
        return {name: p.full_tensor().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]

    return Engine(model, Tensor.backward, lambda: stepped(optimizer), parameters)


ENGINES: dict[str, Callable[..., Engine]] = {
    **{f"ZeRO-{stage}": functools.partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    "ZeRO-3 in bfloat16": functools.partial(deepspeed, stage=3, bf16=True),
    **{f"FSDP1, units: {units}": functools.partial(fsdp1, units=units) for units in ("layers", "head", "peft")},
    **{f"FSDP2, units: {units}": functools.partial(fsdp2, units=units) for units in ("layers", "head")},
}


def with_lora(model: nn.Module, *more: str) -> nn.Module:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", *more], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def with_checkpoints(model: Any, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build("llama"),
    "gemma2, tied": lambda: build("gemma2", tie_word_embeddings=True),
    "qwen3_moe": lambda: build("qwen3_moe"),
    "LoRA": lambda: with_lora(build("llama")),
    "LoRA on the head": lambda: with_lora(build("llama"), "lm_head"),
    "checkpoints": lambda: with_checkpoints(build("llama"), False),
    "reentrant checkpoints": lambda: with_checkpoints(build("llama"), True),
    "LoRA and checkpoints": lambda: with_checkpoints(with_lora(build("llama")), False),
}

Run = tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]
"""The losses of two steps and of evaluation, the parameters before and after, and the number of fused losses and statistics."""


def train(start: Callable[..., Engine], model: Callable[[], nn.Module], apply: str | None, lazy: bool = False) -> Run:
    """Two steps and an evaluation of the model in an engine; `apply` "before" the engine gets it, or "after"."""
    torch.manual_seed(0)
    swap = functools.partial(liger_transformers.apply, lazy=lazy)
    network = model()
    if apply == "before":
        swap(network)
    engine = start(network, swap if apply == "after" else None)
    before = engine.parameters()
    inputs = batch()
    del inputs["attention_mask"]
    inputs["labels"][:, : 1 + 3 * dist.get_rank()] = -100
    fused = 0
    call = Op.__call__

    def counted(op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fused
        fused += op.name in ("fused_linear_cross_entropy", "fused_linear_logit_statistics")
        return call(op, *args, **kwargs)

    def loss() -> Tensor:
        if not lazy:
            return engine.module(**inputs).loss
        logits = engine.module(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten())

    losses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", counted)
        for _ in range(2):
            value = loss()
            engine.backward(value)
            engine.step()
            losses.append(value.item())
        trained = engine.parameters()
        engine.module.eval()
        with torch.no_grad():
            losses.append(engine.module(**inputs).loss.item())
            losses.append(engine.module(**inputs).logits.float().square().mean().item())
    engine.end()
    return losses, before, trained, fused


def distance(engine: str, model: str, lazy: bool = False) -> dict[str, tuple[float, float, str, int]]:
    """By when `apply` came, how far the swapped model is from the plain one.

    Returns, for each: the largest relative distance of a loss; that of a parameter's change in two steps, by its largest
    element, with the parameter's name; and the number of fused losses.
    """
    losses, before, after, none = train(ENGINES[engine], MODELS[model], None, lazy)
    assert none == 0
    results = {}
    for when in ("before", "after"):
        ours, start, trained, fused = train(ENGINES[engine], MODELS[model], when, lazy)
        assert start.keys() == before.keys() == trained.keys()
        loss = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
        moved = {name: after[name] - before[name] for name in after}
        worst = {
            name: float((trained[name] - start[name] - move).abs().max() / (move.abs().max() + 1e-6))
            for name, move in moved.items()
        }
        furthest = max(worst, key=lambda name: worst[name])
        assert any(float(move.abs().max()) > 1e-4 for move in moved.values()), "nothing was trained"
        results[when] = loss, worst[furthest], furthest, fused
    return results


@pytest.fixture(scope="session")
def processes() -> Iterator[Pool]:
    """Two processes of a gloo group, which import the engines once."""
    pool = Pool()
    pool.patience = 600.0
    yield pool
    pool.stop()


ROWS = [
    (engine, model)
    for engine in ENGINES
    for model in MODELS
    if not ("bfloat16" in engine and model not in ("llama", "LoRA"))
    and not (engine.endswith("head") and "tied" in model)  # FSDP keeps tied weights in one unit
]
OWN_HEADS = {("FSDP1, units: head", model) for model in MODELS}
"""FSDP1 frees a head that is a unit of its own behind its call, so its logits are made."""
OWN_HEADS |= {("FSDP1, units: peft", model) for model in MODELS if model not in ("LoRA", "LoRA and checkpoints")}


@pytest.mark.parametrize(("engine", "model"), ROWS)
def test_engine(processes: Pool, engine: str, model: str) -> None:
    """Two steps and an evaluation, in both orders, on both processes. A loss or its logits, if not made, are one op."""
    bf16 = "bfloat16" in engine
    for rank in processes.run(distance, engine, model):
        for when, (loss, change, name, fused) in rank.items():
            assert loss < (1e-2 if bf16 else 1e-5), when
            assert change < (0.1 if bf16 else 1e-3), f"{when}: {name}"
            assert (fused == 0) if (engine, model) in OWN_HEADS else (fused >= 3), when


@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP1, units: layers", "FSDP1, units: head", "FSDP2, units: head"])
def test_logits_that_leave_the_model(processes: Pool, engine: str) -> None:
    """`lazy`, and a loss of the caller's own."""
    for rank in processes.run(distance, engine, "llama", True):
        for when, (loss, change, name, fused) in rank.items():
            assert loss < 1e-5, when
            assert change < 1e-3, f"{when}: {name}"
            assert (fused == 0) if engine == "FSDP1, units: head" else (fused >= 3), when


def quantised(kind: str, folder: Path, skipped: list[str] | None) -> Any:
    """A model with LoRA whose linear layers, but the `skipped`, bitsandbytes holds in 4 or 8 bits."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    bits: dict[str, Any] = {"load_in_8bit": True}
    if kind == "nf4":
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(**bits, llm_int8_skip_modules=skipped)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    return peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("first", [True, False], ids=["apply first", "LoRA first"])
@pytest.mark.parametrize("skipped", [None, []], ids=["head as it is", "head too"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bitsandbytes(kind: str, skipped: list[str] | None, first: bool, tmp_path: Path) -> None:
    want = run(with_lora(quantised(kind, tmp_path, skipped)), batch())
    model = quantised(kind, tmp_path, skipped)
    if first:
        liger_transformers.apply(model)
    model = with_lora(model)
    report = liger_transformers.report(model) if first else liger_transformers.apply(model)
    assert report.ops.get("fused_linear_cross_entropy", 0) == (skipped is None)
    assert [*report.left] == ([] if skipped is None else [("LlamaForCausalLM.lm_head", REFUSED[kind])])
    assert_same(want, run(model, batch()))


REFUSED = {
    "nf4": "lm_head is a Linear4bit, whose forward is not nn.Linear's",
    "int8": "lm_head is a Linear8bitLt, whose forward is not nn.Linear's",
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("when", ["before", "in configure_model"])
def test_lightning(when: str, precision: Any, tmp_path: Path) -> None:
    """Three steps by Lightning's Trainer."""
    import lightning
    from torch.utils.data import DataLoader

    rows: Any = [batch()] * 3

    class Module(lightning.LightningModule):
        def __init__(self, apply: str | None) -> None:
            super().__init__()
            self.model, self.apply_in, self.losses = build("llama"), apply, list[float]()
            if apply == "before":
                liger_transformers.apply(self.model)

        def configure_model(self) -> None:
            if self.apply_in == "in configure_model":
                liger_transformers.apply(self.model)

        def training_step(self, inputs: dict[str, Any], _: int) -> Tensor:
            loss = self.model(**inputs).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    def trained(apply: str | None) -> list[float]:
        module = Module(apply)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=3, precision=precision, default_root_dir=tmp_path, **options
        )
        trainer.fit(module, DataLoader(rows, batch_size=None))
        assert ("fused_linear_cross_entropy" in liger_transformers.report(module).ops) == (apply is not None)
        return module.losses

    plain = trained(None)
    assert plain[2] < plain[0]
    assert trained(when) == pytest.approx(plain, rel=1e-5 if precision == "32-true" else 1e-2)


def by_trainer(folder: str, apply: bool) -> tuple[list[float], list[float], float]:
    """The losses and gradient norms of three steps of transformers' Trainer under DDP, and the loss of its evaluation."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    places = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    places |= {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(value) for name, value in places.items()}, ACCELERATE_USE_CPU="true")
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    inputs = batch()
    rows: Any = [{name: inputs[name][i % 2].roll(i) for name in ("input_ids", "labels")} for i in range(32)]
    callbacks: list[Any] = [liger_transformers.LigerCallback()] if apply else []
    trainer = Trainer(build("llama"), arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    evaluated = trainer.evaluate()["eval_loss"]
    logs = trainer.state.log_history
    return [e["loss"] for e in logs if "loss" in e], [e["grad_norm"] for e in logs if "grad_norm" in e], evaluated


def test_trainer(processes: Pool, tmp_path: Path) -> None:
    losses, norms, evaluated = processes.run(by_trainer, str(tmp_path), False)[0]
    ours = processes.run(by_trainer, str(tmp_path), True)[0]
    assert len(losses) == len(norms) == 3
    assert ours[0] == pytest.approx(losses, rel=1e-5)
    assert ours[1] == pytest.approx(norms, rel=1e-5)
    assert ours[2] == pytest.approx(evaluated, rel=1e-5)
