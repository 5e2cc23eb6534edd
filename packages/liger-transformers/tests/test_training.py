"""Swapped models in what trains them: Trainer, PEFT, checkpointing, torch.compile, FSDP2, low precision."""

from __future__ import annotations

import copy
import functools
import importlib.util
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import VOCABULARY, assert_same, batch, build, run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import ModelOutput

import liger_transformers
from liger_transformers import LigerCallback
from liger_transformers.logits import State

peft = pytest.importorskip("peft")


def rows(count: int = 32) -> list[dict[str, Tensor]]:
    """Rows of 12 tokens with 1 to 11 labels."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for i in range(count):
        ids = torch.randint(8, VOCABULARY, (12,), generator=generator)
        labels = ids.clone()
        labels[: 1 + i % 11] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def trainer(
    model: Any, callbacks: list[TrainerCallback], model_init: Callable[[], nn.Module] | None = None, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(4), callbacks=callbacks, model_init=model_init
    )


def logged(trained: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


def logits_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of logits that are made from now on."""
    shapes: list[Any] = []
    linear, compute = nn.Linear.forward, State.compute

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        shapes.extend([x.shape] if self.out_features == VOCABULARY else [])
        return linear(self, x)

    def computed(self: State, current: bool) -> Tensor:
        shapes.append(self.meta.shape)
        return compute(self, current)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    monkeypatch.setattr(State, "compute", computed)
    return shapes


@pytest.mark.parametrize(("bf16", "rtol"), [(False, 1e-5), (True, 1e-2)])
def test_trainer(bf16: bool, rtol: float, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation over rows with different numbers of labels, evaluation, prediction.

    Logits are made if metrics read them, and neither for a loss alone nor for their argmax.
    """
    plain = trainer(build("llama"), [], bf16=bf16)
    callback = LigerCallback()
    ours = trainer(build("llama"), [callback], bf16=bf16)
    plain.train()
    calls.clear()
    ours.train()
    assert callback.report is not None
    assert calls["fused_linear_cross_entropy"] == 16
    for name in ("loss", "grad_norm"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=rtol)
        assert len(logged(ours, name)) == 4
    want = plain.evaluate()["eval_loss"]
    shapes = logits_made(monkeypatch)
    assert ours.evaluate()["eval_loss"] == pytest.approx(want, rel=rtol)
    ours.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    assert ours.predict(rows(4)).predictions.shape == (4, 12)
    assert not shapes
    ours.preprocess_logits_for_metrics = None
    assert ours.predict(rows(4)).predictions.shape == (4, 12, VOCABULARY)
    assert shapes


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("when", ["model_init", "add_callback"])
def test_callback_before_training(when: str, bf16: bool, calls: Counter[str]) -> None:
    """When training begins the model is swapped, unless accelerate has bound its forward."""
    make = functools.partial(build, "llama", num_hidden_layers=1)
    callback = LigerCallback()
    if when == "model_init":
        late = trainer(None, [callback], model_init=make, bf16=bf16)
    else:
        late = trainer(make(), [], bf16=bf16)
        late.add_callback(callback)
    if bf16:
        with pytest.raises(RuntimeError, match=r"by accelerate.*callbacks=\[LigerCallback\(\)\].*apply in model_init"):
            late.train()
    else:
        late.train()
    assert calls["fused_linear_cross_entropy"] == (0 if bf16 else 16)


def test_callback_shows_its_report(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """On standard output, or in a log that takes it."""
    shown = "1 × fused_linear_cross_entropy\n  no kernel: PyTorch reference on cpu"
    trainer(build("llama", num_hidden_layers=1), [LigerCallback()])
    assert shown in capsys.readouterr().out
    with caplog.at_level("INFO", "liger_transformers"):
        trainer(build("llama", num_hidden_layers=1), [LigerCallback()])
    assert shown in caplog.text
    with caplog.at_level("ERROR", "liger_transformers"):
        trainer(build("llama", num_hidden_layers=1), [LigerCallback()])
    assert "fused" not in capsys.readouterr().out


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("order", ["peft", "apply", "apply both"])
@pytest.mark.parametrize("target", [["q_proj", "gate_proj", "lm_head"], ["q_proj"]])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_lora(name: str, target: list[str], order: str, dropout: float, calls: Counter[str]) -> None:
    """With lm_head among the targets, under gemma2's softcap too. Swapped before PEFT wrapped it, lora_B is a plain linear."""
    config = peft.LoraConfig(r=4, target_modules=target, lora_dropout=dropout, init_lora_weights=False)

    def wrapped(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(model, copy.deepcopy(config)).train()

    want, model, inputs = wrapped(build(name)), build(name), batch()
    if order != "peft":
        liger_transformers.apply(model)
    model = wrapped(model)
    if order != "apply":
        liger_transformers.apply(model)
    torch.manual_seed(5)
    expected = run(want, inputs)
    calls.clear()
    torch.manual_seed(5)
    assert_same(expected, run(model, inputs))
    assert calls["fused_linear_cross_entropy"] == (0 if order == "apply" and "lm_head" in target else 1)


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_lora_on_a_scaled_head(name: str, calls: Counter[str]) -> None:
    def wrapped() -> nn.Module:
        model = build(name)
        torch.manual_seed(3)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        ).train()

    model, swapped = wrapped(), wrapped()
    liger_transformers.apply(swapped)
    assert_same(run(model, batch()), run(swapped, batch()))
    assert calls["fused_linear_cross_entropy"] == 1


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 1),
        ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, 0),  # reads the head's weight by itself
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_other_adapters(options: dict[str, Any], fused: int, first: bool, calls: Counter[str]) -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **options)).train()

    model, swapped = wrapped(build("llama")), build("llama")
    if first:
        liger_transformers.apply(swapped)
    swapped = wrapped(swapped)
    if not first:
        liger_transformers.apply(swapped)
    assert_same(run(model, batch()), run(swapped, batch()))
    assert calls["fused_linear_cross_entropy"] == fused


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, calls: Counter[str]) -> None:
    model = build("llama")
    swapped = copy.deepcopy(model)
    liger_transformers.apply(swapped)
    swapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        swapped.enable_input_require_grads()
    calls.clear()
    assert_same(run(model, batch()), run(swapped, batch()))
    assert calls["swiglu"] == 4  # forward, and again in backward


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["gemma2", "qwen3_moe", *(pytest.param(name, marks=SLOW) for name in ("llama", "granite", "phi3"))]
)
def test_compile(name: str) -> None:
    """The whole model and its loss are one graph, whose rotations and losses are the ops'."""
    swapped = build(name)
    liger_transformers.apply(swapped)
    if name == "qwen3_moe":
        swapped.set_experts_implementation("batched_mm")  # grouped_mm under Dynamo takes bfloat16 alone
    inputs = batch()
    del inputs["attention_mask"]
    want = run(swapped, inputs)
    torch._dynamo.reset()
    output, gradients = run(torch.compile(swapped, fullgraph=True, backend="aot_eager"), inputs)
    assert output.logits is None
    assert_same(want, (output, {key.removeprefix("_orig_mod."): gradient for key, gradient in gradients.items()}))


def test_compile_training_then_evaluation() -> None:
    """In a thread that has run no model before. In evaluation the graph returns its logits unless it is told to skip them."""
    model, inputs = build("llama", num_hidden_layers=1), batch()
    del inputs["attention_mask"]
    liger_transformers.apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def outputs() -> list[Any]:
        trained = compiled(**inputs)
        model.eval()
        with torch.no_grad():
            return [trained, compiled(**inputs), compiled(**inputs, skip_logits=True)]

    with ThreadPoolExecutor(1) as pool:
        trained, evaluated, skipped = pool.submit(outputs).result()
    assert [type(output.logits) for output in (trained, evaluated, skipped)] == [type(None), Tensor, type(None)]
    torch.testing.assert_close([evaluated.loss, skipped.loss], [trained.loss.detach()] * 2)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs take an NVIDIA GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_cuda_graphs(name: str) -> None:
    """A step is one graph of Dynamo and two of CUDA, whose replays give the plain model's loss and gradients."""
    model, inputs = build(name).cuda(), batch()
    del inputs["attention_mask"]
    inputs = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    if name == "qwen3_moe":
        model.set_experts_implementation("batched_mm")
    want = run(copy.deepcopy(model), inputs)
    liger_transformers.apply(model)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        output, gradients = run(compiled, inputs)
        assert_same(want, (output, {key.removeprefix("_orig_mod."): gradient for key, gradient in gradients.items()}))
    assert (counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]) == (1, 0)


def test_compiled_code_is_the_ops() -> None:
    """Dynamo must not find the original function under the name that a rotary swap binds."""
    model = build("llama")
    liger_transformers.apply(model, loss=False)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=backend)(batch()["input_ids"])
    (graph,) = graphs
    stacks = [node.stack_trace or "" for node in graph.graph.nodes]
    assert any("rope.py" in stack for stack in stacks)
    assert not any("rotate_half" in stack for stack in stacks)


def test_bfloat16_gradients() -> None:
    """At most twice as far from float64's as the plain model's in bfloat16, plus one rounding of the largest."""
    model, inputs = build("llama"), batch()
    truth = run(copy.deepcopy(model).double(), inputs)[1]
    model = model.bfloat16()
    swapped = copy.deepcopy(model)
    liger_transformers.apply(swapped)
    plain, ours = run(model, inputs)[1], run(swapped, inputs)[1]
    for name, exact in truth.items():
        errors = [float((gradients[name].double() - exact).abs().max()) for gradients in (ours, plain)]
        assert errors[0] <= 2 * errors[1] + 2**-8 * float(exact.abs().max()), name


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fsdp2(name: str, tmp_path: Path) -> None:
    """Two processes: swapped before or after sharding, the head its own unit or the root's, with and without checkpointing.

    With it, an MLP or a linear layer of one is a unit as well. In 8 bits they are those of one process in 8 bits.
    """
    outputs = in_two_processes("sharded.py", name, str(tmp_path / "store"))
    assert "16 ways are equal" in outputs[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lora_head_that_is_a_unit_of_fsdp2(tmp_path: Path, calls: Counter[str]) -> None:
    """FSDP2 frees its weights behind its call; the loss gathers them again."""
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), config).train()
    want = run(model, batch())
    liger_transformers.apply(model)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for module in (model.get_base_model().lm_head, model):
            fully_shard(module, mesh=mesh)
        calls.clear()
        output, gradients = run(model, batch())
        assert calls["fused_linear_cross_entropy"] == 1
        assert_same(want, (output, {name: gradient.full_tensor() for name, gradient in gradients.items()}))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.tensor_parallel") is None,
    reason="this transformers' tensor parallelism has no DTensors",
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=SLOW), pytest.param("qwen3", marks=SLOW)])
def test_tensor_parallel_plan(name: str, tmp_path: Path) -> None:
    """Two processes by transformers' own plan: the head's vocabulary stays divided, and the loss is liger-distributed's."""
    outputs = in_two_processes("tensor_parallel.py", name, str(tmp_path))
    assert outputs[0].endswith("equal\n"), outputs[0]


def in_two_processes(script: str, *arguments: str) -> list[str]:
    """The output of both processes."""
    command = [sys.executable, str(Path(__file__).parent / "helpers" / script), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], **pipes) for rank in (0, 1)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return outputs


def test_a_fused_head_of_another_library() -> None:
    """TRL binds a forward to the model below PEFT, whose output has no logits: it stays, and the report says so."""
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
    base = model.get_base_model()

    def fused(self: Any, input_ids: Tensor, labels: Tensor, **_: Any) -> ModelOutput:
        rows = self.model(input_ids=input_ids).last_hidden_state[:, :-1]
        logps = torch.log_softmax(rows @ self.lm_head.weight.T, -1).gather(-1, labels[:, 1:, None])
        return ModelOutput(loss=-logps.mean(), log_probs=logps)

    base.forward = types.MethodType(fused, base)
    inputs = {"input_ids": batch()["input_ids"], "labels": batch()["input_ids"]}
    want = run(model, inputs)
    report = liger_transformers.apply(model)
    assert any("bound to the instance" in why for _, why in report.left)
    assert report.ops == {"rope": 2, "swiglu": 2, "rms_norm": 5}
    assert_same(want, run(model, inputs))
