"""Tables of what was measured: for the terminal, and for records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from records import table

OURS, PEER = "liger-core", "liger-kernel"
NOT_RUN = "not run"

RESOLVE, RESOLVE_DEMANDED = "resolve", "resolve, language demanded"
RESOLVE_AND_RUN = "resolve and run"
CALL, CALL_GRAD, CALL_BACKWARD = "call, no grad", "call, grad", "call and backward"
IMPORT = "import over torch"
MEASURES = (RESOLVE, RESOLVE_DEMANDED, RESOLVE_AND_RUN, CALL, CALL_GRAD, CALL_BACKWARD, IMPORT)
"""What `test_dispatch.py` times, in the order of the table."""

AUTOGRAD = "autograd.Function alone"
"""The floor of a call with gradients: PyTorch's part of it."""

Row = dict[str, Any]


class Target(NamedTuple):
    """What a cost of ours has to stay under: seconds, and a share of the peer's."""

    seconds: float
    share: float | None = None

    def verdict(self, ours: float, peer: float | None) -> str:
        """The target in words, and whether it is met."""
        limits, met = [f"< {readable(self.seconds)}"], [ours < self.seconds]
        if self.share is not None:
            limits.append(f"≤ 1/{round(1 / self.share)} of {PEER}'s")
            met.append(peer is None or ours <= peer * self.share)
        half = peer is None and self.share is not None
        return f"{' and '.join(limits)}: {'met' if all(met) else 'MISSED'}{', the latter not run' if half else ''}"


TARGETS = {
    RESOLVE: Target(1e-6, share=1 / 5),
    RESOLVE_DEMANDED: Target(1e-6),
    IMPORT: Target(0.05),
}


def readable(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def dispatch_table(rows: Sequence[Row]) -> str:
    """Ours beside liger-kernel's, one line a measure: medians, and how many times as long theirs takes."""
    medians = {(row["measure"], row["library"]): row["median"] for row in rows}
    lines = []
    for measure in MEASURES:
        ours, peer = medians.get((measure, OURS)), medians.get((measure, PEER))
        if ours is None and peer is None:
            continue
        times = [NOT_RUN if t is None else readable(t) for t in (ours, peer, medians.get((measure, AUTOGRAD)))]
        times[2] = times[2].replace(NOT_RUN, "")
        ratio = f"{peer / ours:.3g}×" if ours and peer else ""
        verdict = TARGETS[measure].verdict(ours, peer) if ours and measure in TARGETS else ""
        lines.append([measure, *times, ratio, verdict])
    return table(["host cost (median)", OURS, PEER, AUTOGRAD, f"{PEER} / {OURS}", "target"], lines)


def import_facts(rows: Sequence[Row]) -> str:
    """What an import brought into ``sys.modules``."""
    return "\n".join(
        f"- `import {row['module']}` after `import torch` takes {readable(row['cpu'])} of CPU time and adds {row['modules']} modules"
        + (f", among them {', '.join(row['heavy'])}" if row["heavy"] else ", no kernel language and no Dynamo")
        for row in rows
        if row["measure"] == IMPORT
    )


def speed_table(rows: Sequence[Row]) -> str:
    """One line a benchmark of `test_speed.py`."""
    lines = [
        [
            *(str(row[key]) for key in ("op", "case", "dtype", "mode", "language", "device")),
            readable(row["median"]),
            *(f"{row[key]:.3g}" if key in row else "" for key in ("GB/s", "TFLOP/s")),
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        ]
        for row in rows
    ]
    columns = ["op", "case", "dtype", "mode", "language", "device", "median", "GB/s", "TFLOP/s", "peak MiB"]
    return table(columns, lines)


def comparison(rows: Sequence[Row]) -> str:
    """The Markdown of `compare.py`: times, memory and errors beside one another, and what did not run.

    Rows are those of its CSV, their values text or numbers.
    """
    providers = list(dict.fromkeys(str(row["provider"]) for row in rows))
    parts = [
        "Each peer's number is followed by how many times ours it is; ours is the best of ours.",
        "## Time, ms\n\n" + _side_by_side(rows, providers, "ms", lambda value: f"{value:.4g}"),
        "## Peak memory beyond the inputs, MiB\n\n" + _side_by_side(rows, providers, "peak_mib", lambda value: f"{value:.0f}"),
        "## Error relative to the reference in higher precision\n\n"
        + _side_by_side(rows, providers, "error", lambda value: f"{value:.1e}", ratios=False),
    ]
    failed = [f"- {row['provider']}, {row['op']} {row['case']} {row['mode']}: {row['note']}" for row in rows if row["note"]]
    if failed:
        parts.append("## Not run, or not checked\n\n" + "\n".join(failed))
    return "\n\n".join(parts)


def _side_by_side(
    rows: Iterable[Row], providers: Sequence[str], key: str, show: Callable[[float], str], ratios: bool = True
) -> str:
    places: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        places.setdefault((row["op"], row["case"], row["mode"]), {})[row["provider"]] = row
    lines = []
    for place, found in places.items():
        values = {p: float(row[key]) for p, row in found.items() if row[key] not in ("", None)}
        best = min((value for p, value in values.items() if is_ours(p)), default=None)
        cells = [_cell(values.get(p), None if is_ours(p) or not ratios else best, show) for p in providers]
        rates = [max((str(row[r]) for row in found.values() if row["ms"] != "" and is_ours(row["provider"])), default="",
                     key=lambda text: float(text or 0)) for r in ("gbps", "tflops")] if key == "ms" else []
        lines.append([*place, *cells, *rates])
    return table(["op", "case", "mode", *providers, *(["our GB/s", "our TFLOP/s"] if key == "ms" else [])], lines)


def _cell(value: float | None, best: float | None, show: Callable[[float], str]) -> str:
    if value is None:
        return ""
    return show(value) + (f" ({value / best:.2f}×)" if best else "")


def is_ours(provider: str) -> bool:
    """Whether a provider of `compare.py` is a language of this project."""
    return provider.startswith("ours-")
