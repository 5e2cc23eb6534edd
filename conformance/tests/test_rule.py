"""The rule: what luck of the baseline's allows, and what it doesn't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from liger_conformance.case import Case, cases_of, uneven
from liger_conformance.compare import Mismatch, compare, largest_error
from liger_conformance.running import (
    Outcome,
    baseline_and_truth,
    complete,
    errors_nearby,
    evaluate,
    has_rows,
    incoming_of,
)
from liger_core.contract import ops


def hold(op: str, arguments: dict[str, Any], actual: Outcome) -> None:
    """Hold what a kernel would have given against the reference, as the suite does."""
    baseline, truth = baseline_and_truth(ops[op], arguments)
    nearby = errors_nearby(ops[op], arguments)
    for name, value in actual.items().items():
        compare(name, value, baseline.items()[name], truth.items()[name], lambda name=name: nearby[name])


def gradient_of_x(x: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor) -> torch.Tensor:
    """Of a layer norm, by the formula of most kernels: the mean of what it subtracts is not 0."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    normed, g = (x - mean) * rstd, dy * weight
    return (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * rstd


def test_a_baseline_that_is_right_by_luck_is_no_measure() -> None:
    """In the gradient of a layer norm of two columns what the reference rounds cancels; in the formula it doesn't."""
    op, over = ops["layer_norm"], 0
    for number in range(20):
        case = Case(f"two-columns-{number}", "edge", rows=(20,), hidden=2)
        arguments = complete(op, cases_of("layer_norm").build(case, torch.float32, "cpu"))
        dy = incoming_of(op, arguments)["result"]
        dx = gradient_of_x(arguments["x"], arguments["weight"], arguments["eps"], dy)
        baseline, truth = (outcome.gradients["x"] for outcome in baseline_and_truth(op, arguments))
        compare("x", dx, baseline, truth, lambda a=arguments: errors_nearby(op, a)["gradient of x"])
        try:
            compare("x", dx, baseline, truth)
        except Mismatch:
            over += 1
    assert over, "one baseline is enough here: the test shows nothing"


OF_PRODUCTS = ("fused_linear_", "fused_moe", "gated_mlp")
"""Ops that are products and another op. What roundings may do to them takes seconds to find."""


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] if op.startswith(OF_PRODUCTS) else []) for op in sorted(ops)],
)
def test_luck_excuses_no_lower_precision(op: str) -> None:
    """Operands rounded to the 11 bits of TF32 are over the bound by far, in each op, with all that roundings may do."""
    arguments = complete(ops[op], cases_of(op).build(cases_of(op).cases[0], torch.float32, "cpu"))
    narrow = {
        name: (value.view(torch.int32) & ~0x1FFF).view(torch.float32)
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32
        else value
        for name, value in arguments.items()
    }
    given = incoming_of(ops[op], arguments)
    with pytest.raises(Mismatch):
        hold(op, arguments, evaluate(ops[op], ops[op].reference, narrow, None, given))


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_one_infinity_of_the_truth_excuses_nothing(odd: float) -> None:
    """Its distance from a finite baseline is infinite, and so would the bound of every other element be."""
    truth = torch.linspace(1, 2, 8, dtype=torch.float64)
    baseline = truth.float()
    truth[3] = odd
    compare("y", baseline.clone(), baseline, truth)
    with pytest.raises(Mismatch, match="error 1e\\+30 is more than"):
        compare("y", torch.full_like(baseline, 1e30), baseline, truth)
    nearby = [largest_error(baseline, truth)]
    with pytest.raises(Mismatch, match="error 1e\\+30 is more than"):
        compare("y", torch.full_like(baseline, 1e30), baseline, truth, lambda: nearby)


def products(x: torch.Tensor, weight: torch.Tensor, digits: int) -> torch.Tensor:
    """x · weightᵀ by a model of a tensor core: 16 products at a time join a sum, which is cut off after so many binary digits."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for left, right in zip(x.double().split(16, 1), weight.double().split(16, 1), strict=True):
        mantissa, exponent = torch.frexp(total + left @ right.T)
        total = torch.ldexp((mantissa * 2**digits).trunc(), exponent - digits)
    return total.float()


@pytest.mark.parametrize("hidden", [256, 4096])
def test_tensor_cores_add_up_products_as_they_do(hidden: int) -> None:
    """To float32 sums that are cut off, not rounded. With fewer digits, or by few logits alone, nothing else is excused."""
    name = "fused_linear_logit_statistics"
    case, over = Case("few-logits", "edge", rows=3, hidden=hidden, vocabulary=3), 0
    for draw in range(4):
        arguments = complete(ops[name], cases_of(name).build(case, torch.float16, "cpu", draw))
        baseline, truth = (outcome.results["lse"] for outcome in baseline_and_truth(ops[name], arguments))
        nearby = errors_nearby(ops[name], arguments)["lse"]

        def lse(digits: int, arguments: dict[str, Any] = arguments) -> torch.Tensor:
            return products(arguments["x"], arguments["linear_weight"], digits).logsumexp(1)

        compare("lse", lse(24), baseline, truth, lambda nearby=nearby: nearby)
        with pytest.raises(Mismatch):
            compare("lse", lse(19), baseline, truth, lambda nearby=nearby: nearby)
        try:
            compare("lse", lse(24), baseline, truth)
        except Mismatch:
            over += 1
    assert over, "one baseline is enough here: the test shows nothing"


def test_a_sum_may_have_any_order() -> None:
    """Of terms whose signs differ, added up one by one, as over the rows of a program or over chunks of them."""
    op, over = ops["layer_norm"], 0
    for draw in range(3):
        case = Case("many-rows", "edge", rows=(20000,), hidden=2)
        arguments = complete(op, cases_of("layer_norm").build(case, torch.float32, "cpu", draw))
        baseline, truth = (outcome.gradients["bias"] for outcome in baseline_and_truth(op, arguments))
        dy = incoming_of(op, arguments)["result"]
        dbias = torch.from_numpy(np.cumsum(dy.numpy(), 0, dtype=np.float32))[-1]  # PyTorch's would have float64 inside
        nearby = errors_nearby(op, arguments)["gradient of bias"]
        compare("bias", dbias, baseline, truth, lambda nearby=nearby: nearby)
        with pytest.raises(Mismatch):
            compare("bias", dbias.bfloat16().float(), baseline, truth, lambda nearby=nearby: nearby)
        try:
            compare("bias", dbias, baseline, truth)
        except Mismatch:
            over += 1
    assert over, "one baseline is enough here: the test shows nothing"


UNEVEN = [(op, case) for op in sorted(ops) for case in cases_of(op).cases if case.by_row]


@pytest.mark.parametrize(("op", "case"), UNEVEN, ids=[op for op, _ in UNEVEN])
def test_a_small_row_beside_large_ones_is_judged(op: str, case: Case) -> None:
    """A kernel that gives 0 there is right by the largest value of all rows, in bfloat16, and wrong by the row's."""
    arguments = complete(ops[op], cases_of(op).build(case, torch.bfloat16, "cpu"))
    incoming = incoming_of(ops[op], arguments)
    if "incoming" in case.by_row:
        incoming = {name: uneven(value) for name, value in incoming.items()}
    baseline, truth = (outcome.items() for outcome in baseline_and_truth(ops[op], arguments, None, incoming))
    lost = 0
    for name, value in truth.items():
        if not has_rows(value, arguments[ops[op].names[0]].shape[0]):
            continue
        scales = value.reshape(value.shape[0], -1).abs().amax(1)
        row = int(scales.argmin())
        if not 0 < scales[row] * 1e3 <= scales.max():
            continue
        actual = baseline[name].clone()
        actual[row] = 0
        compare(name, actual, baseline[name], value)
        with pytest.raises(Mismatch, match=f"error of row {row} "):
            compare(name, actual, baseline[name], value, by_row=True)
        lost += 1
    assert lost, "no result nor gradient has rows of different scales"


WITHOUT_ROWS = {
    "jsd": "its only result is one number, so that rows of its gradient have no scales of their own",
    "fused_linear_jsd": "as jsd",
}


@pytest.mark.parametrize("op", ops)
def test_each_op_has_uneven_rows(op: str) -> None:
    has = [case.id for case in cases_of(op).cases if case.by_row]
    if op in WITHOUT_ROWS:
        assert not has, f"{op} has {has}: take it out of WITHOUT_ROWS"
    else:
        assert has, f"give {op} a case `uneven-rows`, whose rows differ by 1e4, with by_row=(...)"


def test_rounding_decides_nothing() -> None:
    """Ties stay ties: a kernel that lets an element in which equals tau is wrong by more than any rounding."""
    op = ops["sparsemax"]
    case = next(case for case in cases_of("sparsemax").cases if case.id == "ties")
    arguments = complete(op, cases_of("sparsemax").build(case, torch.float32, "cpu"))
    wrong = {**arguments, "x": arguments["x"] * (1 + 1e-4 * torch.rand(arguments["x"].shape))}
    given = incoming_of(op, arguments)
    assert max(errors_nearby(op, arguments)["gradient of x"]).item() < 1e-5
    actual = evaluate(op, op.reference, wrong, None, given)
    with pytest.raises(Mismatch):
        hold("sparsemax", arguments, actual)
