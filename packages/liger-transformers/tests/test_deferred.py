"""A function of deferred logits, or of a deferred gate, gives what the same function of the plain tensor gives."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from liger_transformers.activations import GATED, Gate
from liger_transformers.answers import defer
from liger_transformers.head import head_class
from liger_transformers.logits import Logits
from liger_transformers.traced import TracedLogits

B, S, H, V = 2, 3, 4, 5
LABELS = torch.tensor([1, -100, 4, 0, 2, 2])


def head(bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    linear.__class__ = head_class(nn.Linear)
    return linear


def deferred(x: Tensor, linear: nn.Linear, traced: bool = False) -> Any:
    logits = (TracedLogits.of if traced else defer)(x, linear.weight, linear.bias)
    assert isinstance(logits, (Logits, TracedLogits))
    return logits


def mask(z: Any) -> Tensor:
    return torch.arange(z.shape[0] * (z.shape[1] if z.ndim > 2 else 1)).view(z.shape[:-1]) % 3 != 1


def ids(z: Any) -> Tensor:
    """Two columns of every row, where there are any."""
    return torch.arange(z.shape[:-1].numel() * 2).view(*z.shape[:-1], 2) % max(z.shape[-1], 1)


def written(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def function(z: Any) -> Any:
        write(z)
        return z

    return function


def halve(z: Any) -> Any:
    z /= 2.0
    return z


def set_first(z: Any) -> None:
    z[0] = 0.5


ALONE: dict[str, Callable[[Any], Any]] = {
    "mul": lambda z: z * 3.0,
    "rmul": lambda z: 0.5 * z,
    "mul by zero": lambda z: z * 0,
    "torch.mul": lambda z: torch.mul(z, -0.25),
    "torch.div": lambda z: torch.div(z, 4),
    "mul by a tensor": lambda z: z * torch.tensor(2.0, dtype=torch.float64),
    "div": lambda z: z / 2,
    "neg": lambda z: -z,
    "tanh": torch.tanh,
    "method tanh": lambda z: F.tanh(z),
    "plus a number": lambda z: z + 1.0,
    "minus from a number": lambda z: 1.0 - z,
    "double": lambda z: z.double(),
    "to": lambda z: z.to(torch.float64),
    "contiguous": lambda z: z.contiguous(),
    "detach": lambda z: z.detach(),
    "shift": lambda z: z[..., :-1, :],
    "tail": lambda z: z[:, 1:],
    "first": lambda z: z[0],
    "step": lambda z: z[..., ::2, :],
    "columns": lambda z: z[..., :3],
    "mask": lambda z: z[mask(z)],
    "gather": lambda z: z[torch.tensor([1, 0])],
    "new axis": lambda z: z[None],
    "view": lambda z: z.view(-1, V),
    "reshape": lambda z: z.reshape(-1, z.shape[-1]),
    "reshape otherwise": lambda z: z.reshape(V, -1),
    "flatten": lambda z: z.flatten(0, 1),
    "transpose": lambda z: z.transpose(0, 1),
    "softmax": lambda z: z.softmax(-1),
    "sum": lambda z: z.sum(-1, keepdim=True),
    "no grad": lambda z: no_grad(z),
    "log_softmax": lambda z: F.log_softmax(z, -1),
    "log_softmax to double": lambda z: z.log_softmax(dim=-1, dtype=torch.float64),
    "log_softmax of rows": lambda z: torch.log_softmax(z, 0),
    "logsumexp": lambda z: z.logsumexp(-1),
    "logsumexp keepdim": lambda z: torch.logsumexp(z, dim=-1, keepdim=True),
    "unsqueeze": lambda z: z.unsqueeze(-1),
    "squeeze": lambda z: z.squeeze(-1),
    "gather ids": lambda z: z.gather(-1, ids(z)),
    "gather one": lambda z: torch.gather(z, dim=-1, index=ids(z)[..., :1]),
    "gather fewer": lambda z: z.gather(-1, ids(z)[:1]),
    "take_along_dim": lambda z: torch.take_along_dim(z, ids(z), dim=-1),
    "exp": lambda z: z.exp(),
    "argmax": lambda z: z.argmax(dim=-1),
    "mean": lambda z: z.mean(),
    "mean of rows": lambda z: z.mean(-1, keepdim=True),
    "mean of columns": lambda z: z.mean(0),
    "sum all": lambda z: z.sum(),
    "sum of rows": lambda z: z.sum(dim=-1),
    "chunk": lambda z: z.chunk(2)[-1],
    "chunk of dim 1": lambda z: torch.chunk(z, 2, dim=1)[0],
    "split": lambda z: z.split(1, dim=0)[0],
    "unbind": lambda z: torch.unbind(z)[-1],
    "iterate": lambda z: next(iter(z)),
    "index_select": lambda z: z.index_select(0, torch.tensor([1, 0, 1])),
    "stack of logsumexps": lambda z: torch.stack([row.logsumexp(-1) for row in z]),
    "stack of some": lambda z: torch.stack([row.logsumexp(-1) for row in z][::-1]),
    "mul_": lambda z: z.mul_(2.0),
    "div_": lambda z: z.div_(2.0),
    "tanh_": lambda z: torch.tanh_(z),
    "add_": written(lambda z: z.add_(1.0)),
    "halve in place": halve,
    "masked_fill_": written(lambda z: z.masked_fill_(mask(z)[..., None], 0.25)),
    "set": written(set_first),
}
PIECES = ("chunk", "chunk of dim 1", "split", "unbind", "iterate")
"""Functions that return several views."""
PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "torch.add": lambda a, b: torch.add(a, b),
    "add_": lambda a, b: a.add_(b),
    "stack": lambda a, b: torch.stack([a, b]),
}


def no_grad(z: Any) -> Any:
    with torch.no_grad():
        return z * 2.0


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(st.sampled_from([*ALONE, *(f"pair {name}" for name in PAIRS)]), st.integers(0, 9), st.integers(0, 9)),
    max_size=8,
)


def play(program: list[Step], values: list[Any]) -> str | None:
    """Run the program's steps, each on earlier values; returns the type of the error that one of them raises."""
    for name, i, j in program:
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        try:
            values.append(PAIRS[name.removeprefix("pair ")](a, b) if name.startswith("pair ") else ALONE[name](a))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            return type(error).__name__
    return None


def losses(values: list[Any]) -> list[Any]:
    """A number of every value that weighs its entries differently, and cross-entropies where there are rows of logits."""
    numbers = []
    for value in values:
        if value.ndim == 2 and value.shape[1] == V and 0 < value.shape[0] <= len(LABELS):
            labels = LABELS[: value.shape[0]]
            for options in (
                {},
                {"reduction": "sum"},
                {"reduction": "none"},
                {"label_smoothing": 0.1},
                {"ignore_index": 2},
            ):
                if not (
                    options.get("reduction", "mean") == "mean"
                    and not (labels != options.get("ignore_index", -100)).any()
                ):
                    options = {"ignore_index": -100, **options}
                    ids = torch.where(labels == -100, options["ignore_index"], labels)
                    numbers.append(F.cross_entropy(value, ids, **options).sum())
        tensor = value.tensor() if isinstance(value, TracedLogits) else value
        numbers.append((tensor * torch.arange(1.0, tensor.numel() + 1, dtype=tensor.dtype).view(tensor.shape)).sum())
    return numbers


@given(steps, st.booleans(), st.booleans())
@example([("chunk", 0, 0), ("mul_", 0, 0)], False, False)
@example([("shift", 0, 0), ("mul_", 1, 0)], True, False)
@example([("view", 0, 0), ("contiguous", 0, 0), ("add_", 2, 0)], True, True)
@example([("shift", 0, 0), ("contiguous", 0, 0), ("add_", 2, 0)], True, True)
@example([("gather ids", 0, 0), ("logsumexp keepdim", 1, 0), ("pair sub", 1, 0)], True, False)
@example([("iterate", 0, 0), ("log_softmax", 0, 0), ("gather one", 0, 0), ("squeeze", 0, 0)], False, True)
@example([("stack of logsumexps", 0, 0), ("unsqueeze", 0, 0), ("gather one", 2, 0), ("pair sub", 0, 1)], False, True)
@example(
    [("tanh", 0, 0), ("neg", 0, 0), ("log_softmax", 0, 0), ("exp", 0, 0), ("pair mul", 0, 1), ("sum of rows", 0, 0)],
    False,
    True,
)
@example([("log_softmax", 0, 0), ("mul_", 1, 0), ("gather ids", 1, 0)], False, True)
@example([("log_softmax", 0, 0), ("shift", 0, 0), ("add_", 1, 0), ("gather ids", 1, 0)], False, True)
@example([("logsumexp", 0, 0), ("unsqueeze", 0, 0), ("add_", 1, 0)], False, True)
@example([("no grad", 0, 0), ("gather one", 0, 0), ("logsumexp keepdim", 1, 0), ("pair sub", 1, 0)], False, True)
@example([("neg", 0, 0), ("pair add", 0, 0), ("tanh", 0, 0), ("mul", 0, 0), ("view", 0, 0)], True, False)
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_programs(program: list[Step], two: bool, bias: bool) -> None:
    results: list[Any] = []
    for ours in (False, True):
        one, other = head(bias), head(bias, seed=1)
        torch.manual_seed(2)
        x, y = (torch.randn(B, S, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
        values = (
            [deferred(x, one), deferred(y, other)]
            if ours
            else [F.linear(x, one.weight, one.bias), F.linear(y, other.weight, other.bias)]
        )
        values = values[: 1 + two]
        error = play(program, values)
        parameters = [x, y, *one.parameters(), *other.parameters()]
        try:
            numbers = losses(values)
        except RuntimeError:
            assert not ours or results[0] is None
            results.append(None)  # one of several views that a function returned was written to
            continue
        try:
            gradients = torch.autograd.grad(sum(numbers), parameters, allow_unused=True)
        except RuntimeError:
            gradients = None  # something that backward needs was written to, or nothing requires a gradient
        results.append((error, [number.detach() for number in numbers], gradients))
    if results[0] is None:
        return
    (error, plain, plain_gradients), (our_error, ours, our_gradients) = results
    if error == "RuntimeError" and our_error is None:
        # PyTorch writes to none of several views that a function returned. Those of deferred logits are views by themselves.
        assert any(name in PIECES for name, *_ in program)
        return
    assert our_error == error
    torch.testing.assert_close(ours, plain)
    if plain_gradients is not None:
        assert our_gradients is not None
        for want, actual in zip(plain_gradients, our_gradients, strict=True):
            nothing = (
                torch.zeros_like(want if actual is None else actual)
                if want is not None or actual is not None
                else torch.zeros(0)
            )
            torch.testing.assert_close(nothing if actual is None else actual, nothing if want is None else want)


def test_input_written_before_the_output_is_used() -> None:
    x = torch.randn(B, S, H, dtype=torch.float64)
    logits = [deferred(x, head()), deferred(x, head(), traced=True)]
    gate = Gate(x, *GATED["swiglu"])
    x.zero_()
    for z in logits:
        with pytest.raises(RuntimeError, match="modified in place"):
            z.sigmoid()
    with pytest.raises(RuntimeError, match="modified in place"):
        gate * x


@pytest.mark.parametrize("traced", [False, True])
def test_dtypes_follow_the_logits(traced: bool, calls: Counter[str]) -> None:
    linear = head().bfloat16()
    z = deferred(torch.randn(B, S, H).bfloat16(), linear, traced)
    labels = LABELS.clone()
    assert z.dtype == z.contiguous().dtype == z.to(torch.bfloat16).dtype == torch.bfloat16
    assert z.float().dtype == z.to(torch.float32).dtype == torch.float32
    assert F.cross_entropy(z.view(-1, V), labels).dtype == torch.bfloat16
    assert F.cross_entropy(z.float().view(-1, V), labels).dtype == torch.float32
    assert calls == {"fused_linear_cross_entropy": 2}
    assert type(z.half()) is Tensor


@pytest.mark.parametrize("traced", [False, True])
def test_autocast_is_that_of_the_head(traced: bool, calls: Counter[str]) -> None:
    linear, x = head().float(), torch.randn(B * S, H)
    with torch.autocast("cpu", torch.bfloat16):
        z, want = deferred(x, linear, traced), F.linear(x, linear.weight, linear.bias)
    assert z.dtype == want.dtype == torch.bfloat16
    loss = F.cross_entropy(z.float(), LABELS)
    assert calls["fused_linear_cross_entropy"] == 1
    torch.testing.assert_close(loss, F.cross_entropy(want.float(), LABELS), rtol=1e-2, atol=1e-2)
    assert torch.equal(z.tensor() if traced else z + 0, want)


TRACED = (
    "mul",
    "rmul",
    "div",
    "neg",
    "tanh",
    "shift",
    "tail",
    "first",
    "step",
    "view",
    "reshape",
    "flatten",
    "contiguous",
)


@given(st.lists(st.sampled_from([*TRACED, "add", "columns", "softmax"]), max_size=6), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_traced_programs(names: list[str], bias: bool) -> None:
    """The steps of models, of the object that stands for logits while torch.compile traces."""
    results = []
    for ours in (False, True):
        one, other = head(bias), head(bias, seed=1)
        torch.manual_seed(2)
        x, y = (torch.randn(B, S, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
        pair = [
            deferred(t, m, traced=True) if ours else F.linear(t, m.weight, m.bias) for t, m in ((x, one), (y, other))
        ]
        z = pair[0]
        for name in names:
            try:
                z = z + pair[1] if name == "add" else ALONE[name](z)
            except (RuntimeError, IndexError) as error:
                results.append(type(error).__name__)
                break
        else:
            numbers = losses([z])
            gradients = torch.autograd.grad(sum(numbers), [x, *one.parameters()], allow_unused=True)
            results.append(([n.detach() for n in numbers], gradients))
    if not isinstance(results[0], str):  # made logits are contiguous, so a view of them may succeed
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize(
    "multiply",
    [lambda a, up: a * up, lambda a, up: up * a, torch.mul, lambda a, up: a.mul_(up), lambda a, up: a.__imul__(up)],
)
def test_gate_becomes_the_op(op: str, multiply: Callable[[Any, Tensor], Tensor], calls: Counter[str]) -> None:
    act, function = GATED[op]
    gate, up = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    deferred = Gate(gate, act, function)
    assert deferred.shape == gate.shape
    want = act(gate) * up
    calls.clear()
    torch.testing.assert_close(multiply(deferred, up), want)
    assert calls == {op: 1}


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a * 2.0,
        lambda a: a * torch.ones(4, dtype=torch.float64),
        lambda a: a.view(-1) * torch.ones(12),
        lambda a: F.linear(a, torch.ones(5, 4)),
        lambda a: torch.ones(3, 4).mul_(a),
        lambda a: torch.cat([a, a]),
        lambda a: a.add_(1.0) * torch.ones(3, 4),
        lambda a: a.max(),
        lambda a: len(a),
        lambda a: [float(row.sum()) for row in a],
    ],
)
def test_gate_that_meets_something_else(use: Callable[[Any], Any], calls: Counter[str]) -> None:
    act, function = GATED["swiglu"]
    gate = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(use(Gate(gate, act, function)), use(act(gate)))
    assert not calls


def test_gate_made_without_gradient_has_none(calls: Counter[str]) -> None:
    gate, up = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with torch.no_grad():
        deferred = Gate(gate, *GATED["swiglu"])
    assert not (deferred * up).requires_grad


def test_a_copied_head_still_defers(calls: Counter[str]) -> None:
    """PEFT copies heads; the switch that makes a head defer its logits is no attribute of it."""
    from tiny_models import batch, build

    import liger_transformers

    model = build("llama")
    liger_transformers.apply(model)
    model.lm_head = copy.deepcopy(model.lm_head)
    model(**batch())
    assert calls["fused_linear_cross_entropy"] == 1
