"""Code that the cases don't reach fails, and so does a declaration of code that they do reach."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from liger_conformance import reach, route
from liger_conformance.known import KnownUnreached

pytest.importorskip("triton")

ACME = Path(__file__).parent / "acme" / "liger_acme"

LONG = """
@triton.jit
def _forward_long(y, x, hidden, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(y + column, tl.load(x + column, column < hidden), column < hidden)


def _rows("""

LAUNCHED = """    BLOCK = triton.next_power_of_2(x.shape[-1])
    if x.shape[-1] > 1 << 20:
        _forward_long[(1,)](y, x, x.shape[-1], BLOCK)
    _forward["""

Suite = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def site(tmp_path: Path, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-acme is installed, with a kernel for rows that no case has; of float32 alone, which is quick."""
    package = install_package(tmp_path / "site", "acme", ACME)
    kernel = package / "ops" / "rms_norm.py"
    text = kernel.read_text().replace("\ndef _rows(", LONG, 1)
    text = text.replace("    BLOCK = triton.next_power_of_2(x.shape[-1])\n    _forward[", LAUNCHED, 1)
    kernel.write_text(text.replace("    if weight is None:", "    if weight is None or x.dtype != torch.float32:"))
    (package / "unclaimed.py").write_text(
        "UNCLAIMED = {f'rms_norm-odd-{dtype}': 'float32 is quick' for dtype in ('bfloat16', 'float16')}"
    )
    return package.parent


def test_what_no_case_reaches_fails(site: Path, run_suite: Suite) -> None:
    """From all processes of pytest-xdist together; and what is declared and reached."""
    (site / "liger_acme" / "uncovered.py").write_text(
        "UNCOVERED = {'interpreted rms_norm.forward: x.shape* is true': 'rows of 2^20 are rare',"
        " 'interpreted rms_norm._forward': 'it is said to be, and is not'}"
    )
    done = run_suite(site, "--impl=acme", "--device=cpu", "--reached", "-n2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert " failed" not in done.stdout, done.stdout
    assert "acme, interpreted: 3 kernels and 4 branches of host code; not reached, for reasons that" in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("not reached by")] == [
        "not reached by the cases of acme, interpreted: rms_norm._forward_long"
    ]
    assert "liger_acme.uncovered declares what is reached, interpreted: rms_norm._forward" in lines


def test_a_part_of_the_tests_is_not_judged(site: Path, run_suite: Suite) -> None:
    done = run_suite(site, "--impl=acme", "--device=cpu", "--reached", "-k", "test_values and odd and float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reached" not in done.stdout


SHORT = '''
"""Host code with each kind of branch, and kernels of each kind."""

import functools

import triton

from . import _shared
from ._shared import _add, _launched as _by_another_name


def kernel(function=None, **options):
    if function is None:
        return functools.partial(kernel, **options)
    return function


@kernel
def _entry(x):
    if x:
        pass


@kernel(do_not_specialize=["x"])
def _other_entry(x):
    pass


@triton.jit
def _device(x):
    while x:
        pass


@triton.jit
def _jitted(x):
    _device(x)


@functools.cache
def look_up(x):
    """Text."""
    return x


def forward(x, items):
    if x == 1:
        look_up(x)
    elif x == 2:
        _jitted[1](x)
    while x > 5:
        x -= 1
    for item in items:
        if x == 1:
            _by_another_name[1](item)
    match x:
        case 3:
            return 3
        case _:
            return 4


class Cache:
    """Text."""

    def get(self, x):
        def inner():
            if x:
                return 1
            return 2

        return inner()
'''

SHARED = """
import triton


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _launched(x):
    _add(x, x)
"""

CALLED = """
import sys
from liger_conformance.reach import Watch
sys.path.insert(0, sys.argv[1])
one, other = Watch(["liger_short"]), Watch(["liger_short"])
from liger_short.ops import short
launch = type("Launch", (), {"__getitem__": lambda self, grid: lambda x: None})()
short._jitted = short._by_another_name = launch
with one.tracing():
    short.forward(3, [])
with other.tracing():
    short.forward(2, [1])
    short.forward(7, [])
other.launched |= {("liger_short", "short._entry"), ("liger_long", "short._other_entry")}
one.add(other.branches, other.launched)
reach = one.uncovered("liger_short")
print(reach.kernels, reach.branches, *reach.uncovered, sep="\\n")
"""


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose kernels are never run."""
    ops = tmp_path / "liger_short" / "ops"
    ops.mkdir(parents=True)
    (ops.parent / "__init__.py").write_text("")
    (ops / "__init__.py").write_text("")
    (ops / "short.py").write_text(SHORT)
    (ops / "_shared.py").write_text(SHARED)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_short"]:
        monkeypatch.delitem(sys.modules, name)
    return ops.parent


def test_which_functions_are_kernels_and_which_are_host_code(short: Path) -> None:
    sources = {source.name: source for source in reach.sources_of("liger_short")}
    assert sources["short"].kernels == {"_entry", "_other_entry", "_jitted"}
    assert sources["_shared"].kernels == {"_launched"}
    assert set(sources["short"].functions) == {"kernel", "look_up", "forward", "Cache.get", "Cache.get.inner"}
    assert not sources["_shared"].functions


def test_names_of_what_is_not_reached(short: Path) -> None:
    """Names of two processes together. They are apart from this test's, whose tracing may be somebody's."""
    command = [sys.executable, "-c", CALLED, str(short.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "4",
        "16",
        "_shared._launched",
        "short._jitted",
        "short._other_entry",
        "short.kernel",
        "short.look_up",
        "short.forward: x == 1 is true",
        "short.forward: x == 1 (2) is true",
        "short.Cache.get",
        "short.Cache.get.inner",
    ]


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"interpreted short.forward": " "}, "takes a reason"),
        ({"short.forward": "why"}, "takes a lane, a space and a name"),
        ({"passed short.forward": "why"}, "takes a lane, a space and a name"),
    ],
)
def test_a_declaration_names_a_lane_and_a_reason(short: Path, declared: dict[str, str], says: str) -> None:
    (short / "uncovered.py").write_text(f"UNCOVERED = {declared!r}")
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=says):
        KnownUnreached("liger_short")


def test_a_declaration_is_of_the_lanes_that_it_names(short: Path) -> None:
    declared = {
        "interpreted a": "why",
        "compiled b": "why",
        "compiled-sm_90 c": "why",
        "compiled* d": "why",
        "* e": "why",
    }
    (short / "uncovered.py").write_text(f"UNCOVERED = {declared!r}")
    importlib.invalidate_caches()
    known = KnownUnreached("liger_short")
    assert known.of("interpreted") == ["a", "e"]
    assert known.of("compiled") == ["b", "d", "e"]
    assert known.of("compiled-sm_90") == ["c", "d", "e"]


def test_what_a_package_remembered_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached function that another test called would run in no test that is watched."""
    calls = []

    @functools.cache
    def look_up(device: str) -> str:
        calls.append(device)
        return device

    module = types.ModuleType("liger_remembers.ops._device")
    module.look_up = look_up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    look_up("cpu")
    for op in ("rope", "rope", "dyt"):  # once an op
        route._forget_before(op, "liger_remembers")
        look_up("cpu")
    assert calls == ["cpu"] * 3
