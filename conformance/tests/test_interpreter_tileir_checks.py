"""Each check of the interpreter of Tile IR: a kernel that it catches, and one like it that it lets pass."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from liger_conformance.interpreters import tileir
from liger_conformance.interpreters.tileir.control import InterpreterError

ct = pytest.importorskip("cuda.tile")
if os.environ.get("CUTILE_INTERPRET") != "1":
    pytest.skip("needs CUTILE_INTERPRET=1", allow_module_level=True)
tileir.install()

ConstInt = ct.Constant[int]
ZERO, UNDETERMINED = ct.PaddingMode.ZERO, ct.PaddingMode.UNDETERMINED
HERE = Path(__file__).name


def launch(grid, kernel, *arguments):
    ct.launch(0, (grid,), kernel, arguments)


def caught(kind, text=""):
    """A context that ends in a KernelBug, which says where in this file."""
    return pytest.raises(tileir.KernelBug, match=rf"{kind}: .*{text}.* at .*{HERE}:\d+, in block \(\d+, 0, 0\)")


@ct.kernel
def sum_of_row(x, y, PADDED: ct.Constant[bool], BLOCK: ConstInt):
    t = ct.load(x, (ct.bid(0), 0), (1, BLOCK), padding_mode=ZERO if PADDED else UNDETERMINED)
    ct.store(y, (ct.bid(0),), ct.reshape(ct.sum(t, axis=1), (1,)))


def test_padding_that_is_undetermined():
    """A GPU may pad with zeros, and hide it."""
    x, y = torch.ones(2, 100), torch.empty(2)
    launch(2, sum_of_row, x, y, False, 128)
    assert y.isnan().all()
    launch(2, sum_of_row, x, y, True, 128)
    assert y.tolist() == [100, 100]
    with tileir.checking(poison=False):
        launch(2, sum_of_row, x, y, False, 128)
    assert y.tolist() == [100, 100]


def test_padding_of_integers_that_is_undetermined():
    x, y = torch.ones(2, 100, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    launch(2, sum_of_row, x, y, False, 128)
    assert (y.abs() > 1e6).all()


@ct.kernel
def shifted(x, y, distance, BLOCK: ConstInt):
    i = ct.arange(BLOCK, dtype=ct.int32) + distance
    ct.store(y, (0,), ct.gather(x, i, check_bounds=False))


@pytest.mark.parametrize("distance", [1, -1])
def test_pointer_outside(distance):
    """The bounds are the array's, also where memory goes on."""
    memory = torch.arange(80.0)
    with caught("bounds", r"argument 0: 1 pointer\(s\) outside"):
        launch(1, shifted, memory[8:72], torch.empty(64), distance, 64)
    launch(1, shifted, memory[8:72], torch.empty(64), 0, 64)


@ct.kernel
def second_element(x, y, PLACE: ConstInt):
    column = ct.arange(1, dtype=ct.int32) + PLACE
    ct.store(y, (0,), ct.gather(x, (0, column), check_bounds=False))


def test_pointer_between_rows():
    x, y = torch.zeros(4, 8)[:, :6], torch.empty(1)
    with caught("bounds", "such as to element 6 of 30"):
        launch(1, second_element, x, y, 6)
    launch(1, second_element, x, y, 5)


@ct.kernel
def moved_tile(x, y, DISTANCE: ConstInt, BLOCK: ConstInt):
    ct.store(y, (ct.bid(0) + DISTANCE,), ct.load(x, (ct.bid(0),), (BLOCK,), padding_mode=ZERO))


def test_tile_outside():
    """Wholly, which stores and reads nothing. A tile that crosses the edge is what padding is for."""
    with caught("bounds", r"tile \(4,\) of shape \(16,\) is wholly outside of \(64,\)"):
        launch(4, moved_tile, torch.zeros(64), torch.empty(64), 1, 16)
    launch(4, moved_tile, torch.zeros(60), torch.empty(60), 0, 16)


@ct.kernel
def unchecked(x, y, BLOCK: ConstInt):
    ct.store(y, (0,), ct.load(x, (0,), (BLOCK,), check_bounds=False))


def test_tile_said_to_be_inside():
    with caught("bounds", "check_bounds=False, and the tile crosses the end of axis 0"):
        launch(1, unchecked, torch.zeros(60), torch.empty(64), 64)
    launch(1, unchecked, torch.zeros(64), torch.empty(64), 64)


@ct.kernel
def plus_multiple(x, y, n, BLOCK: ConstInt):
    ct.store(y, (0,), ct.load(x, (0,), (BLOCK,)) + ct.assume_divisible_by(n, 8))


def test_assumption():
    x, y = torch.zeros(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    with caught("assumption", "12"):
        launch(1, plus_multiple, x, y, 12, 8)
    launch(1, plus_multiple, x, y, 16, 8)


@ct.kernel
def all_small(x, BLOCK: ConstInt):
    ct.assert_(ct.load(x, (0,), (BLOCK,)) < 3, "too big")  # noqa: PT009


def test_assertion():
    with caught("assertion", "too big"):
        launch(1, all_small, torch.full((8,), 5.0), 8)
    launch(1, all_small, torch.zeros(8), 8)


@ct.kernel
def quotient(x, y, z, BLOCK: ConstInt):
    ct.store(z, (0,), ct.load(x, (0,), (BLOCK,)) // ct.load(y, (0,), (BLOCK,)))


def test_division_by_zero():
    x, y = torch.arange(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    with caught("arithmetic", "divided by zero"):
        launch(1, quotient, x, y, torch.empty_like(x), 8)
    launch(1, quotient, x, y + 1, torch.empty_like(x), 8)


@ct.kernel
def wait_for(flag):
    while ct.atomic_cas(flag, 0, 1, 1) != 1:
        pass


def test_livelock():
    with tileir.checking(most_iterations=100):
        with caught("livelock", "100 iterations"):
            launch(1, wait_for, torch.zeros(1, dtype=torch.int32))
        launch(1, wait_for, torch.ones(1, dtype=torch.int32))


@ct.kernel
def add_up(x, total, ATOMIC: ct.Constant[bool], BLOCK: ConstInt):
    part = ct.sum(ct.load(x, (ct.bid(0),), (BLOCK,)), axis=0)
    if ATOMIC:
        ct.atomic_add(total, 0, part)
    else:
        ct.store(total, (0,), ct.load(total, (0,), ()) + part)


def test_race():
    """Blocks that run one after another give the right answer, and on a GPU wouldn't."""
    total = torch.zeros(1)
    with caught("race", "touched too, in no order"):
        launch(4, add_up, torch.ones(64), total, False, 16)
    with tileir.checking(race=False):
        total.zero_()
        launch(4, add_up, torch.ones(64), total, False, 16)
    assert total == 64
    launch(4, add_up, torch.ones(64), total.zero_(), True, 16)
    assert total == 64


@ct.kernel
def atomic_and_plain(x):
    ct.atomic_add(x, 0, 1.0)
    if ct.bid(0) == 1:
        ct.store(x, (0,), 0.0)


@ct.kernel
def write_and_read(x, y):
    if ct.bid(0) == 0:
        ct.store(x, (0,), 1.0)
    else:
        ct.store(y, (0,), ct.load(x, (0,), ()))


@ct.kernel
def read_and_read(x, y):
    ct.store(y, (ct.bid(0),), ct.load(x, (0,), ()))


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize(
    ("kernel", "count", "races"), [(atomic_and_plain, 1, True), (write_and_read, 2, True), (read_and_read, 2, False)]
)
def test_race_between(kernel, count, races, order):
    """Whichever block comes first."""
    with tileir.checking(order=order), caught("race") if races else contextlib.nullcontext():
        launch(2, kernel, *(torch.zeros(4) for _ in range(count)))


@ct.kernel
def scatter_to(x, index, y, BLOCK: ConstInt):
    ct.scatter(y, ct.load(index, (0,), (BLOCK,)), ct.load(x, (0,), (BLOCK,)))


def test_race_within_a_store():
    x, y, index = torch.zeros(8), torch.empty(8), torch.arange(8, dtype=torch.int32)
    launch(1, scatter_to, x, index, y, 8)
    index[3] = 5
    with caught("race", "one store writes to an element twice"):
        launch(1, scatter_to, x, index, y, 8)


def test_expanded_input_is_no_race():
    """Rows that are the same memory are read by all, and written by none."""
    launch(4, sum_of_row, torch.ones(1, 16).expand(4, 16), torch.empty(4), True, 16)


def test_overlapping_input_is_no_race():
    """Nor are rows that share elements."""
    windows = torch.arange(20.0).unfold(0, 16, 1)
    y = torch.empty(5)
    launch(5, sum_of_row, windows, y, True, 16)
    assert torch.equal(y, windows.sum(1))


@ct.kernel
def all_rows(x, y, ROWS: ConstInt, BLOCK: ConstInt):
    t = ct.load(x, (0, 0), (ROWS, BLOCK), padding_mode=ZERO)
    ct.store(y, (0,), ct.sum(t, axis=1))


def test_overlapping_input_that_nothing_has_written():
    with tileir.tracking():
        x, y = torch.empty(32), torch.empty(4)
        launch(1, copied, torch.ones(1, 16), x[:16].view(1, 16), 16)
        launch(1, all_rows, x[:16].unfold(0, 4, 4), y, 4, 4)
        launch(1, all_rows, x[:7].unfold(0, 4, 1), y, 4, 4)
        with caught("uninitialised"):
            launch(1, all_rows, x[12:].unfold(0, 4, 1), y, 4, 4)


@ct.kernel
def accumulate(x, y, BLOCK: ConstInt):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (BLOCK,)) + ct.load(y, (ct.bid(0),), (BLOCK,)))


def test_memory_that_nothing_has_written():
    x = torch.ones(64)
    with tileir.tracking():
        with caught("uninitialised", "argument 1: a read"):
            launch(4, accumulate, x, torch.empty(64), 16)
        launch(4, accumulate, x, torch.zeros(64), 16)
        launch(4, accumulate, x, torch.empty(64).fill_(1.0), 16)
        written = torch.empty(64)
        launch(4, moved_tile, x, written, 0, 16)
        launch(4, accumulate, x, written, 16)
    launch(4, accumulate, x, torch.empty(64), 16)  # where nothing is tracked


def test_memory_that_a_kernel_has_written_in_part():
    x = torch.ones(64)
    with tileir.tracking():
        y = torch.empty(64)
        launch(2, moved_tile, x, y, 2, 16)  # the second half
        launch(2, accumulate, x[32:], y[32:], 16)
        with caught("uninitialised"):
            launch(4, accumulate, x, y, 16)


def test_memory_that_is_written_by_tile_and_read_by_element():
    """And taken for other types."""
    with tileir.tracking():
        x, y = torch.empty(32), torch.empty(16)
        launch(1, copied, torch.ones(1, 16), x[:16].view(1, 16), 16)
        launch(1, shifted, x, y, 0, 16)
        launch(1, shifted, x.view(torch.int8), torch.empty(64, dtype=torch.int8), 0, 64)
        for distance in (1, 16):
            with caught("uninitialised"):
                launch(1, shifted, x, y, distance, 16)
        with caught("uninitialised"):
            launch(1, shifted, x.view(torch.int8), torch.empty(64, dtype=torch.int8), 1, 64)


def test_memory_that_is_used_again():
    """A tensor at the address of one that is gone is known by what it is."""
    # glibc gives more than 32 MB back to the kernel at once, which has then a hole of that very size; less goes into a heap,
    # where whatever comes in between takes a part of it.
    # Which hole that is depends on what the process has allocated before, so several sizes are tried.
    with tileir.tracking():
        for attempt in range(60):
            ones = [1.0] * ((5 + attempt % 6) << 20)
            address = torch.empty(len(ones), dtype=torch.float64).data_ptr()
            again = torch.tensor(ones, dtype=torch.float64)
            launch(256, accumulate, torch.ones(4096), again.view(torch.float32)[:4096], 16)
            if again.data_ptr() == address:
                return
            del again
    pytest.fail("PyTorch gave no address twice: this tested nothing")


@ct.kernel
def doubled(x, y, BLOCK: ConstInt):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (BLOCK,), padding_mode=ZERO) * 2)


def test_overlap():
    """cuda.tile compiles as if arguments shared no memory."""
    memory = torch.ones(64)
    with pytest.raises(tileir.KernelBug, match="overlap: argument 0 and argument 1 share memory"):
        launch(4, doubled, memory, memory, 16)
    with tileir.checking(overlap=False):
        launch(4, doubled, memory, memory, 16)
    launch(2, doubled, memory[:32], memory[32:], 16)


def test_columns_beside_one_another_are_no_overlap():
    memory = torch.ones(4, 32)
    launch(4, copied, memory[:, :16], memory[:, 16:], 16)
    with pytest.raises(tileir.KernelBug, match="overlap"):
        launch(4, copied, memory[:, :17], memory[:, 16:], 16)


@ct.kernel
def copied(x, y, BLOCK: ConstInt):
    ct.store(y, (ct.bid(0), 0), ct.load(x, (ct.bid(0), 0), (1, BLOCK), padding_mode=ZERO))


def test_stride_beyond_32_bits():
    """A launch on a GPU refuses it, too. Offsets may be larger."""
    far = torch.empty((1 << 31) + 32, dtype=torch.int8)
    y = torch.empty(2, 16, dtype=torch.int8)
    with pytest.raises(OverflowError, match=r"argument 0 has .* strides \(2147483648, 1\); .*ct.IndexedWithInt64"):
        launch(2, copied, far.as_strided((2, 16), (1 << 31, 1)), y, 16)
    rows = far.as_strided((3, 16), (1 << 30, 1))
    rows[2] = 7
    y = torch.empty(3, 16, dtype=torch.int8)
    launch(3, copied, rows, y, 16)
    assert (y[2] == 7).all()


def test_grid_beyond_24_bits():
    with pytest.raises(ValueError, match="axis 0 of the grid has 16777216 blocks"):
        launch(1 << 24, copied, torch.zeros(1, 16), torch.zeros(1, 16), 16)
    with pytest.raises(ValueError, match="axis 1 of the grid has 65536 blocks; it takes 0 to 65535"):
        ct.launch(0, (1, 1 << 16), copied, (torch.zeros(1, 16), torch.zeros(1, 16), 16))
    launch(0, copied, torch.zeros(1, 16), torch.zeros(1, 16), 16)


def test_type_that_cuda_tile_lacks():
    with pytest.raises(TypeError, match="cuda.tile has no type for torch.complex64"):
        launch(1, copied, torch.zeros(1, 16, dtype=torch.complex64), torch.zeros(1, 16), 16)


@ct.kernel
def copied_without_dimensions(x, y):
    ct.store(y, (), ct.load(x, (), ()))


@ct.kernel
def copied_to_one(x, y):
    ct.store(y, (0,), ct.load(x, (0,), ()))


def test_array_without_dimensions():
    """cuda.tile's front end takes its tiles, and tileiras doesn't."""
    x, y = torch.tensor(3.0), torch.zeros(1)
    refused = rf"make_partition_view at .*{HERE}:\d+: an array without dimensions .*\.view\(1\)"
    with pytest.raises(TypeError, match=refused):
        launch(1, copied_without_dimensions, x, torch.tensor(0.0))
    launch(1, copied_to_one, x.view(1), y)
    assert y == 3


def test_unknown_check():
    with pytest.raises(TypeError, match="rase"), tileir.checking(rase=False):
        pass


def test_an_error_of_the_interpreter_says_where(monkeypatch):
    from liger_conformance.interpreters.tileir import control

    def broken(op):
        def fail(*operands):
            raise RuntimeError("no such thing")

        return fail

    monkeypatch.setitem(control.PURE, "mulf", broken)
    with pytest.raises(InterpreterError, match=rf"mulf at .*{HERE}:\d+, in block \(0, 0, 0\): no such thing"):
        launch(1, doubled, torch.ones(32), torch.ones(32), 32)
