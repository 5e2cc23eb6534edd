"""Cases that depend on how this package divides an op's work into programs, and that the suite's sizes don't reach."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_core
from liger_conformance.case import Make
from liger_conformance.cases.attn_res import build as build_attn_res
from liger_conformance.cases.fused_linear_logit_statistics import build as build_linear_statistics
from liger_conformance.cases.fused_moe import build as build_fused_moe
from liger_conformance.cases.fused_moe import with_one_large_term
from liger_conformance.cases.group_norm import build as build_group_norm
from liger_conformance.cases.grpo_loss import build as build_grpo_loss
from liger_conformance.cases.jsd import build as build_jsd
from liger_conformance.cases.kl_div import build as build_kl_div
from liger_conformance.cases.logit_statistics import ALL
from liger_conformance.cases.logit_statistics import build as build_logit_statistics
from liger_conformance.cases.mhc_pre import build as build_mhc_pre
from liger_conformance.compare import compare
from liger_conformance.evaluate import baseline_and_truth, evaluate
from liger_conformance.rounding import Samples
from liger_conformance.traces import LAYOUTS, check_memory_of_gradients
from liger_core.contract import Op, ops
from liger_core.host.cross_entropy import CrossEntropyKernelOptions, CrossEntropyResults
from liger_core.host.cross_entropy import inputs_of as inputs_of_classes
from liger_core.host.fused_moe import route
from liger_core.host.logit_statistics import inputs_of, options_of
from liger_triton.ops import (
    _cross_entropy,
    _divergences,
    _heads,
    _logit_statistics,
    _sums,
    attn_res,
    fused_moe,
    mhc_pre,
    rope,
)
from liger_triton.ops._linear import LINEAR

DEVICE = liger_core.infer_device()

Build = Callable[[Make], dict[str, Any]]


def norm(rows: int, columns: int) -> Build:
    return lambda make: {"x": make.randn(rows, columns), "weight": make.randn(columns)}


def fused_norm(rows: int, columns: int) -> Build:
    return lambda make: {**norm(rows, columns)(make), "residual": make.randn(rows, columns)}


def halves(rows: int, columns: int) -> Build:
    return lambda make: dict(zip(("gate", "up"), make.randn(rows, 2 * columns).chunk(2, -1), strict=True))


def look_up(indices: Callable[[Make], torch.Tensor], vocabulary: int = 40, **options: Any) -> Build:
    return lambda make: {"indices": indices(make), "weight": make.randn(vocabulary, 9), **options}


def heads(q_heads: int, k_heads: int, size: int, columns: int, samples: int = 2) -> Build:
    return lambda make: {
        "q": make.randn(samples, 3, q_heads, size).transpose(1, 2),
        "k": make.randn(samples, 3, k_heads, size).transpose(1, 2),
        "cos": make.randn(1, 3, columns),
        "sin": make.randn(1, 3, columns),
    }


def unlike(make: Make) -> dict[str, Any]:
    """A token's heads lie together in q, and apart in k."""
    return {**heads(4, 2, 16, 16)(make), "k": make.randn(2, 2, 3, 16)}


def sequence_first(make: Make) -> dict[str, Any]:
    """Batches inside the sequence, as Megatron lays them out."""
    return {
        "q": make.randn(3, 2, 4, 16).permute(1, 2, 0, 3),
        "k": make.randn(3, 2, 2, 16).permute(1, 2, 0, 3),
        "cos": make.randn(2, 3, 16),
        "sin": make.randn(2, 3, 16),
    }


def pairs(q_heads: int, k_heads: int, size: int) -> Build:
    return lambda make: {
        "q": make.randn(2, 3, q_heads, size),
        "k": make.randn(2, 3, k_heads, size),
        "freqs_cis": make.randn(3, size // 2, 2),
    }


def planes(q_heads: int, k_heads: int, sections: tuple[int, int, int]) -> Build:
    size = 2 * sum(sections)
    return lambda make: {
        "q": make.randn(2, 3, q_heads, size).transpose(1, 2),
        "k": make.randn(2, 3, k_heads, size).transpose(1, 2),
        "cos": make.randn(3, 1, 3, size),
        "sin": make.randn(3, 1, 3, size),
        "mrope_section": sections,
    }


def window(length: int, head: int, kernel_size: int, dilation: int = 1) -> Build:
    return lambda make: {
        **{name: make.randn(1, length, 2, head).transpose(1, 2) for name in ("q", "k", "v")},
        "kernel_size": kernel_size,
        "dilation": dilation,
    }


def one_group(make: Make) -> dict[str, Any]:
    """Rows whose support lies in neighbouring columns."""
    x = make.randn(3, 3000)
    x[:, 64:72] += 6
    return {"x": x}


def grpo(batch: int, length: int, vocabulary: int, **options: Any) -> Build:
    return lambda make: build_grpo_loss(make, batch=batch, length=length, vocabulary=vocabulary, **options)


def divergence(rows: int, vocabulary: int, **options: Any) -> Build:
    return lambda make: build_jsd(make, rows=rows, vocabulary=vocabulary, **options)


def kl_divergence(rows: int, vocabulary: int) -> Build:
    return lambda make: build_kl_div(make, rows=rows, vocabulary=vocabulary)


def groups(samples: int, channels: int, length: int, num_groups: int) -> Build:
    sizes = {"samples": samples, "channels": channels, "spatial": (length,), "num_groups": num_groups}
    return lambda make: build_group_norm(make, **sizes)


BY_SEQUENCE = {"importance_sampling_level": "sequence"}


def skewed(make: Make) -> torch.Tensor:
    """2600 indices below 40, of which a fifth are 0, as the most frequent tokens of a text are."""
    return (make.uniform(2600, dtype=torch.float32) ** 4 * 40).long()


def statistics(rows: int, vocabulary: int, **options: Any) -> Build:
    return lambda make: build_logit_statistics(make, rows=rows, vocabulary=vocabulary, **options)


CASES: tuple[tuple[str, str, Build], ...] = (
    ("rms_norm", "several tiles of rows a program", norm(2100, 40)),
    ("rms_norm", "several rows a program", norm(11, 4000)),
    ("rms_norm", "the longest fused backward", norm(3, 16384)),
    ("rms_norm", "a backward of two kernels", norm(70, 16385)),
    ("rms_norm", "a forward that reads twice", norm(2, 32769)),
    ("fused_add_rms_norm", "several tiles of rows a program", fused_norm(2100, 40)),
    ("fused_add_rms_norm", "a forward that reads twice", fused_norm(3, 33000)),
    ("softmax", "rows that fill their tiles, several a program", lambda make: {"x": make.randn(8, 1024)}),
    ("softmax", "a row that fills its tile, of 64 columns a thread", lambda make: {"x": make.randn(3, 16384)}),
    ("softmax", "a long row in pairs", lambda make: {"x": make.randn(5, 20000)}),
    ("softmax", "a long row in pairs, far from 0", lambda make: {"x": make.randn(2, 20000) - 3e5}),
    ("softmax", "a long row in pairs, beyond 2^20", lambda make: {"x": make.randn(2, 20000) * 3e7}),
    ("softmax", "a long row in no pairs", lambda make: {"x": make.randn(2, 20001)}),
    ("softmax", "the longest row in registers", lambda make: {"x": make.randn(2, 32768)}),
    ("softmax", "the longest row in pairs", lambda make: {"x": make.randn(2, 65536)}),
    ("softmax", "a row read twice", lambda make: {"x": make.randn(2, 65552) * 4}),
    ("swiglu", "several blocks a row", halves(3, 2500)),
    ("rope", "more heads than a block", heads(300, 1, 16, 16)),
    ("rope", "more heads than a block, of which a part is rotated", heads(1, 300, 24, 16)),
    ("rope", "blocks of heads of q, of both, and of k", heads(50, 100, 16, 16)),
    ("rope", "a launch for each of q and k", unlike),
    ("rope", "more samples than an axis of the grid has", heads(4, 2, 16, 16, samples=3)),
    ("rope", "a layout that the output doesn't keep", sequence_first),
    ("embedding", "one run over many chunks", look_up(lambda make: make.integers(3, 4, 2600))),
    ("embedding", "runs longer than a chunk", look_up(skewed)),
    ("embedding", "a long run of padding", look_up(skewed, padding_idx=0)),
    ("embedding", "chunks without a run", look_up(lambda make: make.integers(0, 2600, 2600), vocabulary=2600)),
    ("embedding", "runs that are sorted by torch", look_up(lambda make: make.integers(0, 40, 4100))),
    ("embedding", "no run among several rows", look_up(lambda make: make.integers(3, 70, 50), vocabulary=99)),
    ("group_norm", "groups that are read twice", groups(2, 6, 3001, 2)),
    ("group_norm", "groups of several tiles of channels", groups(2, 80, 300, 2)),
    ("group_norm", "a group in parts", groups(1, 5, 14001, 1)),
    ("jsd", "several whole tiles a program", divergence(8, 512)),
    ("jsd", "several whole tiles a program, another beta", divergence(8, 512, beta=0.3)),
    ("jsd", "several tiles a program", divergence(7, 500)),
    ("jsd", "several tiles a program, rows of them", divergence(7, 512, ignored=0.3)),
    ("kl_div", "several tiles a program", kl_divergence(7, 500)),
    ("llama4_rope", "more heads than a block", pairs(300, 1, 16)),
    ("llama4_rope", "a head larger than a block", pairs(2, 1, 1100)),
    ("qwen2vl_mrope", "more heads than a block", planes(300, 1, (2, 3, 3))),
    ("qwen2vl_mrope", "a head larger than a block", planes(2, 1, (200, 100, 300))),
    ("sparsemax", "support in one group of columns", one_group),
    ("sparsemax", "a row in pairs, of large support", lambda make: {"x": make.randn(2, 5008) * 0.05}),
    ("sparsemax", "the longest row in registers", lambda make: {"x": make.randn(2, 16384)}),
    ("sparsemax", "the longest row in pairs", lambda make: {"x": make.randn(2, 65536)}),
    ("sparsemax", "a row read twice", lambda make: {"x": make.randn(2, 16400)}),
    ("sparsemax", "a row read twice, not aligned", lambda make: {"x": make.randn(2, 20001)}),
    ("sparsemax", "a row read again, for its large support", lambda make: {"x": make.randn(2, 17000) * 0.05}),
    ("sparsemax", "a backward that reads twice", lambda make: {"x": make.randn(2, 32800)}),
    ("fused_neighborhood_attention", "several blocks of residues", window(150, 16, 7, 2)),
    ("fused_neighborhood_attention", "the widest window in a block", window(150, 16, 17)),
    ("fused_neighborhood_attention", "the widest window in a forward's block", window(150, 16, 33)),
    ("fused_neighborhood_attention", "a window of several blocks", window(300, 16, 201)),
    ("fused_neighborhood_attention", "a dilated window of several blocks", window(300, 16, 101, 2)),
    ("fused_neighborhood_attention", "columns in parts", window(40, 300, 5)),
    ("fused_neighborhood_attention", "columns in parts, a window of several blocks", window(70, 300, 61)),
    ("logit_statistics", "several blocks a row", statistics(2, 18001, return_entropy=True, return_best=True)),
    ("logit_statistics", "more targets than are looked up at once", statistics(3, 300, each=200, ignored=0.3)),
    ("grpo_loss", "several blocks a row", grpo(2, 12, 18001, reduction="none")),
    ("grpo_loss", "several blocks an aligned row", grpo(2, 12, 18032, temperature=0.8, reduction="none")),
    ("grpo_loss", "several tiles of short rows", grpo(7, 5, 9, masked=0.3)),
    ("grpo_loss", "several tiles of short rows, not reduced", grpo(7, 5, 9, masked=0.3, reduction="none")),
    ("grpo_loss", "several tiles a row", grpo(2, 75, 9, masked=0.3, loss_type="dapo")),
    ("grpo_loss", "several tiles a row of one ratio", grpo(3, 75, 9, masked=0.3, reduction="none", **BY_SEQUENCE)),
    (
        "grpo_loss",
        "several tiles a row of one ratio, luspo",
        grpo(7, 40, 9, masked=0.3, loss_type="luspo", **BY_SEQUENCE),
    ),
)


# In an interpreter, which takes seconds for some of these works, float32 is tested under -m slow.
FLOAT32 = pytest.param(torch.float32, marks=[pytest.mark.slow] * (DEVICE == "cpu"))


def check(op: Op[..., Any], arguments: dict[str, Any], wanted: tuple[str, ...] | None = None) -> None:
    """The values and gradients obey the suite's rule."""
    baseline, truth = baseline_and_truth(op, arguments, wanted)
    with liger_core.use("triton"):
        actual = evaluate(op, op, arguments, wanted)
    samples = Samples(op, arguments, wanted)
    for what, value in actual.items().items():
        compare(what, value, baseline.items()[what], truth.items()[what], samples)


@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "work", "build"), CASES, ids=[f"{name}-{work}" for name, work, _ in CASES])
def test_values(name: str, work: str, build: Build, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of dividing the work gives the right values and gradients."""
    op = ops[name]
    # A single multiprocessor, so that a program of a few rows has several of them.
    monkeypatch.setattr("liger_triton.ops.rms_norm.sm_count", lambda device: 1)
    monkeypatch.setattr("liger_triton.ops.rms_norm.shared_memory", lambda device: 227 << 10)
    monkeypatch.setattr("liger_triton.ops._divergences.sm_count", lambda device: 1)
    monkeypatch.setattr("liger_triton.ops._divergences.PROGRAMS", 1)
    monkeypatch.setattr("liger_triton.ops._heads.MOST_BATCHES", 2)
    monkeypatch.setattr("liger_triton.ops.embedding.MOST_RANKED", 4096)
    monkeypatch.setattr("liger_triton.ops.grpo_loss.TILE", 32)  # tokens, so that a few rows are several tiles
    arguments = build(Make(dtype, DEVICE))
    check(op, arguments)


@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [None, ("x", "expert_weights"), ("down_weight",)], ids=str)
def test_products_by_pytorch(
    wanted: tuple[str, ...] | None, router: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that are taken on Hopper, with experts and tokens that have nothing: the right values and gradients."""
    taken = []
    multiply = fused_moe._multiply
    monkeypatch.setattr(fused_moe, "is_hopper", lambda device: True)
    monkeypatch.setattr(fused_moe, "_multiply", lambda *operands: (taken.append(operands), multiply(*operands))[1])
    arguments = build_fused_moe(
        Make(torch.bfloat16, DEVICE),
        tokens=40, per_token=3, experts=5, hidden=32, intermediate=16, used=4, dropped=0.3, router_dtype=router,
    )  # fmt: skip
    arguments["expert_indices"][3] = -1
    op = ops["fused_moe"]
    check(op, arguments, wanted)
    products = {None: 5, ("down_weight",): 2}.get(wanted, 3)
    # A float32 router's gradient is made of a product that is not rounded.
    assert len(taken) == products - (router is torch.float32 and wanted != ("down_weight",))


@pytest.mark.parametrize("streams", [2, 4])  # tiles of 16 and 32 rows of weight
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_hyper_connections_on_hopper(parameters: torch.dtype, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of rows and two of columns, the second of each not full: the right values and gradients."""
    monkeypatch.setattr(mhc_pre, "is_hopper", lambda device: True)
    monkeypatch.setattr(mhc_pre, "PRODUCT_ROWS", None)  # the other tile's: no launch could take it
    arguments = build_mhc_pre(
        Make(torch.bfloat16, DEVICE),
        rows=70,
        streams=streams,
        width=192 // streams,
        iterations=2,
        parameters=parameters,
    )
    check(ops["mhc_pre"], arguments)


@pytest.mark.parametrize(("stride", "fits"), [((64, 1), True), ((1, 64), True), ((60, 1), False), ((64, 2), False)])
def test_products_by_pytorch_take_rows_of_whole_vectors(
    stride: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_moe, "is_hopper", lambda device: True)
    memory = torch.zeros(8192, dtype=torch.bfloat16)
    assert fused_moe._grouped(16, memory.as_strided((16, 16), stride)) == fits
    assert not fused_moe._grouped(9, memory.as_strided((16, 16), (64, 1)))  # the result's
    assert not fused_moe._grouped(16, memory.as_strided((16, 18), (0, 1)))  # its gathered rows
    assert not fused_moe._grouped(16, memory[1:].as_strided((16, 16), (64, 1)))
    assert not fused_moe._grouped(16, memory.half().as_strided((16, 16), (64, 1)))


def test_products_by_pytorch_in_a_trace_take_operands_that_start_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo doesn't know where a tensor starts."""
    monkeypatch.setattr(fused_moe, "is_hopper", lambda device: True)
    monkeypatch.setattr(fused_moe.torch_state, "compiling", lambda: True)
    left, right = torch.randn(4, 16), torch.randn(2, 16, 8)
    starts, memory = torch.tensor([0, 3, 4]), torch.zeros(99, dtype=torch.bfloat16)
    elsewhere = memory[3:].as_strided((4, 16), (24, 1)).copy_(left)
    assert fused_moe._grouped(8, elsewhere)
    copy = fused_moe._at_16_bytes(elsewhere)
    assert copy.stride() == (24, 1)
    assert copy.data_ptr() % 16 == 0
    assert fused_moe._at_16_bytes(copy) is copy
    product = fused_moe._grouped_product(elsewhere, right.bfloat16(), starts)
    expected = torch.cat(
        (elsewhere[:3].float() @ right[0].bfloat16().float(), elsewhere[3:].float() @ right[1].bfloat16().float())
    )
    torch.testing.assert_close(product.float(), expected, rtol=1e-2, atol=1e-2)


STATISTICS: dict[str, dict[str, Any]] = {
    "plain": {"rows": 37, "vocabulary": 45},
    "several-tiles": {"rows": 130, "vocabulary": 300, "ignored": 0.2, "elsewhere": 0.2, "first": 5},
    "all": {
        "rows": 29,
        "vocabulary": 700,
        "bias": True,
        "temperature": 0.7,
        **ALL,
    },
    "several-targets": {"rows": 131, "vocabulary": 260, "each": 3, "ignored": 0.5, "temperature": 1.5, **ALL},
    "forbidden": {"rows": 25, "vocabulary": 129, "bias": True, "forbidden": True, "return_entropy": True},
    "tempered": {"rows": 131, "vocabulary": 4200, "bias": True, "ignored": 0.2, "temperature": 0.5, "first": 3},
    "few-columns": {"rows": 33, "vocabulary": 9, **ALL},
}


@pytest.mark.parametrize(
    ("dtype", "fit"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
    ids=["bfloat16", "float16", "that-fit"],
)
@pytest.mark.parametrize("options", STATISTICS.values(), ids=STATISTICS.keys())
@pytest.mark.parametrize("wanted", [None, (), ("x",)], ids=["gradients", "no-gradient", "frozen"])
def test_statistics_of_logits_that_are_not_held(
    wanted: tuple[str, ...] | None,
    options: dict[str, Any],
    dtype: torch.dtype,
    fit: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel that multiplies a tile of logits, which is taken on Hopper: the right values and gradients."""
    taken, normalised, logits = [], [], []
    original = LINEAR.logits
    monkeypatch.setattr(LINEAR, "logits", lambda *of, **how: (logits.append(of), original(*of, **how))[1])
    product, normalise = _logit_statistics.KERNELS.product, _logit_statistics.KERNELS.normalise
    monkeypatch.setattr(_logit_statistics, "is_hopper", lambda device: True)
    monkeypatch.setattr(_logit_statistics, "LEAST_ROWS", 1)
    monkeypatch.setattr(_logit_statistics.KERNELS, "product", lambda *of: (taken.append(of), product(*of))[1])
    monkeypatch.setattr(_logit_statistics.KERNELS, "normalise", lambda *of: (normalised.append(of), normalise(*of))[1])
    # Less memory than all logits take, or their terms, which would be kept; or so much.
    monkeypatch.setattr("liger_core.host.fused_linear_logit_statistics.LEAST_TILE", 1024 if fit else 1)
    if not fit:
        monkeypatch.setattr(_logit_statistics.KERNELS, "rows_of_terms", lambda *of: 0)
    arguments = build_linear_statistics(Make(dtype, DEVICE), hidden=72, **options)
    op = ops["fused_linear_logit_statistics"]
    check(op, arguments, wanted)
    several = options.get("each") or options.get("return_entropy") or options.get("return_total")
    assert bool(taken) == (not fit or not (several or options.get("bias")))
    assert bool(normalised) == (bool(taken) and not several and wanted is None and fit)
    if fit and taken:
        assert not logits


def test_terms_are_kept_where_logits_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the weight has room for terms, not for logits. A second backward makes some logits at a time."""
    logits = []
    original = LINEAR.logits
    monkeypatch.setattr(LINEAR, "logits", lambda *of, **how: (logits.append(of), original(*of, **how))[1])
    monkeypatch.setattr(_logit_statistics, "is_hopper", lambda device: True)
    monkeypatch.setattr(_logit_statistics, "LEAST_ROWS", 1)
    monkeypatch.setattr("liger_core.host.fused_linear_logit_statistics.LEAST_TILE", 1)
    arguments = build_linear_statistics(Make(torch.bfloat16, DEVICE), rows=130, hidden=256, vocabulary=300, ignored=0.2)
    check(ops["fused_linear_logit_statistics"], arguments)
    assert not logits
    leaves = [arguments[name].requires_grad_() for name in ("x", "linear_weight")]
    with liger_core.use("triton"):
        lse = liger_core.fused_linear_logit_statistics(**arguments).lse.sum()
    first, again = (torch.autograd.grad(lse, leaves, retain_graph=True) for _ in range(2))
    assert len(logits) > 1
    assert all(x.shape[0] < 130 or weight.shape[0] < 300 for x, weight, _ in logits)
    for one, other in zip(first, again, strict=True):
        assert (one.float() - other.float()).norm() < 0.01 * one.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("forbidden", [False, True], ids=["sampled", "no-sample"])
def test_terms_of_a_frozen_head_do_not_depend_on_the_sample(
    forbidden: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits far above all sampled ones, in some rows; or all of these −inf, so that no row has a base."""
    scales = []
    product = _logit_statistics.KERNELS.product
    monkeypatch.setattr(_logit_statistics, "is_hopper", lambda device: True)
    monkeypatch.setattr(_logit_statistics, "LEAST_ROWS", 1)
    monkeypatch.setattr(_logit_statistics.KERNELS, "product", lambda *of: (product(*of), scales.append(of[-1]))[0])
    # Less memory than all logits take.
    monkeypatch.setattr("liger_core.host.fused_linear_logit_statistics.LEAST_TILE", 1)
    rows = 100
    arguments = build_linear_statistics(
        Make(dtype, DEVICE),
        rows=rows,
        hidden=72,
        vocabulary=700,
        scale=4.0,
        bias=forbidden,
        ignored=0.2,
        temperature=0.7,
    )
    x, weight, target, bias = (arguments[name] for name in ("x", "linear_weight", "target", "bias"))
    row = torch.arange(rows, device=DEVICE)
    far, ignored = row % 3 == 0, target == -100
    weight[:, 0], x[:, 0] = 0.0, 0.0
    # A column of each part, no multiple of the sample's step, 8: 64 above the rest and slightly less, or 200 in some rows.
    # Some of such parts are then relative to the base, and some are not. Weights of usual size give gradients of usual size.
    high = torch.arange(3, 700, 128, device=DEVICE)
    weight[high, 0] = torch.linspace(0.1, 0.125, len(high), device=DEVICE).to(dtype)
    x[far, 0] = 512.0
    x[far & (row % 4 == 0), 0] = 1600.0
    target[far & (row % 2 == 0) & ~ignored] = high[-1]
    if forbidden:
        bias[::8] = -torch.inf
        target[(target % 8 == 0) & ~ignored] += 1
    assert ignored.any()
    check(ops["fused_linear_logit_statistics"], arguments, ("x",))
    own = far | (dtype is torch.float16) | forbidden
    assert len(scales) > 1
    scale = scales[-1]  # each call writes its rows of one tensor
    assert torch.equal(scale == 0.0, ignored)
    assert torch.equal((scale == 1.0)[~ignored], own[~ignored])


def test_an_ignored_row_of_nan_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logit_statistics, "is_hopper", lambda device: True)
    monkeypatch.setattr(_logit_statistics, "LEAST_ROWS", 1)
    arguments = build_linear_statistics(Make(torch.bfloat16, DEVICE), rows=3, hidden=72, vocabulary=300)
    arguments["target"][1] = -100
    x = arguments["x"]
    x[1:] = torch.nan
    x.requires_grad_()
    with liger_core.use("triton"):
        liger_core.fused_linear_logit_statistics(**arguments).lse.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad[0]).all()
    assert x.grad[0].any()
    assert torch.equal(x.grad[1], torch.zeros_like(x.grad[1]))
    assert torch.isnan(x.grad[2]).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_probability_of_a_target_is_above_1(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target's logit is added up once more, in another order than the row's maximum, which here is the same logit."""
    monkeypatch.setattr(_logit_statistics, "is_hopper", lambda device: True)
    monkeypatch.setattr(_logit_statistics, "LEAST_ROWS", 1)
    weight = Make(torch.bfloat16, DEVICE).randn(60, 1000)
    target = torch.arange(60, device=DEVICE)
    with liger_core.use("triton"):
        lse, picked, *_ = liger_core.fused_linear_logit_statistics(weight, weight, target, temperature=temperature)
    assert (lse >= picked).all()
    assert (lse - picked < 1e-3).all()


@pytest.mark.parametrize(("stride", "fits"), [((64, 1), True), ((1, 64), False), ((60, 1), False), ((0, 1), False)])
def test_statistics_of_logits_that_are_not_held_take_rows_that_tma_loads(
    stride: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_logit_statistics, "is_hopper", lambda device: True)
    x, weight = torch.zeros(1 << 16, dtype=torch.bfloat16).as_strided((600, 16), stride), torch.zeros(9, 16).bfloat16()

    def taken(
        x: torch.Tensor,
        weight: torch.Tensor,
        most: int = 600,
        targets: int = 1,
        softcap: float | None = None,
        class_weight: torch.Tensor | None = None,
    ) -> bool:
        returned = dict.fromkeys(("return_entropy", "return_log_sum_squares", "return_best"), False)
        options = options_of(
            first=0,
            ignore_index=-100,
            softcap=softcap,
            temperature=1.0,
            return_total=class_weight is not None,
            **returned,
        )
        inputs = inputs_of(torch.zeros(600, targets).long(), class_weight, None, options)
        return bool(_logit_statistics.KERNELS.rows_of_product(x, weight, inputs, most))

    assert taken(x, weight) == fits
    assert not taken(x.float(), weight.float())
    assert not taken(x, weight[:, 1:])
    assert not taken(x, weight, most=1)
    assert not taken(x, weight, targets=_logit_statistics.FEW_TARGETS + 1)
    assert not taken(x, weight, softcap=30.0)
    assert not taken(x, weight, class_weight=torch.ones(9))
    assert not taken(x[:100], weight)


@pytest.mark.parametrize(("tokens", "per_token", "experts"), [(700, 2, 5), (9, 1, 1), (130, 3, 70)])
@pytest.mark.parametrize("counts", [True, False])
def test_slots_are_sorted_as_pytorch_sorts_them(
    tokens: int, per_token: int, experts: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting, and by PyTorch itself where there are too many; with slots that have no expert, or one out of range."""
    if not counts:
        monkeypatch.setattr(fused_moe, "MOST_BLOCKS", 0)
    make = Make(torch.float32, DEVICE)
    indices = make.integers(-1, experts, tokens, per_token)
    indices[1] = experts
    routing, expected = fused_moe.TritonMoE().route(indices, experts, 16), route(indices, experts, 16)
    for name in ("keys", "order", "places", "starts", "by_size", "tile_experts"):
        assert torch.equal(getattr(routing, name).long(), getattr(expected, name)), name
    live = expected.tile_experts < experts
    assert torch.equal(routing.tile_starts[live], expected.tile_starts[live])


def test_a_float32_gradient_of_experts_is_a_sum_of_sums() -> None:
    """Over some slots each."""
    arguments, incoming, (least, most) = with_one_large_term(DEVICE)
    op = ops["fused_moe"]
    with liger_core.use("triton"):
        actual = evaluate(op, op, arguments, ("down_weight",), incoming)
    grad = actual.gradients["down_weight"]
    assert grad is not None
    assert least <= grad.item() <= most


@pytest.mark.parametrize("hidden", [40, 8200], ids=["held", "long"])
@pytest.mark.parametrize("wanted", [None, ("blocks",), ("partial",)], ids=["all", "blocks", "partial"])
def test_sources_of_two_tensors(hidden: int, wanted: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a load of each, as on AMD: the right values and gradients."""
    monkeypatch.setattr(attn_res, "_chooses", lambda: False)
    check(ops["attn_res"], build_attn_res(Make(torch.bfloat16, DEVICE), rows=3, hidden=hidden, count=2), wanted)


def test_sums_of_many_equal_values() -> None:
    """All are rounded alike: of 2²⁰ of them, a running sum of each 2048th would be off by 20 units of rounding."""
    value = torch.tensor(0.7, device=DEVICE)
    n, unit = 1 << 20, 2.0**-23
    exact = n * value.double().item()
    values, labels = value.expand(n).contiguous(), torch.zeros(n, dtype=torch.int64, device=DEVICE)
    divergence = _divergences.total(values, None, 1)
    assert abs(divergence.item() - exact) <= 2 * unit * exact
    loss, z_loss = torch.empty((), device=DEVICE), torch.empty((), device=DEVICE)
    weight = value.expand(2).contiguous()
    inputs = inputs_of_classes(
        labels, weight, None, 2, CrossEntropyKernelOptions(-100, None, None, None, "mean", True, False, False)
    )
    totals = torch.empty(2, device=DEVICE)
    _cross_entropy.KERNELS.sums(
        loss, z_loss, None, totals, CrossEntropyResults(values, values, None, None, None), inputs
    )
    assert abs(z_loss.item() - value.item()) <= 2 * unit * value.item()
    assert abs(loss.item() - 1.7) <= 4 * unit
    assert abs(totals[1].item() - exact) <= 2 * unit * exact
    # Rows are one more than whole blocks of 128, scalars one more than a block of 4096.
    rows, scalars = n // 8 - 1023, 4097
    first, second, third = _sums.totals(values, rows, 4, values[:4], values[:4], values[:1], scalars)
    several = _sums.total(values[: rows * 8].view(rows, 8), values[:8])
    for total, number in ((first, rows), (second, rows), (third, scalars), (several, rows)):
        assert total is not None
        exact = number * value.double().item()
        # NumPy, which interprets, adds up the last 128 numbers one after another.
        assert (total.double() - exact).abs().max() <= min(16 * unit, 0.25 / number) * exact


@pytest.mark.parametrize("columns", [17, 64, 100, 768, 1408, 2500, 5632, 11008, 14336])
def test_halves_of_rows_fill_their_tiles(columns: int) -> None:
    """Gate and up that are the halves of rows leave few lanes idle, and each row is in one tile."""
    from liger_triton.ops._rows import divide

    rows = 4096
    tile_rows, block, blocks, programs = divide(rows, columns)
    assert blocks * block >= columns
    assert programs * tile_rows >= rows * blocks
    used = rows * columns / (programs * tile_rows * block)
    assert used >= (8 / 9 if columns >= 64 else 0.5), f"{used:.0%} of the lanes are used at {columns} columns"


def test_halves_at_model_sizes_take_a_row_at_a_time() -> None:
    from liger_triton.ops._rows import divide

    for columns in (5632, 11008, 14336, 28672):
        assert divide(4096, columns)[:2] == (1, 1024)
    assert divide(1, 615)[:2] == (1, 1024), "contiguous tensors are one long row"


@pytest.mark.parametrize("of_k", LAYOUTS)
@pytest.mark.parametrize("of_q", LAYOUTS)
def test_gradients_whose_strides_a_trace_does_not_know(of_q: str, of_k: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory_of_gradients(rope, DEVICE, of_q, of_k, lambda: monkeypatch.setattr(_heads, "compiling", lambda: True))
