"""Cases that depend on how this package divides an op's work into tiles, and that the suite's sizes don't reach."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import Make, cases_of
from liger_conformance.cases.fused_moe import with_one_large_term
from liger_conformance.compare import compare
from liger_conformance.evaluate import baseline_and_truth, complete, evaluate, incoming_for, name_results
from liger_conformance.rounding import Samples
from liger_conformance.route import only
from liger_conformance.target import Target
from liger_conformance.traces import LAYOUTS, check_memory_of_gradients
from liger_core.contract import ops
from liger_core.host.cross_entropy import CrossEntropyKernelOptions, CrossEntropyResults, inputs_of
from liger_cutile import backend
from liger_cutile.ops import _cross_entropy, _divergences, _heads, _launch, _sums, embedding, mhc_pre, rope

DEVICE = liger_core.infer_device()
if why := backend.missing(DEVICE):
    pytest.skip(why, allow_module_level=True)
INTERPRETED = interpreters.interprets(backend, DEVICE)
if INTERPRETED:
    interpreters.repair(backend)

Build = Callable[[Make], dict[str, Any]]


def norm(rows: int, columns: int) -> Build:
    return lambda make: {"x": make.randn(rows, columns), "weight": make.randn(columns)}


def fused_norm(rows: int, columns: int) -> Build:
    return lambda make: {**norm(rows, columns)(make), "residual": make.randn(rows, columns)}


def layer(rows: int, columns: int, mean: float = 0.0) -> Build:
    return lambda make: {
        "x": make.randn(rows, columns) + mean,
        "weight": make.randn(columns),
        "bias": make.randn(columns),
    }


def polynomial(rows: int, columns: int) -> Build:
    return lambda make: {"x": make.randn(rows, columns), "weight": make.randn(3), "bias": make.randn(1)}


def groups(
    samples: int, channels: int, length: int, num_groups: int, *, mean: float = 0.0, weight: bool = True
) -> Build:
    return lambda make: {
        "x": make.randn(samples, channels, length) + mean,
        "num_groups": num_groups,
        "weight": make.randn(channels) if weight else None,
        "bias": make.randn(channels) if weight else None,
    }


def tanh(rows: int, columns: int) -> Build:
    return lambda make: {
        "x": make.randn(rows, columns),
        "alpha": make.uniform(1) + 0.5,
        "gamma": make.randn(columns),
        "beta": make.randn(columns),
    }


def gates(*shape: int) -> Build:
    return lambda make: {"gate": make.randn(*shape), "up": make.randn(*shape)}


def halves(rows: int, columns: int) -> Build:
    return lambda make: dict(zip(("gate", "up"), make.randn(rows, 2 * columns).chunk(2, -1), strict=True))


def attention(length: int, **options: int) -> Build:
    return lambda make: {name: make.randn(1, 1, length, 24) for name in "qkv"} | options


def look_up(indices: Callable[[Make], torch.Tensor], *, vocabulary: int = 40, **options: Any) -> Build:
    return lambda make: {"indices": indices(make), "weight": make.randn(vocabulary, 9), **options}


def skewed(make: Make) -> torch.Tensor:
    """2600 indices below 40, of which a fifth are 0, as the most frequent tokens of a text are."""
    return (make.uniform(2600, dtype=torch.float32) ** 4 * 40).long()


def heads(q_heads: int, k_heads: int, size: int, columns: int, length: int = 3) -> Build:
    return lambda make: {
        "q": make.randn(2, length, q_heads, size).transpose(1, 2),
        "k": make.randn(2, length, k_heads, size).transpose(1, 2),
        "cos": make.randn(1, length, columns),
        "sin": make.randn(1, length, columns),
    }


def parts_of_ties(make: Make) -> dict[str, Any]:
    """Ties within a lane, also with tau, and a row without anything finite."""
    x = (make.randn(4, 8192) * 2).round() / 4
    x[0] = -torch.inf
    x[1, 8:] = -torch.inf
    x[2, 1024::1024] = x[2, 0] = 9.0
    return {"x": x}


def sequence_first(make: Make) -> dict[str, Any]:
    """Batches inside the sequence, as Megatron lays them out."""
    return {
        "q": make.randn(3, 2, 4, 16).permute(1, 2, 0, 3),
        "k": make.randn(3, 2, 2, 16).permute(1, 2, 0, 3),
        "cos": make.randn(2, 3, 16),
        "sin": make.randn(2, 3, 16),
    }


def pairs(q_heads: int, k_heads: int, size: int, length: int = 3) -> Build:
    return lambda make: {
        "q": make.randn(2, length, q_heads, size),
        "k": make.randn(2, length, k_heads, size),
        "freqs_cis": make.randn(length, size // 2, 2),
    }


def planes(q_heads: int, k_heads: int, sections: tuple[int, int, int], length: int = 3) -> Build:
    size = 2 * sum(sections)
    return lambda make: {
        "q": make.randn(2, length, q_heads, size).transpose(1, 2),
        "k": make.randn(2, length, k_heads, size).transpose(1, 2),
        "cos": make.randn(3, 1, length, size),
        "sin": make.randn(3, 1, length, size),
        "mrope_section": sections,
    }


def tables(make: Make) -> dict[str, Any]:
    """q and k of one sample, and tables for it."""
    return {
        "q": make.randn(1, 2, 2, 16),
        "k": make.randn(1, 1, 2, 16),
        "cos": make.randn(1, 2, 16),
        "sin": make.randn(1, 2, 16),
    }


def case(name: str, **values: Any) -> Build:
    return lambda make: cases_of(name).module.build(make, **values)


def cut_from_longer(make: Make) -> dict[str, Any]:
    """Logits whose sequences are farther apart than their rows."""
    arguments = case("grpo_loss", batch=3, length=4, vocabulary=9000, masked=0.3, reduction="none")(make)
    logits = arguments["logits"]
    return {**arguments, "logits": torch.cat([logits, logits], 1)[:, : logits.shape[1]]}


CASES: tuple[tuple[str, str, Build], ...] = (
    ("rms_norm", "a row that fills its tile", norm(3, 8192)),
    ("rms_norm", "pairs of rows, several a block", norm(9, 8192)),
    ("rms_norm", "a row that doesn't", norm(3, 5001)),
    ("rms_norm", "a backward of two kernels", norm(3, 16384)),
    ("rms_norm", "a forward that reads twice", norm(3, 16385)),
    ("rms_norm", "several tiles of rows a block", norm(2100, 16)),
    ("rms_norm", "one row", norm(1, 300)),
    ("fused_add_rms_norm", "several tiles of rows a block", fused_norm(2100, 40)),
    ("fused_add_rms_norm", "a row that fills its tile", fused_norm(3, 8192)),
    ("fused_add_rms_norm", "a backward of two kernels", fused_norm(70, 8193)),
    ("fused_add_rms_norm", "a forward that reads twice", fused_norm(3, 16400)),
    ("layer_norm", "several tiles of rows a block", layer(400, 40)),
    ("layer_norm", "rows that fill their tile", layer(48, 128)),
    ("layer_norm", "pairs of rows, several a block", layer(10, 2048, mean=10.0)),
    ("layer_norm", "an odd number of rows that fill their tile", layer(5, 2048)),
    ("layer_norm", "a backward of two kernels", layer(70, 8193)),
    ("layer_norm", "a forward that reads thrice", layer(3, 16400, mean=100.0)),
    ("poly_norm", "several tiles of rows a block", polynomial(400, 40)),
    ("poly_norm", "a backward that reads twice", polynomial(12, 8200)),
    ("poly_norm", "a forward that reads twice", polynomial(3, 16400)),
    ("group_norm", "a long group in parts", groups(1, 6, 9001, 1, mean=100.0)),
    ("group_norm", "a long group in parts, whole tiles", groups(1, 8, 4096, 1, mean=100.0)),
    ("group_norm", "long groups", groups(3, 6, 5001, 2, mean=100.0)),
    ("group_norm", "long groups of many channels", groups(3, 1500, 7, 1)),
    ("group_norm", "long groups, whole tiles, no weight", groups(2, 24, 4096, 2, mean=100.0, weight=False)),
    ("group_norm", "long groups that a block holds", groups(5, 360, 1024, 30, mean=100.0)),
    ("group_norm", "long groups that a block holds forward", groups(5, 60, 6144, 30, mean=100.0)),
    ("group_norm", "long groups that a block holds, no weight", groups(5, 360, 1024, 30, weight=False)),
    ("group_norm", "several groups a block", groups(3, 44, 8, 11)),
    ("group_norm", "several groups a block, not aligned", groups(3, 44, 7, 11)),
    ("softmax", "several tiles of rows a block", lambda make: {"x": make.randn(900, 40)}),
    ("softmax", "a backward in parts", lambda make: {"x": make.randn(3, 20480)}),
    ("softmax", "a backward that reads twice", lambda make: {"x": make.randn(2, 20485)}),
    ("softmax", "the longest row in registers", lambda make: {"x": make.randn(2, 32768)}),
    ("softmax", "a row read twice", lambda make: {"x": make.randn(2, 32769) * 4}),
    ("sparsemax", "a row in parts", lambda make: {"x": make.randn(3, 10240)}),
    ("sparsemax", "a row in parts, all of it in the support", lambda make: {"x": make.randn(2, 8192) * 1e-5}),
    ("sparsemax", "a row in parts, of ties and -inf", parts_of_ties),
    ("sparsemax", "the longest row in parts", lambda make: {"x": make.randn(2, 32768)}),
    ("sparsemax", "the longest row in registers", lambda make: {"x": make.randn(2, 16384)}),
    ("sparsemax", "a row read twice", lambda make: {"x": make.randn(2, 16385)}),
    ("fused_neighborhood_attention", "windows up to the ends of the sides", attention(140, kernel_size=33)),
    ("fused_neighborhood_attention", "windows beyond the sides", attention(140, kernel_size=35)),
    ("fused_neighborhood_attention", "residues of several blocks", attention(260, kernel_size=9, dilation=2)),
    ("fused_neighborhood_attention", "residues of different lengths", attention(257, kernel_size=9, dilation=2)),
    ("dyt", "several tiles of rows a block", tanh(900, 40)),
    ("dyt", "several tiles a row and a block", tanh(70, 2100)),
    ("swiglu", "a tensor as one row, of several tiles", gates(3, 700)),
    ("swiglu", "several rows a tile", halves(37, 40)),
    ("swiglu", "several tiles a row", halves(3, 1030)),
    ("geglu", "several tiles a row", halves(3, 2500)),
    ("rope", "more heads than a block", heads(300, 1, 16, 16)),
    ("rope", "more heads than a block, of which a part is rotated", heads(1, 300, 24, 16)),
    ("rope", "a layout that the output doesn't keep", sequence_first),
    ("rope", "tiles that fit", heads(8, 4, 32, 32, length=8)),
    ("llama4_rope", "more heads than a block", pairs(300, 1, 16)),
    ("llama4_rope", "a head larger than a block", pairs(2, 1, 4500)),
    ("llama4_rope", "tiles that fit", pairs(8, 4, 32, length=16)),
    ("qwen2vl_mrope", "more heads than a block", planes(300, 1, (2, 3, 3))),
    ("qwen2vl_mrope", "a head larger than a block", planes(2, 1, (200, 1000, 1300))),
    ("qwen2vl_mrope", "tiles that fit", planes(8, 4, (4, 4, 8), length=16)),
    ("embedding", "one run over many chunks", look_up(lambda make: make.integers(3, 4, 2600))),
    ("embedding", "a long run of the last index", look_up(lambda make: make.integers(40, 41, 2600), vocabulary=41)),
    ("embedding", "runs longer than a chunk", look_up(skewed)),
    ("embedding", "a long run of padding", look_up(skewed, padding_idx=0)),
    ("embedding", "chunks without a run", look_up(lambda make: make.integers(0, 900, 2600), vocabulary=900)),
    ("kl_div", "several tiles a block", case("kl_div", rows=140, vocabulary=1030)),
    (
        "kl_div",
        "several tiles a block, of the target's logarithm",
        case("kl_div", rows=140, vocabulary=1030, log_target=True),
    ),
    ("tvd", "several tiles a block", case("tvd", rows=140, vocabulary=1030, ignored=0.3)),
    ("jsd", "several tiles a block", case("jsd", rows=140, vocabulary=1030)),
    ("jsd", "several tiles a block, with labels", case("jsd", rows=140, vocabulary=1030, ignored=0.3)),
    ("grpo_loss", "several tiles a part", case("grpo_loss", batch=2, length=2, vocabulary=40000, masked=0.3)),
    ("grpo_loss", "sequences cut from longer ones", cut_from_longer),
    (
        "logit_statistics",
        "several tiles a part",
        case("logit_statistics", rows=2, vocabulary=40000, return_entropy=True),
    ),
    (
        "logit_statistics",
        "more targets than are looked up at once",
        case("logit_statistics", rows=3, vocabulary=300, each=200, ignored=0.3),
    ),
    (
        "modulated_rms_norm",
        "several groups a tile, in parts",
        case("modulated_rms_norm", rows=(6, 8), hidden=24, scale_of="positions"),
    ),
    ("modulated_rms_norm", "several groups a block", case("modulated_rms_norm", rows=(9, 4), hidden=24)),
    (
        "modulated_rms_norm",
        "scales far apart in a tensor",
        case("modulated_rms_norm", rows=(2, 3, 4), hidden=24, scale_of="ends", in_one=True),
    ),
    ("modulated_rms_norm", "a backward of two kernels", case("modulated_rms_norm", rows=(2, 4), hidden=8193)),
    ("attn_res", "several rows a tile, several tiles a block", case("attn_res", rows=256, hidden=40)),
    ("attn_res", "a backward that reads blocks of columns", case("attn_res", rows=4, hidden=8193, count=2)),
)

LONG_GRIDS = (
    ("kl_div", case("kl_div", rows=7, vocabulary=1030, reduction="none")),
    ("tvd", case("tvd", rows=7, vocabulary=1030)),
    ("grpo_loss", case("grpo_loss", batch=2, length=3, vocabulary=70, masked=0.3)),
    ("mhc_post", case("mhc_post", rows=7, streams=2, width=40)),
)

HIGH_GRIDS = (
    ("swiglu", halves(90, 40)),
    ("geglu", halves(90, 40)),
    ("dyt", tanh(600, 40)),
    ("group_norm", groups(5, 44, 8, 11)),
    ("group_norm", groups(5, 6, 5001, 2)),
    ("group_norm", groups(5, 360, 1024, 30)),
    ("rope", case("rope", batch=5, length=3, q_heads=2, k_heads=1, head=16)),
    ("llama4_rope", case("llama4_rope", batch=5, length=3, q_heads=2, k_heads=1, head=16)),
    ("qwen2vl_mrope", case("qwen2vl_mrope", batch=5, length=3, q_heads=2, k_heads=1, sections=(2, 3, 3))),
)

SMALL = (
    ("softmax", lambda make: {"x": make.randn(1, 40)}),
    ("rms_norm", norm(1, 40)),
    ("group_norm", groups(1, 2, 16, 2)),
    ("group_norm", groups(2, 2, 16, 1)),
    ("swiglu", gates(1, 40)),
    ("embedding", look_up(lambda make: make.integers(0, 2, 1, 2), vocabulary=2)),
    ("tvd", case("tvd", rows=1, vocabulary=40, reduction="none")),
    ("grpo_loss", case("grpo_loss", batch=1, length=2, vocabulary=40, masked=0.3, reduction="none")),
    ("logit_statistics", case("logit_statistics", rows=1, vocabulary=40, each=2, return_entropy=True)),
    ("logit_statistics", case("logit_statistics", rows=2, vocabulary=40, each=2)),
    ("rope", tables),
    ("rope", heads(2, 1, 16, 16, length=2)),
    ("llama4_rope", pairs(2, 1, 16, length=2)),
    ("llama4_rope", pairs(2, 1, 16, length=1)),
    ("qwen2vl_mrope", planes(2, 1, (2, 3, 3), length=2)),
    ("modulated_rms_norm", case("modulated_rms_norm", rows=(2, 2), hidden=24, scale_of="rows", shift_of="samples")),
    ("attn_res", case("attn_res", rows=2, hidden=24, count=2)),
    ("mhc_post", case("mhc_post", rows=2, streams=2, width=24)),
    ("fused_neighborhood_attention", lambda make: {q: make.randn(1, 1, 2, 24) for q in "qkv"} | {"kernel_size": 3}),
)


# In an interpreter, which takes seconds for some of these works, float32 is tested under -m slow.
FLOAT32 = pytest.param(torch.float32, marks=[pytest.mark.slow] * INTERPRETED)


@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "work", "build"), CASES, ids=[f"{name}-{work}" for name, work, _ in CASES])
def test_values(name: str, work: str, build: Build, dtype: torch.dtype) -> None:
    """Each way of dividing the work gives the right values and gradients."""
    check(name, build, dtype)


@pytest.mark.parametrize(("name", "build"), LONG_GRIDS, ids=[name for name, _ in LONG_GRIDS])
def test_grids_of_several_rows(monkeypatch: pytest.MonkeyPatch, name: str, build: Build) -> None:
    """More blocks than a dimension of a grid may have: the last row of blocks isn't full."""
    monkeypatch.setattr(_launch, "MOST_BLOCKS", 5)
    check(name, build, torch.bfloat16)


@pytest.mark.parametrize(("name", "build"), HIGH_GRIDS, ids=[name for name, _ in HIGH_GRIDS])
def test_grids_that_are_too_high(monkeypatch: pytest.MonkeyPatch, name: str, build: Build) -> None:
    """More blocks than the second dimension of a grid may have: several launches, the last with fewer."""
    monkeypatch.setattr("liger_cutile.ops.group_norm.sm_count", lambda device: 1)  # no group is divided among so many
    for module in ("_launch", "_heads", "qwen2vl_mrope", "group_norm"):
        monkeypatch.setattr(f"liger_cutile.ops.{module}.MOST_DOWN", 2)
    check(name, build, torch.bfloat16)


@pytest.mark.parametrize(("name", "build"), SMALL, ids=[name for name, _ in SMALL])
def test_strides_beyond_32_bits(name: str, build: Build) -> None:
    """Kernels take no such stride: of each dimension of each tensor and incoming gradient, including one of size 1."""
    op = ops[name]
    arguments = build(Make(torch.bfloat16, DEVICE))
    check(name, build, torch.bfloat16)
    with torch.no_grad():
        incoming = incoming_for(op, complete(op, arguments), name_results(op, op.reference(**complete(op, arguments))))
    for what, x in arguments.items():
        for far in each_far(x):
            check(name, lambda make, what=what, far=far: {**arguments, what: far}, torch.bfloat16)
    for what, x in incoming.items():
        for far in each_far(x):
            check(name, build, torch.bfloat16, {**incoming, what: far})


def each_far(x: Any) -> Iterator[torch.Tensor]:
    """A tensor with one short dimension after the other, but for the last, at a stride that a kernel doesn't take."""
    for dim in range(x.dim() - 1) if isinstance(x, torch.Tensor) else ():
        if x.shape[dim] <= 3:
            strides = list(x.contiguous().stride())
            strides[dim] = (1 << 31) + 8
            # On a CPU, memory that isn't touched is not taken.
            yield x.new_empty_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65, 1024, 1100, 2600])
def test_sort_of_indices(rows: int, dtype: torch.dtype) -> None:
    """Equal indices stay in order, and those out of range come first."""
    indices = Make(torch.float32, DEVICE).integers(-3, 300, rows, dtype=dtype)
    keys, order = embedding._sort(indices, 290)
    expected_keys, expected_order = torch.sort(indices.masked_fill(indices >= 290, -1).clamp(min=-1), stable=True)
    assert torch.equal(keys.to(dtype), expected_keys)
    assert torch.equal(order.long(), expected_order)


def test_more_indices_than_are_sorted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sorts them, to 64-bit numbers."""
    monkeypatch.setattr(embedding, "MOST_RANKED", 2599)
    check("embedding", look_up(skewed), torch.bfloat16)


def test_a_float32_gradient_of_experts_is_a_sum_of_sums() -> None:
    """Over some slots each."""
    arguments, incoming, (least, most) = with_one_large_term(DEVICE)
    op, lane = ops["fused_moe"], "interpreted" if INTERPRETED else "passed"
    with only(Target(op, "cutile", DEVICE, backend, lane)):
        actual = evaluate(op, op, arguments, ("down_weight",), incoming)
    grad = actual.gradients["down_weight"]
    assert grad is not None
    assert least <= grad.item() <= most


@pytest.mark.parametrize("streams", [2, 4])  # tiles of 16 and 32 rows of weight
def test_hyper_connections_on_hopper(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of rows and two of columns, the second of each not full, of the product with a weight in parts."""
    monkeypatch.setattr(mhc_pre, "is_hopper", lambda device: True)
    monkeypatch.setattr(mhc_pre, "PRODUCT_PROGRAMS", None)  # the other tile's: nothing could be divided by it
    rows = case("mhc_pre", rows=70, streams=streams, width=320 // streams, iterations=2, parameters=torch.float32)
    check("mhc_pre", rows, torch.bfloat16)


def test_sums_of_many_equal_values() -> None:
    """All are rounded alike: of 2²⁰ of them, a running sum of each 2048th would be off by 20 units of rounding."""
    value = torch.tensor(0.7, device=DEVICE)
    n, unit = 1 << 20, 2.0**-23
    exact = n * value.double().item()
    values, labels = value.expand(n).contiguous(), torch.zeros(n, dtype=torch.int64, device=DEVICE)
    divergence = torch.empty(1, device=DEVICE)
    _divergences.launch_total(divergence, values, None, 1.0)
    assert abs(divergence.item() - exact) <= 2 * unit * exact
    loss, z_loss = torch.empty((), device=DEVICE), torch.empty((), device=DEVICE)
    weight = value.expand(2).contiguous()
    options = CrossEntropyKernelOptions(-100, None, None, None, "mean", True, False, False)
    inputs = inputs_of(labels, weight, None, 2, options)
    totals = torch.empty(2, device=DEVICE)
    _cross_entropy.KERNELS.sums(
        loss, z_loss, None, totals, CrossEntropyResults(values, values, None, None, None), inputs
    )
    assert abs(z_loss.item() - value.item()) <= 2 * unit * value.item()
    assert abs(loss.item() - 1.7) <= 4 * unit
    assert abs(totals[1].item() - exact) <= 2 * unit * exact
    rows = n // 8
    exact = rows * value.double().item()
    first, second = torch.empty(4, device=DEVICE), torch.empty(4, device=DEVICE)
    _sums.launch_totals(first, second, values.view(2, rows, 4))
    for total in (first, second):
        assert (total.double() - exact).abs().max() <= 16 * unit * exact


def check(name: str, build: Build, dtype: torch.dtype, incoming: dict[str, torch.Tensor] | None = None) -> None:
    op = ops[name]
    arguments = build(Make(dtype, DEVICE))
    lane = "interpreted" if interpreters.interprets(backend, DEVICE) else "passed"
    with only(Target(op, "cutile", DEVICE, backend, lane)):
        actual = evaluate(op, op, arguments, None, incoming)
    baseline, truth = baseline_and_truth(op, arguments, None, incoming)
    samples = Samples(op, arguments, None, incoming)
    for what, value in actual.items().items():
        compare(what, value, baseline.items()[what], truth.items()[what], samples)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic: bool | None) -> None:
    """torch.compile gives the bits of eager mode, so it knows all that launches write to. An interpreter will do."""
    op = liger_core.rms_norm
    torch.compiler.reset()
    with liger_core.use("cutile"):
        compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for rows in (5, 7):
            make = Make(torch.float32, DEVICE)
            arguments = norm(rows, 123)(make)
            one, other = evaluate(op, compiled, arguments), evaluate(op, op, arguments)
            for name, value in other.items().items():
                assert torch.equal(one.items()[name], value), name


@pytest.mark.parametrize("of_k", LAYOUTS)
@pytest.mark.parametrize("of_q", LAYOUTS)
def test_gradients_whose_strides_a_trace_does_not_know(of_q: str, of_k: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory_of_gradients(rope, DEVICE, of_q, of_k, lambda: monkeypatch.setattr(_heads, "compiling", lambda: True))
