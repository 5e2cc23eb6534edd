"""Kernels with sizes and strides that the suite's cases don't reach."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None or find_spec("triton.triton_patch") is None:
    pytest.skip("needs triton-ascend", allow_module_level=True)

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import Make
from liger_conformance.cases.fused_moe import with_one_large_term
from liger_conformance.compare import compare
from liger_conformance.evaluate import baseline_and_truth, evaluate
from liger_conformance.interpreters.triton_bounds import OutOfBounds
from liger_conformance.rounding import Samples
from liger_conformance.route import only
from liger_conformance.target import Target
from liger_core.contract import Op, ops
from liger_triton_ascend import backend

DEVICE = liger_core.infer_device()
if why := backend.missing(DEVICE):
    pytest.skip(why, allow_module_level=True)
INTERPRETED = interpreters.interprets(backend, DEVICE)
if INTERPRETED:
    interpreters.repair(backend)

from liger_triton_ascend.ops import _linear, geglu, jsd, kl_div, mhc_pre, swiglu  # noqa: E402


def check(op: Op, arguments: dict[str, torch.Tensor]) -> None:
    with only(Target(op, "triton-ascend", DEVICE, backend, "interpreted" if INTERPRETED else "passed")):
        actual = evaluate(op, op, arguments)
    baseline, truth = baseline_and_truth(op, arguments)
    samples = Samples(op, arguments)
    for what, value in actual.items().items():
        compare(what, value, baseline.items()[what], truth.items()[what], samples)


def far(x: torch.Tensor) -> torch.Tensor:
    """x with planes whose distance 32 bits hold, but not twice it."""
    # On a CPU, memory that isn't touched is not taken.
    return x.new_empty_strided(x.shape, ((1 << 30) + 8, *x.stride()[1:])).copy_(x)


def test_planes_far_apart():
    op, make = ops["qwen2vl_mrope"], Make(torch.bfloat16, DEVICE)
    arguments = {
        "q": make.randn(1, 2, 2, 16),
        "k": make.randn(1, 1, 2, 16),
        "cos": far(make.randn(3, 1, 2, 16)),
        "sin": far(make.randn(3, 1, 2, 16)),
        "mrope_section": (2, 3, 3),
    }
    check(op, arguments)


def streams(count: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    make = Make(torch.float32, DEVICE)
    numbers = count * count + 2 * count
    x, weight = make.randn(3, count, 2).to(dtype), make.randn(numbers, count * 2) * 0.2
    return {"x": x, "weight": weight, "bias": make.randn(numbers), "alpha": make.uniform(3)}


def test_as_many_streams_as_fit():
    check(ops["mhc_pre"], streams(16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_streams_in_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mhc_pre, "CHUNK", 8)
    check(ops["mhc_pre"], streams(2, dtype))


def test_more_streams_than_fit_are_refused():
    with liger_core.use("triton-ascend"), pytest.raises(liger_core.Unsupported, match="17 streams are more than 16"):
        liger_core.mhc_pre(**streams(17))


def test_a_float32_gradient_of_experts_is_a_sum_of_sums():
    """Over some slots each."""
    arguments, incoming, (least, most) = with_one_large_term(DEVICE)
    op, lane = ops["fused_moe"], "interpreted" if INTERPRETED else "passed"
    with only(Target(op, "triton-ascend", DEVICE, backend, lane)):
        actual = evaluate(op, op, arguments, ("down_weight",), incoming)
    grad = actual.gradients["down_weight"]
    assert grad is not None
    assert least <= grad.item() <= most


SIZE = (1 << 31) - 1
X = torch.zeros(1)
LONG = (
    (_linear._scale, (X, X, torch.full((), 2.0), SIZE), {"IN_PLACE": True}),
    (swiglu._forward, (X, X, X, 1, SIZE, SIZE, SIZE, 1.0, 1.0), {"ROWS": 1}),
    (swiglu._backward, (X, X, X, X, X, 1, SIZE, SIZE, SIZE, SIZE, 1.0, 1.0), {"ROWS": 1}),
    (geglu._forward, (X, X, X, 1, SIZE, SIZE, SIZE), {"ROWS": 1}),
    (geglu._backward, (X, X, X, X, X, 1, SIZE, SIZE, SIZE, SIZE), {"ROWS": 1}),
    (kl_div._forward, (None, X, X, X, 1, SIZE, SIZE, SIZE, 0.0), {"LOG_TARGET": True, "ROWS": 1}),
    (kl_div._backward, (X, X, X, 1, SIZE, SIZE, SIZE), {"LOG_TARGET": True, "PER_ELEMENT": True, "ROWS": 1}),
    (
        jsd._run,
        (X, None, None, X, X, None, 1, SIZE, SIZE, SIZE, -100, 0.3, 0.7),
        {"FORWARD": False, "REVERSE": False, "HALF": False, "ROWS": 1},
    ),
)


@pytest.mark.skipif(not INTERPRETED, reason="needs an interpreter's check of bounds")
@pytest.mark.parametrize(
    ("kernel", "arguments", "constants"), LONG, ids=[f"{k.fn.__module__}.{k.fn.__name__}" for k, _, _ in LONG]
)
def test_a_size_near_the_end_of_32_bits_has_blocks(kernel, arguments, constants):
    """The first of them lies outside of what is passed here."""
    with pytest.raises(OutOfBounds, match="load outside of every tensor"):
        kernel[(1,)](*arguments, **constants, BLOCK=1024)
