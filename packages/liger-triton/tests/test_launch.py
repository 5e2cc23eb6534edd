"""A launch is remembered by all that its compilation depends on, and by nothing that it doesn't."""

import ast
import functools
import gc
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import BaseBackend
from triton.runtime import jit as jit_module

from liger_conformance.interpreters.triton import launches
from liger_core import replay
from liger_triton.ops import _launch, attn_res

X = torch.zeros(64)


class Jit:
    """Stands for a JITFunction of the signature (x, n, scale, BLOCK: constexpr): notes what it compiles and launches."""

    params = tuple(types.SimpleNamespace(name=n, is_constexpr=n == "BLOCK") for n in ("x", "n", "scale", "BLOCK"))

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            self.compiled.append((grid, args, named))
            return types.SimpleNamespace(run=lambda *a: self.launched.append(a), function="f", packed_metadata="m")

        return run


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    monkeypatch.setattr(_launch, "driver", types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=str)))
    return Jit()


def test_what_is_launched_again(jit: Jit) -> None:
    kernel = _launch.Kernel(jit)
    for grid in ((3,), (4, 5)):
        kernel[grid](X, 7, 0.5, BLOCK=16, num_warps=4)
    assert len(jit.compiled) == 1
    assert jit.compiled[0][2]["enable_fp_fusion"] is True
    # Grid, stream, function, metadata, no hooks; then the pointer, the numbers, and the constants without the options.
    assert jit.launched == [(4, 5, 1, "-1", "f", "m", None, None, None, X.data_ptr(), 7, 0.5, 16)]


def test_what_is_launched_is_replayed(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another address, on the stream of then; not while a profiler hooks launches."""
    kernel = _launch.Kernel(jit)

    def host_code(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[(3,)](y, x.numel(), None, BLOCK=16, num_warps=4)
        return y

    assert replay.record(lambda: host_code(X), [X]).why_not is not None  # it was compiled, so not launched by this code
    replayed = replay.record(lambda: host_code(X), [X]).replay
    assert replayed is not None
    y = replayed(torch.ones(64))
    assert len(jit.launched) == 2
    assert jit.launched[1] == (3, 1, 1, "-1", "f", "m", None, None, None, y.data_ptr(), 64, None, 16)
    monkeypatch.setattr(_launch.knobs.runtime.launch_enter_hook, "calls", [print])
    assert replayed(torch.ones(64)) is None


def test_what_interprets_a_kernel_has_its_attributes() -> None:
    calls: list[tuple[Any, ...]] = []
    interpreted = _launch._Interpreted(types.SimpleNamespace(name="f", __getitem__=None))
    assert interpreted.name == "f"
    interpreted._launch(lambda *args, **named: calls.append((args, named)), X, 2, BLOCK=16)
    assert calls == [((X, 2), {"BLOCK": 16})]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((X.bfloat16(), 1, 0.5), {"BLOCK": 16, "num_warps": 4}),
        ((X, 2, 0.5), {"BLOCK": 16, "num_warps": 4}),
        ((X, 1, 1), {"BLOCK": 16, "num_warps": 4}),
        ((X, True, 0.5), {"BLOCK": 16, "num_warps": 4}),
        ((X, 1.0, 0.5), {"BLOCK": 16, "num_warps": 4}),
        ((X, 1, None), {"BLOCK": 16, "num_warps": 4}),
        ((None, 1, 0.5), {"BLOCK": 16, "num_warps": 4}),
        ((X, 1, 0.5), {"BLOCK": 32, "num_warps": 4}),
        ((X, 1, 0.5), {"BLOCK": 16, "num_warps": 8}),
        ((X[1:], 1, 0.5), {"BLOCK": 16, "num_warps": 4}),
    ],
)
def test_what_is_compiled_apart(jit: Jit, args: tuple[Any, ...], named: dict[str, int]) -> None:
    kernel = _launch.Kernel(jit)
    kernel[(1,)](X, 1, 0.5, BLOCK=16, num_warps=4)
    kernel[(1,)](*args, **named)
    assert len(jit.compiled) == 2
    assert jit.launched == []


@pytest.mark.parametrize(
    ("n", "like"),
    [(7, 9), (7, -5), (7, 2**31 - 1), (7, -(2**31) + 1), (16, 4096), (16, 0), (16, -(2**31)), (2**31, 2**40)],
)
def test_what_is_launched_again_with_another_number(jit: Jit, n: int, like: int) -> None:
    kernel = _launch.Kernel(jit)
    kernel[(1,)](X, n, 0.5, BLOCK=16)
    kernel[(1,)](X, like, -0.25, BLOCK=16)
    assert len(jit.compiled) == len(kernel._compiled) == 1
    assert [launched[10:12] for launched in jit.launched] == [(like, -0.25)]


NUMBERS = (
    1,
    0,
    2,
    15,
    16,
    17,
    -1,
    -16,
    2**31 - 1,
    2**31,
    2**31 + 1,
    -(2**31),
    -(2**31) - 1,
    -(2**31) - 16,
    2**63 - 1,
    2**63,
)
"""On both sides of each rule of Triton's."""


def test_numbers_are_told_apart_as_triton_does() -> None:
    """By the rule of the Triton that is installed."""
    if hasattr(jit_module, "native_specialize_impl"):
        specialize: Any = functools.partial(jit_module.native_specialize_impl, BaseBackend)
    else:  # triton 3.5
        specialize = jit_module.create_specialize_impl(BaseBackend.get_arg_specialization)
    pairs = {n: (specialize(n, False, True, True), _launch._specialised(n)) for n in NUMBERS}
    for n in NUMBERS:
        for m in NUMBERS:
            told, remembered = (pairs[n][i] == pairs[m][i] for i in (0, 1))
            assert told == remembered, f"Triton compiles {n} as {pairs[n][0]} and {m} as {pairs[m][0]}"
    for value in (0.5, 1.0, -2.0, 1e300, float("nan")):
        assert specialize(value, False, True, True) == specialize(0.25, False, True, True), value
    assert specialize(True, False, True, True) == specialize(False, False, True, True)


def test_on_amd_tensors_of_more_than_32_bits_are_compiled_apart(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    kernel = _launch.Kernel(jit)
    for size in (64, 65, 1 << 29):
        kernel[(1,)](torch.empty(size), 7, 0.5, BLOCK=16)
    assert len(jit.compiled) == 2


def test_tensors_of_a_subclass_are_remembered_as_plain_ones_are(jit: Jit) -> None:
    class Image(torch.Tensor):
        pass

    kernel = _launch.Kernel(jit)
    images = [torch.zeros(64).as_subclass(Image) for _ in range(3)]
    alive = [weakref.ref(image) for image in images]
    while images:
        kernel[(1,)](images.pop(), 1, 0.5, BLOCK=16)
    assert len(jit.compiled) == 1
    jit.compiled.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_profilers_see_every_launch(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_hooked", lambda: True)
    kernel = _launch.Kernel(jit)
    for _ in range(3):
        kernel[(1,)](X, 1, 0.5, BLOCK=16)
    assert len(jit.compiled) == 3


def test_the_suite_sees_every_launch() -> None:
    assert not _launch._hooked()
    with launches():
        assert _launch._hooked()
    assert not _launch._hooked()


def test_strides_of_rows_are_specialised_on() -> None:
    """Otherwise Triton doesn't know that rows are aligned, and a thread loads one element at a time."""
    not_specialised: set[str] = set()
    for file in Path(_launch.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "do_not_specialize":
                words = [x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant)]
                not_specialised |= {str(word) for word in words}
    assert "rows" in not_specialised
    of_labels = {"target_stride", "k_stride"}  # of one number a row
    assert {name for name in not_specialised if name.endswith("stride")} == of_labels


def test_few_launches_are_remembered(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "MOST_REMEMBERED", 3)
    kernel = _launch.Kernel(jit)
    for n in range(10):
        kernel[(1,)](X, 7, 0.5, BLOCK=n)
        assert 1 <= len(kernel._compiled) <= 3


@pytest.mark.parametrize("tile", [4096, 8192, 16384, 32768])
def test_attn_res_has_no_more_stages_on_amd_than_64_kib_hold(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """A chip with 160 KiB of shared memory, such as gfx950, has as many registers as one with 64 KiB."""

    def stages(shared: int) -> int:
        monkeypatch.setattr(attn_res, "shared_memory", lambda device: shared)
        return attn_res._backward_stages(tile, torch.device("cuda"))

    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert stages(160 << 10) == stages(64 << 10)
