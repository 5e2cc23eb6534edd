"""Arguments that host code makes of tensors before a launch, and the context of the thread that launches."""

import os
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch

from liger_core import replay
from liger_cutile import backend
from liger_cutile.ops import _launch, _rows

FIRST_OF_ITS_THREAD = """
import torch
import liger_core
x = torch.randn(4, 64, device="cuda", requires_grad=True)
weight, dy = torch.ones(64, device="cuda"), torch.ones(4, 64, device="cuda")
with liger_core.use("cutile"):
    liger_core.rms_norm(x, weight).backward(dy)
torch.cuda.synchronize()
print(x.grad.isfinite().all().item())
"""


def test_the_first_launch_of_a_thread_has_a_context() -> None:
    """Where PyTorch's allocations make none: in backward, which autograd runs in a thread of its own."""
    if not torch.cuda.is_available():
        pytest.skip("a context needs a CUDA device")
    if why := backend.missing("cuda"):
        pytest.skip(why)
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_OF_ITS_THREAD], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "True\n", done.stderr


def test_a_thread_makes_its_context_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(NamedTuple):
        device: int

    threads_seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: threads_seen.append(threading.get_ident()))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 2, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", Stream, raising=False)

    def launch_twice() -> None:
        assert [_launch.current_stream(), _launch.current_stream()] == [Stream(2), Stream(2)]

    threads = [threading.Thread(target=launch_twice) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(threads_seen) == sorted(thread.ident or 0 for thread in threads)


def test_what_is_launched_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With views of other tensors, on the stream of then."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_launch, "_INTERPRETED", False)
    monkeypatch.setattr(_launch, "current_stream", lambda: len(launched))
    monkeypatch.setattr(_launch.ct, "launch", lambda *arguments: launched.append(arguments))

    def host_code(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        _launch.launch("kernel", (3, 1), _rows.as_rows(y), _rows.as_rows(x), None, 0.5)
        return y

    x, other = torch.ones(2, 2, 8), torch.zeros(2, 2, 8)
    replayed = replay.record(lambda: host_code(x), [x]).replay
    assert replayed is not None
    y = replayed(other)
    stream, grid, kernel, (rows_of_y, rows_of_x, nothing, number) = launched[1]
    assert (stream, grid, kernel, nothing, number) == (1, (3, 1), "kernel", (), 0.5)
    assert (rows_of_y.data_ptr(), rows_of_x.data_ptr()) == (y.data_ptr(), other.data_ptr())
    assert rows_of_y.shape == rows_of_x.shape == (4, 8)


def test_rows_are_a_view_where_strides_allow() -> None:
    x = torch.arange(48.0).reshape(2, 3, 8)
    for view in (x, x[..., :5], x[:, :1], x[:1].expand(4, 3, 8)[:, 0]):
        rows = _rows.as_rows(view)
        assert rows.data_ptr() == view.data_ptr()
        assert torch.equal(rows, view.reshape(-1, view.shape[-1]))


def test_rows_are_a_copy_where_they_must_be() -> None:
    x = torch.arange(48.0).reshape(6, 8)
    for view in (x.t(), x[:, ::2], x.view(2, 3, 8).transpose(0, 1)):
        rows = _rows.as_rows(view)
        assert rows.stride(1) == 1
        assert torch.equal(rows, view.reshape(-1, view.shape[-1]))


def test_strides_beyond_32_bits_are_copied() -> None:
    far = torch.empty((1 << 31) + 8, dtype=torch.int8).as_strided((2, 8), (1 << 31, 1))
    assert _rows.as_rows(far).stride() == (8, 1)
    assert _rows.near(far).stride() == (8, 1)


@pytest.mark.parametrize("strides", [(1 << 31, 1), (1 << 31, 2), (1, 1 << 31)], ids=str)
def test_strides_of_a_single_row(strides: tuple[int, int]) -> None:
    """A tensor with a dimension of one counts as contiguous, whatever its stride there. Rows of one get 2, as `as_rows` says."""
    x = torch.arange(16, dtype=torch.int8)
    x = x.as_strided((8, 1) if strides[0] == 1 else (1, 8), strides)
    rows = _rows.as_rows(x)
    assert rows.stride() == ((1, 2) if x.shape[1] == 1 else (8, 1))
    assert torch.equal(rows, x)
    assert (rows.data_ptr() == x.data_ptr()) == (2 not in strides)


def test_strides_of_dimensions_of_one() -> None:
    x = torch.arange(6, dtype=torch.int8).as_strided((1, 2, 1, 3), (1 << 31, 3, 1 << 31, 1))
    near = _rows.near(x)
    assert near.stride() == (0, 3, 0, 1)
    assert near.data_ptr() == x.data_ptr()
    assert torch.equal(near, x)
    assert _rows.near(near) is near


def test_one_row_where_all_are_contiguous() -> None:
    x = torch.zeros(3, 8)
    assert [t.shape for t in _rows.as_one_row(x, x)] == [(1, 24), (1, 24)]
    assert [t.shape for t in _rows.as_one_row(x, torch.zeros(8, 3).t())] == [(3, 8), (3, 8)]


def test_no_row_beyond_32_bits() -> None:
    long = torch.empty(1 << 31, dtype=torch.int8).view(2, -1)
    assert [t.shape for t in _rows.as_one_row(long)] == [long.shape]


@pytest.mark.parametrize(("size", "power"), [(1, 16), (16, 16), (17, 32), (4096, 4096), (4097, 8192)])
def test_power_of_2(size: int, power: int) -> None:
    assert _rows.power_of_2(size) == power


def test_blocks() -> None:
    assert [_rows.blocks(size, 8) for size in (1, 8, 9)] == [1, 1, 2]
