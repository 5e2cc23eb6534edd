"""docs/scale.md: its times follow from its links, its collectives and its bytes, and those from what the packages send."""

import re
from pathlib import Path

import pytest

from liger_core.contract import ops
from liger_core.dimensions import independent

TEXT = (Path(__file__).resolve().parent.parent / "docs/scale.md").read_text("utf-8")
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "GB/s": 1e9, "µs": 1e-6, "ms": 1e-3}
TOKENS, DEVICES = 8192, 8


def number(cell: str) -> float:
    """A cell such as `1,234 µs`, in bytes or seconds."""
    value, unit = cell.split()
    return float(value.replace(",", "")) * UNITS[unit]


ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("|")]
LINKS = {
    row[0].split()[0]: (number(row[1]), number(row[2])) for row in ROWS if row[0] in ("NVLink 4", "InfiniBand NDR")
}
WAYS = [row for row in ROWS if len(row) == 5 and row[1].isdigit()]


@pytest.mark.parametrize("row", WAYS, ids=lambda row: row[0][:20])
def test_times_follow_from_bytes(row: list[str]) -> None:
    for (rate, latency), cell in zip(LINKS.values(), row[3:], strict=True):
        assert number(cell) == pytest.approx(int(row[1]) * latency + number(row[2]) / rate, rel=5e-3, abs=1e-6)


def test_bytes_follow_from_rings() -> None:
    """An all-gather of (lse, picked), 8 bytes a row, as liger-distributed's tests count it; an all-reduce is two passes."""
    loss, norms = WAYS[0], WAYS[6]
    assert number(loss[2]) == pytest.approx(8 * TOKENS * (DEVICES - 1), rel=5e-3)
    hidden, layers = 8192, 80
    reduced = 2 * 4 * hidden * (DEVICES - 1) / DEVICES
    assert int(norms[1]) == 2 * layers + 1
    assert number(norms[2]) == pytest.approx(int(norms[1]) * reduced, rel=5e-3)


def test_a_norm_sends_its_weights_gradient_alone() -> None:
    assert "..." in ops["rms_norm"].dimensions.tensors["x"]
    assert independent("...")


def test_where_ours_sends_more() -> None:
    (devices,) = re.findall(r"more bytes than three all-reduces from (\d+) devices on", TEXT)
    rows = [row for row in ROWS if len(row) == 3 and row[0].isdigit() and ", " in row[1]]
    assert len(rows) == 4
    for count, ours, theirs in rows:
        larger = number(ours.partition(", ")[0]) > number(theirs.partition(", ")[0])
        assert larger == (int(count) >= int(devices))
