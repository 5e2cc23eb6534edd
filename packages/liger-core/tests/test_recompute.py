"""Tensors that are saved for backward inside of `lean`, by consumers of every kind, and their gradients."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition  # pyright: ignore[reportMissingModuleSource]
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import liger_core
from liger_core import lean
from liger_core.contract import Needs, Recompute, Saved, op

LANGUAGES = ("torch", "toy-traced", "toy-opaque")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A norm with three consumers, two of which save views of its result, and a gated activation with one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(8))
        self.gate, self.up, self.down = (
            nn.Parameter(draw(*shape, seed=seed)) for seed, shape in enumerate([(16, 8), (16, 8), (8, 16)])
        )
        self.lora_a, self.lora_b = nn.Parameter(draw(2, 8)), nn.Parameter(draw(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = liger_core.rms_norm(x, self.weight)
        up = F.linear(h.view(-1, 8), self.up).view(*h.shape[:-1], 16)
        gate = F.linear(h, self.gate) + F.linear(F.linear(h, self.lora_a), self.lora_b)
        return (
            x + F.linear(liger_core.swiglu(gate, up), self.down) + h[:, 1:3].exp().sum() + h.transpose(0, 1).sin().sum()
        )


def block() -> tuple[Block, Tensor, list[Tensor]]:
    model = Block()
    x = draw(4, 5, 8, seed=7).requires_grad_()
    return model, x, [x, *model.parameters()]


def gradients(y: Tensor, wanted: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), wanted, **options)


def equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(map(torch.equal, actual, expected))


@contextmanager
def counting() -> Iterator[dict[int, int]]:
    """The bytes that hooks inside of this one, or autograd, keep, by storage."""
    saved: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield saved


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_equal_and_results_are_not_kept(toys: None, language: str, autocast: bool) -> None:
    model, x, leaves = block()
    with liger_core.use(rms_norm=language), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model(x), leaves)
        with lean():
            y = model(x)
        equal(gradients(y, leaves, retain_graph=True), expected)
        equal(gradients(y, leaves), expected)  # a second backward
        with counting() as plain:
            model(x)
        with counting() as less, lean():
            model(x)
    rows, least = x.numel() // 8, 2 if autocast else 4
    assert sum(plain.values()) - sum(less.values()) >= rows * (8 + 16) * least


def test_results_are_made_again_once_and_let_go(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_traced.ops.rms_norm as kernel

    runs: list[StorageWeakRef] = []
    forward = kernel.forward

    def counted(needs: Needs, *args: Any, **options: Any) -> tuple[Tensor, Saved]:
        y, saved = forward(needs, *args, **options)
        runs.append(StorageWeakRef(y.untyped_storage()))
        return y, saved

    monkeypatch.setattr(kernel, "forward", counted)
    model, x, leaves = block()
    with lean():
        y = model(x)
    assert len(runs) == 1
    assert runs[0].expired()
    for times in (2, 3):
        gradients(y, leaves, retain_graph=True)
        assert len(runs) == times
        assert all(run.expired() for run in runs)


def test_what_nobody_saves_is_not_held() -> None:
    """Results that nobody saves are not held, nor is what they are made from."""
    x = draw(4, 8).requires_grad_()
    with lean():
        base = x * 2
        memory = StorageWeakRef(base.untyped_storage())
        y = liger_core.swiglu(base, x)
        del base, y
        liger_core.swiglu(x, x)
        assert memory.expired()


@pytest.mark.parametrize("consumer", [torch.exp, liger_core.softmax, lambda h: F.scaled_dot_product_attention(h, h, h)])
def test_a_graph_that_has_no_backward_is_let_go(toys: None, consumer: Callable[[Tensor], Tensor]) -> None:
    """As when memory ran out in forward: also where an operator saves its own result."""
    x, weight = draw(1, 2, 4, 8).requires_grad_(), draw(8).requires_grad_()
    with lean():
        h = liger_core.rms_norm(x, weight)
        y = consumer(h)
        memory = [StorageWeakRef(t.untyped_storage()) for t in (h, y)]
        z = y.sum()
    del h, y, z
    gc.collect()
    assert all(m.expired() for m in memory)


def test_in_place_changes() -> None:
    """A change of a saved tensor is an error, as it is without `lean`."""
    model, x, leaves = block()
    with lean():
        y = model(x)
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(
        RuntimeError, match=r"changed in place: torch.float32, shape \(8,\), is at version 1.* version 0"
    ):
        gradients(y, leaves)


def test_an_argument_that_was_freed() -> None:
    """FSDP frees a weight by resizing its memory, which the recomputation must not read."""
    x, weight = draw(4, 8, seed=1).requires_grad_(), torch.ones(8)
    with lean():
        y = F.linear(liger_core.rms_norm(x, weight), draw(3, 8, seed=2).requires_grad_())
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"recomputes a result in backward, and its weight was freed, as FSDP does"):
        y.sum().backward()


def test_a_result_that_is_changed_in_place() -> None:
    """Before it is saved: it is kept. After: the gradient is that of what was saved."""
    gate, up, factor = (draw(2, 8, seed=seed).requires_grad_() for seed in range(3))

    def run(before: bool, after: bool) -> tuple[Tensor, ...]:
        h = liger_core.swiglu(gate, up)
        if before:
            h.add_(1.0)
        product = h * factor
        if after:
            h.detach().zero_()
        return product, gate, up, factor

    for before in (False, True):
        y, *leaves = run(before, False)
        expected = gradients(y, leaves)
        with lean():
            y, *leaves = run(before, not before)
        equal(gradients(y, leaves), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_activation_checkpointing(toys: None, reentrant: bool, place: str) -> None:
    models = [Block(), Block()]
    x = draw(4, 5, 8, seed=7).requires_grad_()
    leaves = [x, *(p for model in models for p in model.parameters())]
    expected = gradients(models[1](models[0](x)), leaves) if not reentrant else None

    def leaner(model: Block, x: Tensor) -> Tensor:
        with lean():
            return model(x)

    def run() -> Tensor:
        y = x
        for model in models:
            y = checkpoint(functools.partial(leaner, model) if place == "inside" else model, y, use_reentrant=reentrant)
        return y

    def backward() -> tuple[Tensor, ...]:
        for tensor in leaves:
            tensor.grad = None
        if place == "outside":
            with lean():
                y = run()
        else:
            y = run()
        y.square().sum().backward()
        return tuple(tensor.grad for tensor in leaves)  # type: ignore[misc]

    if expected is None:
        models[1](models[0](x)).square().sum().backward()
        expected = tuple(tensor.grad for tensor in leaves)  # type: ignore[assignment]
    equal(backward(), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", ["early", "by an exception"])
def test_memory_is_free_without_a_collection_of_cycles(ends: str) -> None:
    """Also if an exception left the region, as it does whenever a checkpointed one has run again as far as is needed."""
    alive: list[StorageWeakRef] = []

    def region(x: Tensor, weight: Tensor) -> Tensor:
        with lean():
            gate = x * 2
            alive.append(StorageWeakRef(gate.untyped_storage()))
            y = F.linear(liger_core.swiglu(gate, gate), weight)
            if ends == "by an exception":
                raise ZeroDivisionError
            return y

    x, weight = draw(2, 8).requires_grad_(), draw(4, 8).requires_grad_()
    gc.disable()
    try:
        if ends == "early":
            checkpoint(region, x, weight, use_reentrant=False).sum().backward()
        else:
            with pytest.raises(ZeroDivisionError):
                region(x, weight)
        assert len(alive) == (2 if ends == "early" else 1)
        assert all(storage.expired() for storage in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("inner", [False, True])
def test_beside_other_hooks(inner: bool) -> None:
    """Hooks around lean get what is kept; hooks inside of it get everything."""
    model, x, leaves = block()
    expected = gradients(model(x), leaves)
    hooks: list[Callable[[], Any]] = [torch.autograd.graph.save_on_cpu, lean]
    with hooks[inner](), hooks[not inner]():
        y = model(x)
    equal(gradients(y, leaves), expected)


def test_a_consumer_that_is_not_of_the_same_graph() -> None:
    """Its backward may come when the op's own has been."""
    weight, x = draw(8).requires_grad_(), draw(2, 8).requires_grad_()
    head = draw(4, 8).requires_grad_()
    with lean():
        y = liger_core.rms_norm(x, weight)
        apart = F.linear(y.detach(), head)
    y.sum().backward()
    (actual,) = torch.autograd.grad(apart.sum(), head)
    assert torch.equal(actual, liger_core.rms_norm(x, weight).sum(0).expand(4, 8))


def test_second_derivatives_of_the_reference() -> None:
    def twice(context: Any) -> Tensor:
        x, weight, head = draw(2, 8).requires_grad_(), draw(8).requires_grad_(), draw(4, 8).requires_grad_()
        with context:
            y = F.linear(liger_core.rms_norm(x, weight), head).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    torch.testing.assert_close(twice(lean()), twice(torch.enable_grad()))


def test_nothing_is_done_without_gradients() -> None:
    x, weight = draw(2, 8), draw(8)
    with lean(), torch.no_grad():
        y = liger_core.rms_norm(x, weight)
    assert torch.equal(y, liger_core.rms_norm(x, weight))


def test_lean_is_reentrant_and_a_decorator() -> None:
    model, x, leaves = block()
    expected = gradients(model(x), leaves)

    @lean()
    def run() -> Tensor:
        with lean():
            return model(x)

    equal(gradients(run(), leaves), expected)
    with pytest.raises(ZeroDivisionError), lean():
        raise ZeroDivisionError
    with counting() as saved:
        model(x)
    with counting() as again:
        model(x)
    assert sum(saved.values()) == sum(again.values())


def test_a_declaration_names_tensors() -> None:
    with pytest.raises(ValueError, match="broken: recompute names 'y'; it takes tensor arguments, x"):

        @op(differentiable=("x",), recompute=Recompute("y"))
        def broken(x: Tensor) -> Tensor:
            return x


def saved_when_compiled(function: Callable[..., Tensor], *args: Any) -> tuple[list[torch.Size], tuple[Tensor, ...]]:
    """The shapes that the compiled forward saves for the backward, and the gradients."""
    saved: list[torch.Size] = []

    def forward(graph: Any, inputs: Any) -> Any:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in output.args[0][1:]]
        saved.extend(value.shape for value in values if isinstance(value, Tensor))
        return graph.forward

    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: graph.forward, partition_fn=partition)
    y = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return saved, gradients(y, list(args))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("around", ["the-compiled-function", "the-call-in-it"])
@pytest.mark.parametrize(
    "language",
    [
        "toy-traced",
        pytest.param(
            "toy-opaque",
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 10),
                reason="torch 2.9 keeps what a custom op has written to, also where a checkpointed region says otherwise",
            ),
        ),
    ],
)
def test_compiled(toys: None, language: str, around: str) -> None:
    """The partitioner runs the kernel again in backward, where lean is on; by default it keeps what a kernel gave."""
    x, weight, head = draw(3, 8).requires_grad_(), draw(8).requires_grad_(), draw(4, 8).requires_grad_()

    def layer(x: Tensor, weight: Tensor, head: Tensor) -> Tensor:
        return F.linear(liger_core.rms_norm(x, weight), head)

    def leaner(x: Tensor, weight: Tensor, head: Tensor) -> Tensor:
        with lean():
            return layer(x, weight, head)

    with liger_core.use(rms_norm=language):
        torch.compiler.reset()
        saved, expected = saved_when_compiled(layer, x, weight, head)
        torch.compiler.reset()
        if around == "the-call-in-it":
            less, actual = saved_when_compiled(leaner, x, weight, head)
        else:
            with lean():
                less, actual = saved_when_compiled(layer, x, weight, head)
    rows = torch.Size([3, 8])
    assert less.count(rows) == 1 < saved.count(rows), f"without and with lean these are saved: {saved}, {less}"
    for result, value in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_divided_by_fsdp(tmp_path: Path) -> None:
    """FSDP2 frees a layer's whole weights after its forward, and gathers them again before its backward."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Lean(Block):
        def forward(self, x: Tensor) -> Tensor:
            with lean():
                return super().forward(x)

    plain, divided = (nn.Sequential(kind(), kind()) for kind in (Block, Lean))
    x = draw(4, 5, 8, seed=7).requires_grad_()
    plain(x).square().sum().backward()
    expected, x.grad = x.grad, None
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in divided:
            fully_shard(layer, mesh=mesh)
        fully_shard(divided, mesh=mesh)
        divided(x).square().sum().backward()
        for one, two in zip(plain.parameters(), divided.parameters(), strict=True):
            assert torch.equal(two.grad.full_tensor(), one.grad)  # type: ignore[union-attr]
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
