"""No contract is left out: each has a docstring with its sections, and tests of its reference."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from liger_core.contract import ops
from liger_core.ops.fused_moe import fused_moe, least_memory, temporary_memory

HERE = Path(__file__).parent


def in_small() -> set[str]:
    """The ops with a small call, which go through every test of test_references_basic.py."""
    files = (HERE / "op_calls").glob("[!_]*.py")
    return {file.stem for file in files if re.search(r"^def small\(\)", file.read_text("utf-8"), re.M)}


def used(file: str) -> set[str]:
    """The names that a file of tests reads: as variables, or as attributes of a module."""
    nodes = list(ast.walk(ast.parse((HERE / file).read_text("utf-8"))))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return names | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize("name", sorted(ops))
def test_every_reference_is_tested(name: str) -> None:
    files = ("test_references_losses.py", "test_losses.py", "test_distillation.py")
    # Tests of their own, in test_references_basic.py, test_gated_mlp.py and below.
    here = {"rms_norm", "fused_linear_logit_statistics", "fused_moe", "attn_res", "gated_mlp", "modulated_rms_norm"}
    tested = in_small() | here | set().union(*map(used, files))
    assert name in tested, f"add small() to op_calls/{name}.py, or tests to {', '.join(files)}"


@pytest.mark.parametrize("name", sorted(ops))
def test_every_docstring_has_its_sections(name: str) -> None:
    """Arguments, result, errors and the formula's source: none of these sections is empty."""
    text = ops[name].reference.__doc__ or ""
    for section in ("Args", "Returns", "Raises", "Source"):
        assert re.search(rf"^    {section}:\n        \S", text, re.M), f"{name}'s docstring lacks {section}:"
    arguments = text[text.find("    Args:") : text.find("    Returns:")]
    missing = [n for n in ops[name].names if not re.search(rf"^        [^:\n]*\b{n}\b[^:\n]*:", arguments, re.M)]
    assert not missing, f"{name}'s docstring says nothing of {', '.join(missing)} under Args:"


def test_fused_linear_logit_statistics_is_logit_statistics_of_the_product() -> None:
    """Results and gradients, in float64."""
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (7, 4)))
    target = torch.tensor([0, 6, 3, 2, 1])
    fused = ops["fused_linear_logit_statistics"].reference(x, weight, target)
    parts = ops["logit_statistics"].reference(x @ weight.T, target)
    for one, other in zip(fused, parts, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    total, expected = (sum(r.square().sum() for r in actual if r is not None) for actual in (fused, parts))
    gradients, expected_gradients = (torch.autograd.grad(value, (x, weight)) for value in (total, expected))
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other)


def moe(tokens: int = 5, per_token: int = 2) -> tuple[torch.Tensor, ...]:
    """Arguments of `fused_moe`, in float64: 4 experts of 3 columns, tokens of 6."""
    torch.manual_seed(0)
    x, first, second, weights = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((tokens, 6), (4, 6, 6), (4, 6, 3), (tokens, per_token))
    )
    indices = torch.tensor([[1, 3], [3, 3], [-1, 1], [-1, -1], [0, 1]])[:tokens, :per_token]
    return x, first, second, indices, weights


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("limit", [None, 0.4])
def test_fused_moe_is_a_loop_over_tokens(activation: str, limit: float | None) -> None:
    """Results and gradients: an expert twice in a row, one without tokens, slots and a token without an expert."""
    x, first, second, indices, weights = arguments = moe()
    rows = []
    for t in range(5):
        row = torch.zeros(6, dtype=torch.float64)
        for k, e in enumerate(indices[t].tolist()):
            if e >= 0:
                gate, up = first[e, :3] @ x[t], first[e, 3:] @ x[t]
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
                row = row + weights[t, k] * (second[e] @ (gate * up))
        rows.append(row)
    leaves = (x, first, second, weights)
    expected, actual = torch.stack(rows), fused_moe.reference(*arguments, activation=activation, limit=limit)
    torch.testing.assert_close(actual, expected)
    incoming = torch.linspace(-1.0, 2.0, 30, dtype=torch.float64).view(5, 6)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves, incoming), torch.autograd.grad(expected, leaves, incoming)
    )
    assert torch.autograd.gradcheck(lambda *four: fused_moe.reference(*four[:3], indices, four[3]), leaves)


def test_fused_moe_keeps_what_an_expert_does_not_get_apart() -> None:
    """An infinite token, and an expert whose weights are NaN, reach nothing that isn't routed to them."""
    x, first, second, indices, weights = (tensor.detach() for tensor in moe())
    x[3] = torch.inf  # has no expert
    first[2] = second[2] = torch.nan  # has no tokens
    assert fused_moe.reference(x, first, second, indices, weights).isfinite().all()


@pytest.mark.parametrize("wrong", [-2, 4])
def test_fused_moe_out_of_range(wrong: int) -> None:
    """The token is NaN and gives no gradient; the op reads the values first."""
    x, first, second, indices, weights = moe()
    indices[1, 0] = wrong
    y = fused_moe.reference(x, first, second, indices, weights)
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4]].isfinite().all()
    dx, dweights = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
    assert not dx[1].any()
    assert not dweights[1].any()
    with pytest.raises(IndexError, match=rf"expert_indices holds {wrong}; it takes -1 \(no expert\) to 3"):
        fused_moe(x, first, second, indices, weights)


def test_fused_moe_sums_in_float32() -> None:
    """A router in float32 is not rounded beside bfloat16 tokens, and each gradient has its own dtype."""
    x, first, second = (torch.ones(*shape).bfloat16().requires_grad_() for shape in ((1, 4), (2, 4, 4), (2, 4, 2)))
    weights = torch.tensor([[1.0, 2.0**-12]], requires_grad=True)
    y = fused_moe.reference(x, first, second, torch.tensor([[0, 0]]), weights * 2.0**12)
    one = fused_moe.reference(x, first, second, torch.tensor([[0]]), torch.tensor([[2.0**12 + 1]]))
    assert torch.equal(y, one)
    grads = torch.autograd.grad(y, (x, first, second, weights), torch.ones_like(y))
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3 + [torch.float32]


def test_memory_of_fused_moe() -> None:
    """The least is one column of all tokens, or without gradients one token; each token and column takes its own."""
    x, first, _, indices, _ = moe()

    def memory(tokens: int, columns: int) -> int:
        return temporary_memory(tokens, columns, x, first, indices, x_grad=True)

    assert memory(5, 3) - memory(5, 2) == 10 * 5 * 8
    assert memory(5, 3) > memory(4, 3)
    assert least_memory(x, first, indices, differentiable=True, x_grad=True) == memory(5, 1)
    assert least_memory(x, first, indices, differentiable=False, x_grad=False) == memory(1, 3)
