"""Rotary functions written in a few ways: each is found to be its op, and runs it where the op takes the call."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.deprecation import deprecate_kwarg

import liger_transformers

B, S, D = 2, 5, 8


def pairs(x: Tensor) -> Tensor:
    """Neighbouring columns, a quarter turned."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def halves(x: Tensor) -> Tensor:
    """Both halves of the columns, a quarter turned."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def standard(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return standard(q, k, cos, -sin)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for t in (cos, sin))
    width = cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        part = x[..., :width]
        return torch.cat((part * cos + pairs(part) * sin, x[..., width:]), -1)

    return turned(q), turned(k)


def sorted_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Neighbouring columns turned, and then laid out as halves."""
    return standard(*(torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k)), cos, sin)


def tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Tokens, heads, columns: an image's pieces, as vision towers have them."""
    return standard(q, k, cos, sin, unsqueeze_dim=-2)


def planes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: list[int]) -> Any:
    """Sections of the columns take their angles from time, height and width by turns."""
    parts = ([plane[i % 3] for i, plane in enumerate(t.split(sections * 2, -1))] for t in (cos, sin))
    return standard(q, k, *(torch.cat(part, -1) for part in parts))


def own_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Neighbouring columns, each with an angle of its own: no op."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + pairs(q) * sin, k * cos + pairs(k) * sin


def numbers(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    """Neighbouring columns as complex numbers, of heads after tokens."""
    return tuple(
        torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs_cis[:, :, None])
        .flatten(-2)
        .to(x.dtype)
        for x in (xq, xk)
    )


def numbers_of_heads(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    """The same of tokens after heads."""
    return tuple(x.transpose(1, 2) for x in numbers(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis))


def attention(function: Callable[..., Any]) -> nn.Module:
    """A module whose forward calls the function by a global name."""
    space = {"turn": function, "nn": nn, "__name__": __name__}
    exec(
        "class Attention(nn.Module):\n    def forward(self, *args, **kwargs):\n        return turn(*args, **kwargs)\n",
        space,
    )
    return space["Attention"]()  # type: ignore[operator]


def call(tables: int, columns: int = D, heads_first: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k = torch.randn(B, 3, S, D, requires_grad=True), torch.randn(B, 1, S, D)
    q, k = (q, k) if heads_first else (q.transpose(1, 2), k.transpose(1, 2))
    return q, k, torch.randn(tables, S, columns), torch.randn(tables, S, columns)


def call_of_tokens() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(S, 3, D, requires_grad=True), torch.randn(S, 1, D), torch.randn(S, D), torch.randn(S, D)


def call_of_planes() -> tuple[Any, ...]:
    return *call(1)[:2], torch.randn(3, B, S, D), torch.randn(3, B, S, D), [1, 1, 2]


def complex_call(tables: int, heads_first: bool) -> tuple[Tensor, ...]:
    q, k, real, imaginary = call(tables, D // 2, heads_first)
    return q, k, torch.complex(real, imaginary)


@pytest.mark.parametrize(
    ("function", "arguments", "op"),
    [
        (standard, call(B), "rope"),
        (standard, call(1), "rope"),
        (backwards, call(B), "rope"),
        (sorted_pairs, call(B), "rope"),
        (tokens, call_of_tokens(), "rope"),
        (planes, call_of_planes(), "qwen2vl_mrope"),
        (interleaved, call(1), "llama4_rope"),
        (interleaved, call(1, D // 2), "llama4_rope"),
        (interleaved, call(1, 2), "llama4_rope"),
        (interleaved, call(B), None),  # a table per sample
        (numbers, complex_call(1, False), "llama4_rope"),
        (numbers, complex_call(B, False), None),
        (numbers_of_heads, complex_call(1, True), "llama4_rope"),
    ],
)
def test_layouts(function: Any, arguments: tuple[Tensor, ...], op: str | None, calls: Counter[str]) -> None:
    want = function(*arguments)
    model = nn.Sequential(attention(function))
    liger_transformers.apply(model)
    calls.clear()
    actual = model[0](*arguments)
    assert calls == ({} if op is None else {op: 1})
    torch.testing.assert_close(actual, want)
    gradients = [torch.autograd.grad(rotated[0].square().sum(), arguments[0])[0] for rotated in (actual, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (call(B, heads_first=False), {"unsqueeze_dim": 2}),
        ((*call(1)[:3], call(1)[3].requires_grad_()), {"unsqueeze_dim": 1}),
    ],
)
def test_calls_that_no_op_takes(arguments: tuple[Tensor, ...], options: dict[str, Any], calls: Counter[str]) -> None:
    """The model's own function runs: for other layouts, and for angles that want a gradient."""
    model = nn.Sequential(attention(standard))
    liger_transformers.apply(model)
    calls.clear()
    torch.testing.assert_close(model[0](*arguments, **options), standard(*arguments, **options))
    assert not calls


def test_queries_alone_are_the_models_own(calls: Counter[str]) -> None:
    """A layer that shares another one's keys turns its queries alone (mistral_large4 of transformers 5.24)."""

    def either(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
        return standard(q, q if k is None else k, cos, sin)[0], None if k is None else standard(q, k, cos, sin)[1]

    model, (q, k, cos, sin) = nn.Sequential(attention(either)), call(B)
    liger_transformers.apply(model)
    calls.clear()
    torch.testing.assert_close(model[0](q, None, cos, sin), either(q, None, cos, sin))
    assert not calls
    model[0](q, k, cos, sin)
    assert calls["rope"] == 1


def test_a_function_that_is_no_op_is_reported() -> None:
    report = liger_transformers.apply(nn.Sequential(attention(own_angles)), strict=False)
    ((_, why),) = report.left
    assert why == "turn: it is none of llama4_rope, qwen2vl_mrope, rope"


def decorated(decorator: Callable[[Any], Any]) -> nn.Module:
    """A module whose forward has a decorator around it."""
    model = attention(standard)
    cls = type(model)
    cls.forward = decorator(decorator(cls.forward))  # type: ignore[method-assign]
    return model


def test_arguments_that_transformers_renames(calls: Counter[str]) -> None:
    """transformers 5.24 renames an argument of every attention by a decorator: the op runs, and the name still works."""
    model = nn.Sequential(decorated(deprecate_kwarg("axis", "999.0", new_name="unsqueeze_dim")))
    report = liger_transformers.apply(model)
    assert [op for _, op in report.swapped] == ["rope"]
    calls.clear()
    with pytest.warns(FutureWarning, match="`axis` is deprecated"):
        actual = model[0](*call(B), axis=1)
    torch.testing.assert_close(actual, standard(*call(B)))
    assert calls["rope"] == 1
    liger_transformers.restore(model)
    calls.clear()
    model[0](*call(B))
    assert not calls


def test_another_decorator_is_left() -> None:
    """Whatever else is around a forward may hold it in ways that a copy would miss."""

    def around(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return called

    report = liger_transformers.apply(nn.Sequential(decorated(around)), strict=False)
    ((_, why),) = report.left
    assert why == "its forward is decorated"
