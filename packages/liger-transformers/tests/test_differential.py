"""A plain model beside a swapped one, in every situation that somebody met: loss, every gradient, and all that hooks saw.

A situation is a function of a model, plain or swapped. It returns a loss, whose backward follows, and a list of what to compare.
On one model all of them run; on the others with ``-m slow``.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from tiny_models import MOE, VOCABULARY, batch, build
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import liger_transformers
from liger_transformers.logits import Logits, State

INPUTS = batch()
IDS = INPUTS["input_ids"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("llama"),
    "tied": lambda: build("llama", tie_word_embeddings=True),
    "gemma2": lambda: build("gemma2"),
    "qwen3_moe": lambda: build("qwen3_moe", **MOE, output_router_logits=True, router_aux_loss_coef=0.1),
    "granite": lambda: build("granite"),
    "lora": lambda: lora(build("llama")),
    "lora tied": lambda: lora(build("llama", tie_word_embeddings=True)),
}
SITUATIONS: dict[str, Callable[[Any], tuple[Tensor, list[Any]]]] = {}


def lora(model: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def swapped(model: Any, **options: Any) -> Any:
    liger_transformers.apply(model, **options)
    return model


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def inner(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def step(model: Any, **more: Any) -> Tensor:
    return model(**INPUTS, **more).loss


def same(want: Any, got: Any, rtol: float) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor)
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        largest = float(want.detach().abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got.detach() + 0, want.detach(), rtol=rtol, atol=rtol * largest + 1e-8)
    elif isinstance(want, (list, tuple)):
        assert len(want) == len(got)
        for one, other in zip(want, got, strict=True):
            same(one, other, rtol)
    else:
        assert want == got


def compare(
    make: Callable[[], Any], run: Callable[[Any], tuple[Tensor, list[Any]]], rtol: float, **options: Any
) -> None:
    results: list[Any] = []
    for ours in (False, True):
        model = make()
        keys = [*model.state_dict()]
        if ours:
            swapped(model, **options)
            assert [*model.state_dict()] == keys
        loss, seen = run(model)
        loss.backward()
        results.append((loss.detach(), seen, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, seen, gradients), (our_loss, our_seen, our_gradients) = results
    same(loss, our_loss, rtol)
    same(seen, our_seen, rtol)
    assert gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        same(gradient, our_gradients[name], rtol)


def situation(run: Callable[[Any], tuple[Tensor, list[Any]]]) -> Callable[[Any], tuple[Tensor, list[Any]]]:
    SITUATIONS[run.__name__] = run
    return run


@situation
def nothing(m: Any) -> Any:
    return step(m), []


@situation
def num_items_in_batch(m: Any) -> Any:
    return step(m, num_items_in_batch=torch.tensor(7)) + step(m, num_items_in_batch=3), []


@situation
def autocast(m: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return step(m), []


@situation
def forward_hook_scales(m: Any) -> Any:
    seen: list[Any] = []
    head_of(m).register_forward_hook(lambda _, args, out: (seen.append(tuple(out.shape)), out / 2)[1])
    return step(m), [seen]


@situation
def forward_hook_records(m: Any) -> Any:
    seen: list[Any] = []
    head_of(m).register_forward_hook(lambda _, args, out: seen.append(out.detach().clone()))
    return step(m), seen


@situation
def pre_hook_scales(m: Any) -> Any:
    seen: list[Any] = []
    head_of(m).register_forward_pre_hook(lambda _, args: (seen.append(1), (args[0] * 2,))[1])
    return step(m), [seen]


@situation
def pre_hook_dropout(m: Any) -> Any:
    torch.manual_seed(3)
    head_of(m).register_forward_pre_hook(lambda _, args: (F.dropout(args[0], 0.3),))
    return step(m), [torch.rand(1)]


@situation
def backward_hook(m: Any) -> Any:
    seen: list[Any] = []
    head_of(m).register_full_backward_hook(lambda _, gi, go: seen.extend((go[0] + 0, gi[0] + 0)))
    step(m).backward()
    return step(m), seen


@situation
def backward_pre_hook_clamps(m: Any) -> Any:
    head_of(m).register_full_backward_pre_hook(lambda _, go: (go[0].clamp(-1e-3, 1e-3),))
    return step(m), []


@situation
def global_hook(m: Any) -> Any:
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append((type(module).__name__, isinstance(out, Tensor) and tuple(out.shape)))
    )
    try:
        return step(m), [seen]
    finally:
        handle.remove()


@situation
def spectral_norm(m: Any) -> Any:
    torch.manual_seed(4)
    if isinstance(head_of(m), nn.Linear):
        torch.nn.utils.spectral_norm(head_of(m))
    return step(m), []


@situation
def cast_in_a_hook(m: Any) -> Any:
    """As FSDP2's output_dtype on the head."""
    head_of(m).register_forward_hook(lambda _, args, out: out.bfloat16().float())
    return step(m), []


class CrossEntropy(torch.autograd.Function):
    """A cross-entropy such as those of Unsloth, flash-attn and ms-swift."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor) -> Tensor:
        keep = labels >= 0
        ctx.save_for_backward(z, labels)
        return F.nll_loss(z.log_softmax(-1)[keep], labels[keep])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, labels = ctx.saved_tensors
        keep = (labels >= 0)[:, None]
        return g * keep * (z.softmax(-1) - F.one_hot(labels.clamp(min=0), z.shape[-1])) / keep.sum(), None


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def shifted(logits: Any, labels: Tensor) -> Any:
    return logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)


def with_loss(loss: Callable[[Any, Tensor], Any]) -> Callable[[Any], Any]:
    """The situation of a model with this loss of its rows of logits and their labels."""

    def run(m: Any) -> Any:
        seen: list[Any] = []

        def loss_function(logits: Any, labels: Tensor, vocab_size: Any = None, **_: Any) -> Any:
            result = loss(*shifted(logits, labels))
            result, more = result if isinstance(result, tuple) else (result, [])
            seen.extend(more)
            return result

        inner(m).loss_function = loss_function
        return step(m), seen

    return run


def in_place(z: Tensor, t: Tensor) -> Tensor:
    v = z.view(-1, VOCABULARY)
    z[:, 3:5] = -5.0
    z.mul_(1.5)
    return F.cross_entropy(v, t)


def clamped(z: Tensor, t: Tensor) -> Tensor:
    z.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return F.cross_entropy(z, t)


def gradient_of_logits(z: Tensor, t: Tensor) -> Any:
    loss = F.cross_entropy(z, t)
    return loss, [torch.autograd.grad(loss, z, retain_graph=True)[0] + 0]


def second_derivative(z: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(z, t)
    (g,) = torch.autograd.grad(loss, z, create_graph=True)
    return loss + g.pow(2).sum() * 10


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "function": CrossEntropy.apply,
    "function beside the fused loss": lambda z, t: F.cross_entropy(z, t) + 0.5 * CrossEntropy.apply(z, t),
    "z-loss": lambda z, t: F.cross_entropy(z, t) + 0.1 * z.logsumexp(-1).pow(2).mean(),
    "reentrant checkpoint": lambda z, t: (
        checkpoint(F.cross_entropy, z, t, use_reentrant=True) + 0.1 * F.cross_entropy(z, t)
    ),
    "checkpoint": lambda z, t: checkpoint(F.cross_entropy, z, t, use_reentrant=False),
    "branch on the type": lambda z, t: (
        F.cross_entropy(z, t) * (2.0 if isinstance(z, Tensor) and torch.is_tensor(z) else 1.0)
    ),
    "strides": lambda z, t: (F.cross_entropy(z, t), [z.stride(), z.is_contiguous(), z.data_ptr() != 0]),
    "gradient of logits": gradient_of_logits,
    "second derivative": second_derivative,
    "tensor hook": clamped,
    "vmap": lambda z, t: torch.vmap(lambda a, b: -a.log_softmax(-1)[b])(z, t.clamp(min=0)).mean(),
    "in place": in_place,
    "label smoothing": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1),
    "two heads of one": lambda z, t: F.cross_entropy(z, t) + F.cross_entropy(z * 2, t),
    "mask": lambda z, t: F.cross_entropy(z[t > 20], t[t > 20]),
    "focal": lambda z, t: ((1 - (lp := -F.cross_entropy(z, t, reduction="none")).exp()) * -lp).mean(),
    "kl": lambda z, t: F.kl_div(z.log_softmax(-1), torch.full_like(z, 1 / VOCABULARY), reduction="batchmean"),
    "entropy": lambda z, t: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "entropy by exp": lambda z, t: -((lp := F.log_softmax(z, -1)).exp() * lp).sum(-1).mean() + lp.mean(),
    "gather times mask": lambda z, t: (z.gather(-1, t.clamp(min=0)[:, None]).squeeze(-1) * (t > 20)).mean(),
    "gather less logsumexp": lambda z, t: (z.logsumexp(-1) - z.gather(-1, t.clamp(min=0)[:, None])[:, 0])[t > 0].mean(),
    "mean": lambda z, t: z.mean() + z.sum(-1).pow(2).mean(),
}
SITUATIONS |= {f"loss: {name}": with_loss(loss) for name, loss in LOSSES.items()}


@situation
def hook_returns_function(m: Any) -> Any:
    head_of(m).register_forward_hook(lambda _, args, out: Twice.apply(out))
    return step(m), []


@situation
def retained_gradient(m: Any) -> Any:
    logits: list[Any] = []
    with_loss(lambda z, t: (z.retain_grad(), logits.append(z), F.cross_entropy(z, t))[2])(m)[0].backward()
    return step(m), [logits[0].grad + 0]


@situation
def two_backwards(m: Any) -> Any:
    loss = step(m)
    loss.backward(retain_graph=True)
    return loss, []


@situation
def merging_wrapper(m: Any) -> Any:
    """An adapter of one's own, whose weight is merged while it runs."""

    class Merged(nn.Module):
        def __init__(self, head: Any) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.base_layer = head
            self.a, self.b = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(VOCABULARY, 4))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.base_layer._parameters.pop("weight")
            self.base_layer.weight = weight + self.b @ self.a
            try:
                return self.base_layer(x)
            finally:
                del self.base_layer.weight
                self.base_layer._parameters["weight"] = weight

    if isinstance(head_of(m), nn.Linear):
        m.lm_head = Merged(m.lm_head)
    return step(m), []


@situation
def adapter_on_the_heads_parameter(m: Any) -> Any:
    if not isinstance(head_of(m), nn.Linear) or m.config.tie_word_embeddings:
        return step(m), []
    torch.manual_seed(5)
    m = peft.get_peft_model(m, peft.LoraConfig(target_modules=["q_proj"], target_parameters=["lm_head.weight"], r=4))
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "lora" in name:
                p.copy_(torch.randn_like(p) * 0.2)
    loss = step(m.train())
    return loss, [*torch.autograd.grad(loss, [p for p in m.parameters() if p.requires_grad], retain_graph=True)]


@situation
def functions_on_all_tensors_of_outputs(m: Any) -> Any:
    """As DeepSpeed ZeRO-3 and FSDP do it."""
    seen: list[Any] = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.detach()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(tuple(g.shape))
            return g

    head_of(m).register_forward_hook(lambda _, args, out: Mark.apply(out) if torch.is_tensor(out) else vars(out))
    step(m).backward()
    return step(m), [seen]


@situation
def evaluation(m: Any) -> Any:
    m.eval()
    with torch.no_grad():
        out = m(**INPUTS)
    m.train()
    return step(m), [out.loss, out.logits]


@situation
def logits_beside_the_loss(m: Any) -> Any:
    out = m(**INPUTS)
    return out.loss + 0.1 * out.logits.float().logsumexp(-1).pow(2).mean(), [out.logits.argmax(-1)]


@situation
def a_model_in_the_loss_of_another(m: Any) -> Any:
    other = MODELS["llama"]()
    if isinstance(m, nn.Module) and any("liger_op" in vars(type(x)) for x in m.modules()):
        swapped(other)

    def loss(z: Tensor, t: Tensor) -> Any:
        reference = other(input_ids=IDS, use_cache=False).logits
        rows = reference[:, :-1].reshape(z.shape).detach()
        return F.cross_entropy(z, t) + F.mse_loss(rows, z), [type(reference) is Tensor]

    return with_loss(loss)(m)


@situation
def class_patched_after_apply(m: Any) -> Any:
    cls: Any = next(c for c in type(inner(m)).__mro__ if "forward" in vars(c) and "liger_op" not in vars(c))
    before, seen = cls.forward, []
    cls.forward = lambda self, *args, **kwargs: (seen.append(1), before(self, *args, **kwargs))[1]
    try:
        return step(m), [seen]
    finally:
        cls.forward = before


def hooked_activation(register: str, hook: Callable[..., Any]) -> Callable[[Any], Any]:
    def run(m: Any) -> Any:
        seen: list[Any] = []
        for name, module in m.named_modules():
            if name.endswith("act_fn"):
                getattr(module, register)(lambda _, *args: hook(seen, *args))
        return step(m), seen

    return run


SITUATIONS |= {
    "act_fn: hook": hooked_activation("register_forward_hook", lambda seen, args, out: seen.append(out.detach() + 0)),
    "act_fn: Function in a hook": hooked_activation("register_forward_hook", lambda seen, args, out: Twice.apply(out)),
    "act_fn: backward hook": hooked_activation(
        "register_full_backward_hook", lambda seen, gi, go: seen.append(go[0] + 0)
    ),
}


@pytest.mark.parametrize("what", SITUATIONS)
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama")]
)
def test_situation(name: str, what: str) -> None:
    rough = what in ("autocast", "cast_in_a_hook")
    compare(MODELS[name], SITUATIONS[what], 3e-2 if rough else 3e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_model(name: str) -> None:
    compare(MODELS[name], SITUATIONS["nothing"], 3e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logits_are_made(
    name: str, dtype: torch.dtype, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither logits nor their gradient, and the head's node takes no product."""
    computed: list[Any] = []
    compute = State.compute
    monkeypatch.setattr(State, "compute", lambda self, current: (computed.append(1), compute(self, current))[1])
    model = swapped(MODELS[name]().to(dtype))
    calls.clear()
    step(model).backward()
    assert (computed, calls["fused_linear_cross_entropy"]) == ([], 1)


def rows_of(z: Any, t: Tensor) -> Tensor:
    return sum(
        F.cross_entropy(a.reshape(-1, VOCABULARY), b.reshape(-1))
        for a, b in zip(z.chunk(3, 1), t.chunk(3, 1), strict=True)
    )


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "lora"))])
def test_lazy(name: str) -> None:
    """The losses of logits that leave the model."""
    losses = {**LOSSES, "chunks": None}
    for loss in losses.values():
        compare(
            MODELS[name],
            lambda m, loss=loss: (
                (rows_of(m(input_ids=IDS, use_cache=False).logits, IDS), [])
                if loss is None
                else (
                    value
                    if isinstance(value := loss(*shifted(m(input_ids=IDS, use_cache=False).logits, IDS)), tuple)
                    else (value, [])
                )
            ),
            3e-5,
            lazy=True,
        )


def saved(z: Any) -> Any:
    file = io.BytesIO()
    torch.save({"z": z}, file)
    assert file.tell() < 20_000
    file.seek(0)
    return torch.load(file, weights_only=True)["z"]


def test_objects() -> None:
    """Deferred logits, where somebody needs an object in memory."""
    plain = build("llama")(input_ids=IDS, use_cache=False).logits.detach()
    model = swapped(build("llama"), lazy=True)
    for use in (
        copy.deepcopy,
        lambda z: pickle.loads(pickle.dumps(z)),
        lambda z: torch.from_numpy(z.numpy()),
        lambda z: torch.tensor(z.tolist()),
        torch.as_tensor,
        torch.from_dlpack,
        lambda z: torch.vmap(lambda a: a * 2)(z) / 2,
        lambda z: torch.func.grad(lambda a: (a**2).sum() / 2)(z),
        saved,
    ):
        z = model(input_ids=IDS, use_cache=False).logits
        assert type(z) is Logits
        assert z.grad_fn is not None
        assert z.detach().grad_fn is None
        torch.testing.assert_close(use(z.detach()) + 0, plain, rtol=1e-4, atol=1e-4)


class ThroughData(torch.optim.Optimizer):
    """An optimizer such as apex's, whose writes through `.data` count no version."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)


def sgd(m: Any) -> None:
    with torch.enable_grad():
        step(m).backward()
    torch.optim.SGD(m.parameters(), lr=0.1).step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "sgd": sgd,
    "optimizer through data": lambda m: ThroughData(m.parameters(), {}).step(),
    "ema": lambda m: [p.lerp_(torch.zeros_like(p), 0.5) for p in m.parameters()],
    "load_state_dict": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
    "data replaced": lambda m: [setattr(p, "data", p.data * 0.5) for p in m.parameters()],
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_kept_while_the_weight_changes(change: str) -> None:
    """They are as they were, or say that they can't be."""
    results = []
    for ours in (False, True):
        m = swapped(build("llama"), lazy="always") if ours else build("llama")
        with torch.no_grad():
            z = m.eval()(input_ids=IDS, use_cache=False).logits
            m.train()
            CHANGES[change](m)
        if ours and change != "data replaced":
            with pytest.raises(RuntimeError, match="modified in place before its logits were used"):
                torch.log_softmax(z, -1).gather(-1, IDS[..., None])
            return
        results.append(torch.log_softmax(z, -1).gather(-1, IDS[..., None]).sum())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-4)


def test_weight_changed_before_backward() -> None:
    m = swapped(build("llama"))
    loss = step(m)
    with torch.no_grad():
        head_of(m).weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode() -> None:
    logits = []
    for m in (build("llama"), swapped(build("llama"), lazy="always")):
        with torch.inference_mode():
            out = m(input_ids=IDS, use_cache=False, output_hidden_states=True)
            out.hidden_states[-1].zero_()
            logits.append(out.logits + 0)
    torch.testing.assert_close(*logits)


def test_detached_logits_keep_no_graph() -> None:
    class Marker: ...

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.marker = Marker()
            references.append(weakref.ref(ctx.marker))
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    references: list[Any] = []
    m = swapped(build("llama"), lazy=True)
    m.model.norm.register_forward_hook(lambda _, args, out: Keep.apply(out))
    z = m(input_ids=IDS, use_cache=False).logits
    picked = z.gather(-1, IDS[..., None]).sum() + z.logsumexp(-1).sum()
    (F.cross_entropy(z.view(-1, VOCABULARY), IDS.view(-1)) + picked).backward()
    del picked
    assert references[0]() is not None
    z = z.detach()
    assert references[0]() is None
    assert z.shape == (2, 12, VOCABULARY)


def with_hook(m: Any) -> None:
    head_of(m).register_forward_hook(lambda _, args, out: out / 2)


def with_function(m: Any) -> None:
    m.loss_function = lambda logits, labels, vocab_size=None, **_: CrossEntropy.apply(*shifted(logits, labels))


@pytest.mark.parametrize("prepare", [with_hook, with_function])
def test_compiled_with_code_that_is_not_transformers(prepare: Callable[[Any], None]) -> None:
    torch._dynamo.reset()

    def run(m: Any) -> Any:
        prepare(m)
        ours = any("liger_op" in vars(type(module)) for module in m.modules())
        return step(torch.compile(m, backend="aot_eager") if ours else m), []

    compare(lambda: build("llama", num_hidden_layers=1), run, 3e-5)


def test_wrappers_are_copied_whole() -> None:
    """A wrapper's __getattr__ finds methods of the model within, such as one that copies."""
    wrapped = swapped(lora(build("llama")))
    for model in (wrapped, torch.compile(swapped(build("llama")))):
        again = copy.deepcopy(model)
        assert type(again) is type(model)
        assert again.state_dict().keys() == model.state_dict().keys()
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    assert [*average.state_dict()][1:] == [f"module.{key}" for key in wrapped.state_dict()]


def test_a_forward_patched_between_two_models_is_proved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = build("llama"), build("llama")
    swapped(one)
    norm: Any = type(build("llama").model.norm)
    before = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: before(self, x) * 2)
    want = step(two).detach()
    report = liger_transformers.apply(two)
    assert report.left["LlamaRMSNorm", "it is neither rms_norm, under any options, nor layer_norm"] == 5
    torch.testing.assert_close(step(two).detach(), want)
    monkeypatch.undo()
    assert liger_transformers.apply(build("llama")).ops["rms_norm"] == 5


class CheckpointedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.act_fn = nn.Linear(8, 12), nn.Linear(8, 12), nn.SiLU()
        self.norm = nn.RMSNorm(8, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return checkpoint(self.act_fn, self.gate(x), use_reentrant=True) * self.up(x)


def test_an_activation_in_a_checkpoint_stays() -> None:
    torch.manual_seed(0)
    plain = CheckpointedMLP()
    model, x = copy.deepcopy(plain), torch.randn(3, 8)
    report = liger_transformers.apply(model)
    assert any("checkpoint" in why for _, why in report.left)
    for m in (plain, model):
        m(x).sum().backward()
    torch.testing.assert_close(model.gate.weight.grad, plain.gate.weight.grad)
