"""cuTile kernels are compiled for chips that aren't there, and the compiler's own words say what a kernel takes and lacks."""

from __future__ import annotations

import os
import re
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_conformance.compilers import Compiled, cutile
from liger_conformance.compilers.cutile import CutileCompiler
from liger_conformance.interpreters.tileir import capture
from liger_conformance.known import KnownSpills, matches

ct = pytest.importorskip("cuda.tile", exc_type=ImportError) if capture.stand_in_for_libcuda() else None
jsd = pytest.importorskip("liger_cutile.ops.jsd")
layer_norm = pytest.importorskip("liger_cutile.ops.layer_norm")
rms_norm = pytest.importorskip("liger_cutile.ops.rms_norm")
rope = pytest.importorskip("liger_cutile.ops.rope")
tvd = pytest.importorskip("liger_cutile.ops.tvd")
pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # .ci/run has them beside the lane that they test
ConstBool = ct.Constant[bool]
ConstInt = ct.Constant[int]


@ct.kernel
def subtract_maximum(y, x, BLOCK: ConstInt):
    xs = ct.astype(ct.load(x, (ct.bid(0), 0), (1, BLOCK), padding_mode=ct.PaddingMode.ZERO), ct.float32)
    ct.store(y, (ct.bid(0), 0), ct.astype(xs - ct.max(xs), y.dtype))


@ct.kernel
def multiply(z, x, y, SIZE: ConstInt):
    xs = ct.load(x, (0, 0), (SIZE, SIZE), padding_mode=ct.PaddingMode.ZERO)
    ys = ct.load(y, (0, 0), (SIZE, SIZE), padding_mode=ct.PaddingMode.ZERO)
    ct.store(z, (0, 0), ct.astype(ct.mma(xs, ys, ct.zeros((SIZE, SIZE), ct.float32)), z.dtype))


@ct.kernel
def mistyped(y, x, BLOCK: ConstInt):
    ct.store(y, (0, 0), ct.load(x, (0, 0), (1, BLOCK)) + undefined)  # noqa: F821


@ct.kernel
def odd_elements(y, x, ROWS: ConstInt, PAIRS: ConstInt):
    pairs = ct.reshape(ct.load(x, (ct.bid(0), 0), (1, 2 * PAIRS)), (1, 1, PAIRS, 2))
    odd = ct.reshape(ct.extract(pairs, (0, 0, 0, 1), (1, 1, PAIRS, 1)), (1, 1, PAIRS))
    ct.store(y, (ct.bid(0), 0, 0), odd + ct.zeros((1, ROWS, PAIRS), ct.float32))


@ct.kernel
def products_of_rows(y, x, step, TMA: ConstBool):
    rows = ct.bid(0) + step * ct.arange(64, dtype=ct.int32)
    tile = ct.load_advanced_indexing(x, (rows, ct.Slice(0, 128)), padding_mode=ct.PaddingMode.ZERO, allow_tma=TMA)
    products = ct.mma(tile, ct.transpose(tile), ct.zeros((64, 64), ct.float32))
    ct.store(y, (ct.bid(0), 0), ct.astype(products, y.dtype))


def compile_row(chip: str, columns: int, block: int, dtype: torch.dtype = torch.bfloat16) -> Compiled:
    with CutileCompiler().compiling(chip) as (device, compiled):
        x = torch.empty(64, columns, dtype=dtype, device=device)
        ct.launch(0, (64,), subtract_maximum, (torch.empty_like(x), x, block))
    (kernel,) = compiled
    return kernel


def changed(module: Any, folder: Path, changes: dict[str, str]) -> Any:
    """A module whose source is that of another, but for some of its text."""
    source = Path(module.__file__).read_text()
    for right, wrong in changes.items():
        assert right in source
        source = source.replace(right, wrong)
    file = folder / "changed.py"
    file.write_text(source)
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    other = module_from_spec(spec)
    spec.loader.exec_module(other)
    return other


@pytest.mark.parametrize("chip", CutileCompiler.chips)
def test_a_right_kernel(chip: str) -> None:
    kernel = compile_row(chip, 4096, 4096)
    assert str(kernel) == "test_compiler_cutile.subtract_maximum[BLOCK=4096; 2D bf16:16, 2D bf16:16]"
    assert 16 < kernel.uses["registers"] <= 255
    assert (kernel.spills, kernel.over, kernel.lost) == (0, (), ())
    assert (kernel.uses["bulk copies"] > 0) == (chip != "sm_80")  # Ampere has no tensor memory accelerator


def test_spills() -> None:
    kernel = compile_row("sm_90", 65536, 65536, torch.float32)
    assert kernel.spills == -(-kernel.uses["bytes of stack"] // 4) > 8


def test_accesses_that_are_not_aligned() -> None:
    """tileiras 13.4 loads every other element two at a time, the odd ones from an address of four bytes too many."""
    says = r"compiled odd_elements for sm_90 to accesses that aren't aligned: LDG\.E\.64 .*\+0x4\]"
    with CutileCompiler().compiling("sm_90") as (device, _):
        x, y = torch.empty(64, 64, device=device), torch.empty(64, 8, 32, device=device)
        with pytest.raises(RuntimeError, match=says):
            ct.launch(0, (64,), odd_elements, (y, x, 8, 32))


def test_accesses_that_are_not_aligned_in_some_threads(tmp_path: Path) -> None:
    """Each thread needs one sign of a row and one far from it; tileiras 13.4 loads two side by side, at any address."""
    gathered = re.search(r"packed = ct\.gather\(.*", Path(tvd.__file__).read_text())
    assert gathered is not None
    as_a_tile = "packed = ct.load(signs, at, (ROWS, BLOCK // SIGNS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)"
    loaded_as_a_tile = changed(tvd, tmp_path, {gathered[0]: as_a_tile})

    def launch(module: Any, device: str, rows: int, columns: int) -> None:
        dp = torch.empty(rows, columns, device=device)
        signs = torch.empty(rows, -(-columns // tvd.SIGNS), dtype=torch.int32, device=device)
        module._launch_backward(dp, torch.empty((), device=device), signs, None, "batchmean")

    with CutileCompiler().compiling("sm_90") as (device, _):
        for rows, columns in ((21, 1024), (4096, 248)):
            launch(tvd, device, rows, columns)
            with pytest.raises(RuntimeError, match=r"compiled _backward for sm_90 to accesses .* LDG\.E\.64 .*\.64\]"):
                launch(loaded_as_a_tile, device, rows, columns)
        launch(loaded_as_a_tile, device, 4, 128256)  # of rows so long, threads need others


def test_words_that_are_not_aligned_beside_a_tensor_on_its_side(tmp_path: Path) -> None:
    """Where heads lie side by side in memory, tileiras 13.4 loads pairs of a table's 16-bit columns, at odd places too."""
    as_it_lies = changed(rope, tmp_path, {"side_by_side(q), side_by_side(k)": "q, k"})

    def launch(module: Any, device: str) -> None:
        q = torch.empty(2, 9, 5, 97, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
        k, table = q.new_empty(2, 1, 5, 97), q.new_empty(1, 5, 48)
        yq, yk = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k)
        module._launch(yq, yk, q, k, table, table.clone(), False)

    with CutileCompiler().compiling("sm_90") as (device, _):
        launch(rope, device)
        with pytest.raises(RuntimeError, match=r"compiled _rotate for sm_90 to accesses .* LDG\.E R\d+, "):
            launch(as_it_lies, device)


def test_elements_that_are_half_of_an_address(tmp_path: Path) -> None:
    """A weight of 8 elements, which each thread holds: on an H100, the gradient of x was NaN."""
    as_a_tile = "ct.reshape(ct.load(weight, (0,), (BLOCK,), padding_mode=ZERO, allow_tma=False), (1, BLOCK))"
    loaded_as_a_tile = changed(layer_norm, tmp_path, {"hold_vector(weight, BLOCK)": as_a_tile})

    def launch(module: Any, device: str) -> None:
        x = torch.empty(2049, 8, dtype=torch.bfloat16, device=device)
        module._launch_backward(torch.empty_like(x), None, None, x, x, x[0], torch.empty(2, 2049, device=device))

    with CutileCompiler().compiling("sm_90") as (device, _):
        launch(layer_norm, device)
        with pytest.raises(RuntimeError, match=r"_backward for sm_90 to take elements from half of an address: PRMT"):
            launch(loaded_as_a_tile, device)


def test_rows_that_have_not_arrived() -> None:
    """tileiras 13.4 sets up one barrier for each of 64 loads: on an H100, a kernel with such loads never ended."""
    says = r"products_of_rows for sm_90 to bulk loads .*: UTMALDG.*SYNCS\.CCTL\.IV"
    with CutileCompiler().compiling("sm_90") as (device, compiled):
        x = torch.empty(512, 128, dtype=torch.float16, device=device)
        ct.launch(0, (8,), products_of_rows, (x.new_empty(512, 64), x, 3, False))
        assert len(compiled) == 1
        with pytest.raises(RuntimeError, match=says):
            ct.launch(0, (8,), products_of_rows, (x.new_empty(512, 64), x, 3, True))


def test_a_bulk_store_whose_buffer_is_written_before_it_is_read(tmp_path: Path) -> None:
    """Rows of fused_add_rms_norm are wrong on an H200, if tileiras 13.4 stores both of its results in bulk."""
    changes = {
        "sums, check_bounds=not INSIDE, allow_tma=False": "sums, check_bounds=not INSIDE",
        "LONGEST_HELD_FUSED = 256": "LONGEST_HELD_FUSED = 4096",
    }
    both_in_bulk = changed(rms_norm, tmp_path, changes)

    def launch(module: Any, device: str) -> None:
        x = torch.empty(64, 2048, dtype=torch.bfloat16, device=device)
        y, h, residual, weight = (torch.empty_like(t) for t in (x, x, x, x[0]))
        module.launch_forward(y, h, None, x, residual, weight, 1e-6, 0.0, "llama")

    with CutileCompiler().compiling("sm_90") as (device, compiled):
        launch(rms_norm, device)
        assert len(compiled) == 1
        with pytest.raises(RuntimeError, match=r"compiled _forward for sm_90 to bulk stores .*UTMASTG.*SYNCS\.ARRIVE"):
            launch(both_in_bulk, device)


def test_warps_that_wait_for_more_registers_than_there_are(tmp_path: Path) -> None:
    """Kernels of jsd's gradient hang on an H200, if rows may not count and tileiras 13.4 stores it in bulk."""
    changes = {
        "store_beside_labels(dstudent, at, scale * gradient, labels, ROWS)": "store(dstudent, at, scale * gradient)",
        "    store_beside_labels,\n": "    store,\n",
    }
    stored_in_bulk = changed(jsd, tmp_path, changes)

    def launch(module: Any, device: str) -> None:
        x = torch.empty(5, 96, dtype=torch.bfloat16, device=device)
        labels = torch.empty(5, dtype=torch.int64, device=device)
        module.forward((True,), x, torch.empty_like(x), labels)

    with CutileCompiler().compiling("sm_90") as (device, _):
        launch(jsd, device)
        says = "_divergences for sm_90 to a program that never ends: .* 20480 of 15360 registers, with 384 threads"
        with pytest.raises(RuntimeError, match=says):
            launch(stored_in_bulk, device)


def test_a_layout_that_loses_bulk_copies() -> None:
    kernel = compile_row("sm_90", 4001, 4096)
    assert kernel.uses["bulk copies"] == 0
    assert str(kernel).endswith("2D bf16, 2D bf16]")
    load, store = kernel.lost
    assert load.startswith("MemoryTmaLoadFailed at test_compiler_cutile.py:")
    assert load.endswith("not 16-byte aligned")
    assert store.startswith("MemoryTmaStoreFailed at test_compiler_cutile.py:")
    assert compile_row("sm_80", 4001, 4096).lost == ()


@pytest.mark.parametrize(
    ("chip", "dtype", "on_cores"),
    [*((chip, torch.bfloat16, True) for chip in CutileCompiler.chips), ("sm_90", torch.float32, False)],
)
def test_matrix_products(chip: str, dtype: torch.dtype, on_cores: bool) -> None:
    with CutileCompiler().compiling(chip) as (device, compiled):
        x = torch.empty(64, 64, dtype=dtype, device=device)
        ct.launch(0, (1,), multiply, (torch.empty_like(x), x, torch.empty_like(x), 64))
    assert (compiled[0].uses["matrix products"] > 0) == on_cores
    assert any("TensorCore" in lost for lost in compiled[0].lost) != on_cores


def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which knows nothing of this one's launches, reads the program, and compiles what is new."""
    monkeypatch.setattr(cutile, "CACHE", tmp_path)
    monkeypatch.setattr(cutile, "_made", {})
    first = compile_row("sm_90", 4096, 4096)
    assert len(list(tmp_path.iterdir())) == 1
    cutile._made.clear()
    with monkeypatch.context() as without:
        without.setattr(cutile, "_tileiras", lambda: pytest.fail("compiled again"))
        assert compile_row("sm_90", 4096, 4096) == first
    compile_row("sm_100", 4096, 4096)
    compile_row("sm_90", 4001, 4096)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_kernel_is_the_same_program_in_every_checkout(tmp_path: Path) -> None:
    """So that what was compiled for one is there for the others. Files keep their names, which remarks have."""
    programs, whole = set[bytes](), set[bytes]()
    for folder in (tmp_path / "one", tmp_path / "another"):
        folder.mkdir()
        path = folder / "kernels.py"
        path.write_text(
            "import cuda.tile as ct\n\n\n@ct.kernel\ndef nothing(x):\n    ct.store(x, (0,), ct.full((16,), 0, x.dtype))\n"
        )
        spec = spec_from_file_location("kernels", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        signature = capture.signature(module.nothing, (torch.zeros(16),))
        with capture.without_folders():
            programs.add(capture.bytecode(module.nothing, signature))
        whole.add(capture.bytecode(module.nothing, signature))
    (code,) = programs
    assert b"kernels.py" in code
    assert len(whole) == 2, "the test shows nothing: these have no folders either"


def test_what_nobody_reads_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "CACHE", cutile.swept(tmp_path / "new"))
    monkeypatch.setattr(cutile, "_made", {})
    compile_row("sm_90", 4096, 4096)
    compile_row("sm_90", 4001, 4096)
    long_ago = time.time() - (cutile.DAYS + 1) * 24 * 3600
    for file in cutile.CACHE.iterdir():
        os.utime(file, (long_ago, long_ago))
    cutile._made.clear()
    compile_row("sm_90", 4096, 4096)
    assert len(list(cutile.swept(cutile.CACHE).iterdir())) == 1


def test_errors_are_the_compilers_own() -> None:
    with CutileCompiler().compiling("sm_90") as (device, _):
        x = torch.empty(1, 64, device=device)
        with pytest.raises(ct.TileError, match="undefined"):
            ct.launch(0, (1,), mistyped, (torch.empty_like(x), x, 64))
        with pytest.raises(ValueError, match="has 16777216 blocks"):
            ct.launch(0, (1 << 24,), subtract_maximum, (torch.empty_like(x), x, 64))


def test_host_code_sees_the_chip() -> None:
    seen: dict[str, Any] = {}
    for chip in ("sm_90", "sm_120"):
        with CutileCompiler().compiling(chip) as (device, _):
            x = torch.empty(1 << 40, device=device)  # without memory
            seen[chip] = torch.cuda.get_device_properties(x.device).multi_processor_count, x.device
    assert seen["sm_90"][0] == 132
    assert seen["sm_120"][0] == 170
    assert seen["sm_90"][1] != seen["sm_120"][1]


def test_known_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    import liger_cutile.known_spills as declared

    key, words = "softmax-cutile-sm_* softmax._forward[*", "*only supports zero padding"
    monkeypatch.setattr(declared, "KNOWN_SPILLS", {})
    monkeypatch.setattr(declared, "KNOWN_LOSSES", {key: (words, "-inf is what it needs")})
    known = KnownSpills({"cutile": "liger_cutile"}, ["softmax-cutile-sm_90", "rms_norm-cutile-sm_90"])
    lost = "MemoryTmaLoadFailed at softmax.py:30: TMA only supports zero padding"
    assert known.allows_loss("softmax-cutile-sm_90", "softmax._forward[ROWS=1]", lost)
    assert not known.allows_loss("softmax-cutile-sm_90", "softmax._backward[ROWS=1]", lost)
    assert not known.allows_loss("rms_norm-cutile-sm_90", "softmax._forward[ROWS=1]", lost)
    assert not known.allows_loss("softmax-cutile-sm_90", "softmax._forward[ROWS=1]", "stride not 16-byte aligned")
    assert matches(words, lost)
    monkeypatch.setattr(declared, "KNOWN_LOSSES", {key: (words, " ")})
    with pytest.raises(ValueError, match="takes a reason"):
        KnownSpills({"cutile": "liger_cutile"}, ["softmax-cutile-sm_90"])
