"""The rule: what luck of the baseline's allows, and what it doesn't."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from liger_conformance.case import Case, cases_of, uneven
from liger_conformance.compare import Mismatch, compare
from liger_conformance.evaluate import Outcome, baseline_and_truth, complete, evaluate, has_rows, incoming_of
from liger_conformance.rounding import Samples, largest_error
from liger_core.contract import ops


def hold(op: str, arguments: dict[str, Any], actual: Outcome) -> None:
    """Hold what a kernel would have given against the reference, as the suite does."""
    baseline, truth = baseline_and_truth(ops[op], arguments)
    samples = Samples(ops[op], arguments)
    for name, value in actual.items().items():
        compare(name, value, baseline.items()[name], truth.items()[name], samples)


class Draws:
    """Draws of a case: some, and then more until one baseline alone would have refused what is right.

    How often it would depends on the order in which the CPU's products add up.
    """

    def __init__(self, least: int, first: int = 0) -> None:
        self.least, self.first, self.refused = least, first, 0

    def __iter__(self) -> Iterator[int]:
        for draw in range(self.first, self.first + 64):
            if self.refused and draw >= self.first + self.least:
                return
            yield draw
        raise AssertionError("one baseline is enough here: the test shows nothing")

    def see(self, name: str, actual: torch.Tensor, baseline: torch.Tensor | None, truth: torch.Tensor | None) -> None:
        try:
            compare(name, actual, baseline, truth)
        except Mismatch:
            self.refused += 1


def gradient_of_x(x: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor) -> torch.Tensor:
    """Gradient of a layer norm's x, by the formula of most kernels: the mean of what it subtracts is not 0."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    normed, g = (x - mean) * rstd, dy * weight
    return (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * rstd


def test_a_baseline_that_is_right_by_luck_is_no_measure() -> None:
    """In the gradient of a layer norm of two columns what the reference rounds cancels; in the formula it doesn't."""
    op = ops["layer_norm"]
    draws = Draws(20)
    for number in draws:
        case = Case(f"two-columns-{number}", "edge", rows=(20,), hidden=2)
        arguments = complete(op, cases_of("layer_norm").build(case, torch.float32, "cpu"))
        dy = incoming_of(op, arguments)["result"]
        dx = gradient_of_x(arguments["x"], arguments["weight"], arguments["eps"], dy)
        baseline, truth = (outcome.gradients["x"] for outcome in baseline_and_truth(op, arguments))
        compare("gradient of x", dx, baseline, truth, Samples(op, arguments))
        draws.see("x", dx, baseline, truth)


JUDGED = [op for op in sorted(ops) if not cases_of(op).exact]
"""Ops that are judged by a bound."""

OF_PRODUCTS = ("fused_linear_", "fused_moe", "gated_mlp")
"""Ops that are products and another op. What roundings may do to them takes seconds to find."""


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] if op.startswith(OF_PRODUCTS) else []) for op in JUDGED],
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
    incoming = incoming_of(ops[op], arguments)
    with pytest.raises(Mismatch):
        hold(op, arguments, evaluate(ops[op], ops[op].reference, narrow, None, incoming))


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_one_infinity_of_the_truth_excuses_nothing(odd: float) -> None:
    """Its distance from a finite baseline is infinite, and so would the bound of every other element be."""
    truth = torch.linspace(1, 2, 8, dtype=torch.float64)
    baseline = truth.float()
    truth[3] = odd
    compare("y", baseline.clone(), baseline, truth)
    with pytest.raises(Mismatch, match="error 1e\\+30 is more than"):
        compare("y", torch.full_like(baseline, 1e30), baseline, truth)
    samples: Any = types.SimpleNamespace(errors={"y": [largest_error(baseline, truth)]})
    with pytest.raises(Mismatch, match="error 1e\\+30 is more than"):
        compare("y", torch.full_like(baseline, 1e30), baseline, truth, samples)


def test_a_kernel_may_be_right_where_the_reference_overflows() -> None:
    """On its way to a gradient that float16 holds. Infinite as the reference or right; nothing between, nor infinite else."""
    op = ops["rms_norm"]
    case = Case("overflow", "extreme", rows=(40,), hidden=1, casting_mode="none")
    for draw in range(20):
        arguments = complete(op, cases_of("rms_norm").build(case, torch.float16, "cpu", draw))
        arguments["x"][7] = 1e-4
        baseline, truth = (outcome.gradients["x"] for outcome in baseline_and_truth(op, arguments))
        assert baseline is not None
        assert truth is not None
        if not baseline[7].isfinite() and baseline.isfinite().sum() == 39:
            break
    else:
        raise AssertionError("the reference overflows nowhere: the test shows nothing")

    samples = Samples(op, arguments)

    def check(place: int, value: float) -> None:
        actual = truth.half()
        actual[place] = value
        compare("gradient of x", actual, baseline, truth, samples)

    right = truth[7].item()
    check(7, baseline[7].item())
    check(7, right)
    for value in (right * 1.1, 0.0, -baseline[7].item(), torch.nan):
        with pytest.raises(Mismatch):
            check(7, value)
    with pytest.raises(Mismatch):
        check(8, baseline[7].item())


def test_the_digits_of_a_reference_that_overflows_are_its_dtypes() -> None:
    """Where nothing overflows, rounding in float64 gives the baseline; where all does, it is the baseline that there isn't."""
    op = ops["rms_norm"]
    for scale, overflows in ((1.0, False), (1e-4, True)):
        case = Case("digits", "extreme", rows=(9,), hidden=7, scale=scale, offset=1.0, casting_mode="none")
        arguments = complete(op, cases_of("rms_norm").build(case, torch.float16, "cpu"))
        baseline, truth = (outcome.items()["gradient of x"] for outcome in baseline_and_truth(op, arguments))
        samples = Samples(op, arguments)
        unbounded = samples.without_overflow["gradient of x"]
        assert baseline is not None
        assert truth is not None
        assert unbounded is not None
        assert unbounded.isfinite().all()
        assert bool(baseline.isfinite().all()) is not overflows
        if not overflows:
            assert (unbounded - baseline.double()).abs().max() <= 2e-3 * truth.abs().max()
            continue
        near = truth + (unbounded - truth).abs().max()
        compare("gradient of x", near.half(), baseline, truth, samples)
        with pytest.raises(Mismatch):
            compare("gradient of x", near.half(), baseline, truth)
        with pytest.raises(Mismatch):
            compare("gradient of x", (truth * 1.05).half(), baseline, truth, samples)


def test_where_the_reference_overflows_no_bound_is_measured() -> None:
    """A value that its dtype can't hold stays infinite, and a large one allows no more elsewhere."""
    truth = torch.tensor([1.0, 2.0, 6e4, 7e4], dtype=torch.float64)
    baseline = torch.tensor([1.0, 2.0, torch.inf, torch.inf], dtype=torch.float16)
    compare("y", baseline.clone(), baseline, truth)
    compare("y", truth.half(), baseline, truth)
    for place, value in ((0, 1.01), (2, 5.9e4), (3, 65504.0)):
        actual = baseline.clone()
        actual[place] = value
        with pytest.raises(Mismatch):
            compare("y", actual, baseline, truth)


def test_a_kernel_may_take_for_0_what_the_reference_multiplies_by_infinity() -> None:
    """So it is NaN where the reference is infinite, if that is NaN elsewhere. Not the other way round, and not else."""
    truth = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    baseline = truth.float()
    actual = baseline.clone()
    actual[1:] = torch.nan
    compare("y", actual, baseline, truth)
    for place, value in ((0, torch.nan), (1, -torch.inf), (1, 1.0), (3, torch.inf), (3, 1.0)):
        actual = baseline.clone()
        actual[place] = value
        with pytest.raises(Mismatch):
            compare("y", actual, baseline, truth)
    actual = baseline.clone()
    actual[1] = torch.nan
    with pytest.raises(Mismatch):
        compare("y", actual[:3], baseline[:3], truth[:3])


def test_rounding_may_decide_what_overflows() -> None:
    """Beside the largest number of a dtype, by as much as errors are. Not beyond, and not with another sign."""
    truth = torch.tensor([1.0, 65510.0, 65530.0, -65530.0, 66000.0, 65000.0], dtype=torch.float64)
    baseline = truth.half()
    assert baseline.isinf().tolist() == [False, False, True, True, True, False]
    for place, value in ((1, torch.inf), (2, 65504.0), (3, -65504.0)):
        actual = baseline.clone()
        actual[place] = value
        compare("y", actual, baseline, truth)
        compare("y", baseline, actual, truth)
    for place, value in (
        (1, -torch.inf),
        (1, torch.nan),
        (2, 64000.0),
        (2, -torch.inf),
        (4, 65504.0),
        (5, torch.inf),
        (0, torch.inf),
    ):
        actual = baseline.clone()
        actual[place] = value
        with pytest.raises(Mismatch):
            compare("y", actual, baseline, truth)


def products(x: torch.Tensor, weight: torch.Tensor, digits: int) -> torch.Tensor:
    """x · weightᵀ by a model of a tensor core: 16 products at a time join a sum, which is cut off after so many binary digits.

    The products have two digits more than the largest of them and of the sum has, and are cut off there. With 24 digits this
    gives the largest errors of an H100 in float16 and bfloat16, of 460 to 4096 terms of one sign.
    """
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for left, right in zip(x.double().split(16, 1), weight.double().split(16, 1), strict=True):
        terms = torch.cat([left[:, None] * right, total[..., None]], -1)
        unit = torch.ldexp(torch.ones_like(total), torch.frexp(terms.abs().amax(-1))[1] - digits - 2)
        mantissa, exponent = torch.frexp((terms / unit[..., None]).trunc().sum(-1) * unit)
        total = torch.ldexp((mantissa * 2**digits).trunc(), exponent - digits)
    return total.float()


# Errors of few logits don't cancel. `decided` logits are sums of terms of one sign, which lose more. Of many
# logits all lose, so that the sum of their exponentials does.
DEEP = (
    {"rows": 3, "hidden": 256, "vocabulary": 3},
    {"rows": 3, "hidden": 4096, "vocabulary": 3},
    {"rows": 1, "hidden": 2896, "vocabulary": 120, "decided": True},
    {"rows": 4, "hidden": 1280, "vocabulary": 300},
)


@pytest.mark.parametrize("sizes", DEEP, ids=["256", "4096", "one-sign", "many-logits"])
def test_tensor_cores_add_up_products_as_they_do(sizes: dict[str, Any]) -> None:
    """To float32 sums that are cut off, not rounded. With fewer digits nothing is excused."""
    name = "fused_linear_logit_statistics"
    draws = Draws(4)
    for draw in draws:
        case = Case("deep", "edge", **sizes)
        arguments = complete(ops[name], cases_of(name).build(case, torch.float16, "cpu", draw))
        baseline, truth = (outcome.results["lse"] for outcome in baseline_and_truth(ops[name], arguments))
        samples = Samples(ops[name], arguments)

        def lse(digits: int, arguments: dict[str, Any] = arguments) -> torch.Tensor:
            return products(arguments["x"], arguments["linear_weight"], digits).logsumexp(1)

        compare("lse", lse(24), baseline, truth, samples)
        with pytest.raises(Mismatch):
            compare("lse", lse(19), baseline, truth, samples)
        draws.see("lse", lse(24), baseline, truth)


def test_a_log_sum_exp_may_be_rounded() -> None:
    """All terms of a row then err alike. Where their sum nearly cancels, the baseline at inputs nearby has the same luck."""
    name = "fused_linear_kl_div"
    draws = Draws(4, first=9)
    for draw in draws:
        case = Case("near", "edge", rows=3, hidden=1, vocabulary=1596, scale=0.01, absent=0.652)
        arguments = complete(ops[name], cases_of(name).build(case, torch.float32, "cpu", draw))
        baseline, truth = (outcome.results["result"] for outcome in baseline_and_truth(ops[name], arguments))
        samples = Samples(ops[name], arguments)

        def loss(units: int, arguments: dict[str, Any] = arguments) -> torch.Tensor:
            """With log-sum-exps that are rounded to float32, and then off by some units."""
            y, z = arguments["target"].double(), arguments["x"].double() @ arguments["linear_weight"].double().T
            lse = z.logsumexp(1, keepdim=True).float().double() + units * 2.0**-21
            return (y * (y.clamp(min=1e-10).log() - z + lse)).sum().float() / y.shape[0]

        compare("result", loss(0), baseline, truth, samples)
        with pytest.raises(Mismatch):
            compare("result", loss(8), baseline, truth, samples)
        draws.see("result", loss(0), baseline, truth)


def test_a_sum_may_have_any_order() -> None:
    """Terms of different signs are added up one by one, as over the rows of a program or over chunks of them."""
    op = ops["layer_norm"]
    draws = Draws(3)
    for draw in draws:
        case = Case("many-rows", "edge", rows=(20000,), hidden=2)
        arguments = complete(op, cases_of("layer_norm").build(case, torch.float32, "cpu", draw))
        baseline, truth = (outcome.gradients["bias"] for outcome in baseline_and_truth(op, arguments))
        dy = incoming_of(op, arguments)["result"]
        dbias = torch.from_numpy(np.cumsum(dy.numpy(), 0, dtype=np.float32))[-1]  # PyTorch's would have float64 inside
        samples = Samples(op, arguments)
        compare("gradient of bias", dbias, baseline, truth, samples)
        with pytest.raises(Mismatch):
            compare("gradient of bias", dbias.bfloat16().float(), baseline, truth, samples)
        draws.see("bias", dbias, baseline, truth)


def test_a_product_may_be_added_up_one_by_one() -> None:
    """In float32, of terms of one sign: each sum between is rounded. With half the digits nothing is excused."""
    name = "fused_linear_logit_statistics"
    draws = Draws(4)
    for draw in draws:
        case = Case("deep", "edge", rows=3, hidden=4096, vocabulary=1, decided=True)
        arguments = complete(ops[name], cases_of(name).build(case, torch.float32, "cpu", draw))
        baseline, truth = (outcome.results["lse"] for outcome in baseline_and_truth(ops[name], arguments))
        samples = Samples(ops[name], arguments)

        def lse(dtype: type, arguments: dict[str, Any] = arguments) -> torch.Tensor:
            terms = (arguments["x"].double() * arguments["linear_weight"].double()).numpy()
            total = np.zeros(terms.shape[0], dtype)
            for column in terms.T:
                total = (total + column).astype(dtype)
            return torch.from_numpy(total.astype(np.float32))

        compare("lse", lse(np.float32), baseline, truth, samples)
        with pytest.raises(Mismatch):
            compare("lse", lse(np.float16), baseline, truth, samples)
        narrow = {n: (arguments[n].view(torch.int32) & ~0x1FFF).view(torch.float32) for n in ("x", "linear_weight")}
        with pytest.raises(Mismatch):
            compare("lse", lse(np.float32, narrow), baseline, truth, samples)
        draws.see("lse", lse(np.float32), baseline, truth)


UNEVEN = [(op, case) for op in JUDGED if ops[op].differentiable for case in cases_of(op).cases if case.by_row]
"""Cases with rows of different scales. Ops without gradients give elements in 8 bits, of which each is judged by itself."""


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
        row = int(scales.where(scales > 0, torch.inf).argmin())  # not one that is ignored
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


def wrong_rows(q: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Rows and scales that kernels of `quantize_gated` might give, each wrong in one way."""
    rows, scales = q["rows"], q["row_scales"]
    wide = rows.float()
    return {
        "all one step lower": {"rows": (rows.view(torch.uint8) - (wide != 0).byte()).view(rows.dtype)},
        "another block's elements": {"rows": wide.roll(128, 1).to(rows.dtype)},
        "a block of zeros": {"rows": torch.cat((wide[:, :128] * 0, wide[:, 128:]), 1).to(rows.dtype)},
        "NaN is the largest number": {"rows": wide.nan_to_num(448.0).to(rows.dtype)},
        "a number two steps off": {"rows": torch.cat((wide[:1] * 1.3, wide[1:])).to(rows.dtype)},
        "scales of the block before": {"row_scales": scales.roll(1, 0)},
        "scales twice as large": {"row_scales": scales * 2, "rows": (wide / 2).to(rows.dtype)},
        "the least scale for all": {"row_scales": torch.full_like(scales, scales.min().item())},
    }


def test_elements_in_8_bits_are_one_step_off_for_few() -> None:
    op = ops["quantize_gated"]
    arguments = complete(
        op, cases_of("quantize_gated").build(Case("rule", "odd", tokens=30, inner=256), torch.float32, "cpu")
    )
    arguments["gate"][7, 5] = torch.nan
    baseline, _ = baseline_and_truth(op, arguments)
    results = {name: value for name, value in baseline.results.items() if value is not None}
    near = results["rows"].view(torch.uint8).clone()
    near[3, :5] += 1
    hold("quantize_gated", arguments, Outcome(results | {"rows": near.view(torch.float8_e4m3fn)}, {}))
    for name, wrong in wrong_rows(results).items():
        try:
            hold("quantize_gated", arguments, Outcome(results | wrong, {}))
        except Mismatch:
            continue
        pytest.fail(name)


@pytest.mark.parametrize("op", sorted(op for op in JUDGED if cases_of(op).kind == "8 bits"))
def test_scales_of_8_bits_may_be_rounded(op: str) -> None:
    """Roundings of what is converted are simulated, those to 8 bits themselves not."""
    case = next(case for case in cases_of(op).cases if case.values.get("scales") == "float32")
    errors = Samples(ops[op], complete(ops[op], cases_of(op).build(case, torch.float32, "cpu"))).errors
    for name in errors:
        assert any(error.any() for error in errors[name]) is ("scales" in name), name


def test_rounding_decides_nothing() -> None:
    """Ties stay ties: a kernel that lets an element in which equals tau is wrong by more than any rounding."""
    op = ops["sparsemax"]
    case = next(case for case in cases_of("sparsemax").cases if case.id == "ties")
    arguments = complete(op, cases_of("sparsemax").build(case, torch.float32, "cpu"))
    wrong = {**arguments, "x": arguments["x"] * (1 + 1e-4 * torch.rand(arguments["x"].shape))}
    incoming = incoming_of(op, arguments)
    assert max(Samples(op, arguments).errors["gradient of x"]).item() < 1e-5
    actual = evaluate(op, op.reference, wrong, None, incoming)
    with pytest.raises(Mismatch):
        hold("sparsemax", arguments, actual)


def test_rounding_parts_no_equals() -> None:
    """Where student and teacher are equal, a gradient of either sign is no rounding of 0."""
    op = ops["distillation"]
    case = next(case for case in cases_of("distillation").cases if case.id == "equal-rows")
    arguments = complete(op, cases_of("distillation").build(case, torch.float32, "cpu"))
    student = arguments["student_logits"]
    apart = torch.rand(student.shape, generator=torch.Generator().manual_seed(0))
    parted = {**arguments, "student_logits": student * (1 + 1e-6 * apart)}
    incoming = incoming_of(op, arguments)
    hold("distillation", arguments, evaluate(op, op.reference, arguments, None, incoming))
    with pytest.raises(Mismatch, match="gradient of student_logits"):
        hold("distillation", arguments, evaluate(op, op.reference, parted, None, incoming))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rounding_may_decide_what_is_clamped(activation: str) -> None:
    """A gate within rounding of the limit has all of its gradient, or none. One that is farther from it hasn't the choice."""
    op, case = ops["fused_moe"], next(case for case in cases_of("fused_moe").cases if case.id == "limit")
    arguments = complete(op, cases_of("fused_moe").build(case, torch.float32, "cpu")) | {"activation": activation}
    expert = int(arguments["expert_indices"][0, 0])
    gates = arguments["x"][0].double() @ arguments["gate_up_weight"][expert, : case.values["intermediate"]].double().T
    gate = gates.max().item()
    assert gate > 0
    for apart, passes in ((2e-7, True), (1e-4, False)):
        arguments["limit"] = gate * (1 + apart)
        incoming = incoming_of(op, arguments)
        clamped = evaluate(op, op.reference, arguments | {"limit": gate * (1 - apart)}, None, incoming)
        right = evaluate(op, op.reference, arguments, None, incoming)
        hold("fused_moe", arguments, right)
        with contextlib.nullcontext() if passes else pytest.raises(Mismatch, match="gradient of x"):
            hold("fused_moe", arguments, Outcome(right.results, right.gradients | {"x": clamped.gradients["x"]}))
