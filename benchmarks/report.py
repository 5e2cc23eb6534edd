"""Tables of what was measured: for the terminal, and for records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from records import table
from timing import HOST_CALLS, HOST_REPEATS

OURS, PEER = "liger-core", "liger-kernel"
NOT_RUN = "not run"

RESOLVE, RESOLVE_DEMANDED = "resolve", "resolve, language demanded"
RESOLVE_AND_RUN = "resolve and run"
CALL, CALL_GRAD, CALL_BACKWARD = "call, no grad", "call, grad", "call and backward"
IMPORT = "import over torch"
MEASURES = (RESOLVE, RESOLVE_DEMANDED, RESOLVE_AND_RUN, CALL, CALL_GRAD, CALL_BACKWARD, IMPORT)
"""Measurements of `test_dispatch.py`, in the order of the table."""

AUTOGRAD = "autograd.Function alone"
"""The floor of a call with gradients: PyTorch's part of it."""

KERNEL, KERNEL_SAVING, KERNEL_BACKWARD = "kernel.forward", "kernel.forward, saving", "kernel.backward"
HOST_MEASURES = (KERNEL, KERNEL_SAVING, KERNEL_BACKWARD, CALL, CALL_GRAD, CALL_BACKWARD)
LAUNCHES = ("by the package", "by the language")
"""Measurements of `host.py`, of a launch; `HOST_MEASURES` has those of an op."""

Row = dict[str, Any]


class Target(NamedTuple):
    """Upper bounds of our cost: seconds, and a share of the peer's."""

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
    """Modules that each import brought into ``sys.modules``."""
    lines = []
    for row in rows:
        if row["measure"] == IMPORT:
            among = f"among them {', '.join(row['heavy'])}" if row["heavy"] else "no kernel language and no Dynamo"
            cost = f"{readable(row['cpu'])} of CPU time and adds {row['modules']} modules, {among}"
            lines.append(f"- `import {row['module']}` after `import torch` takes {cost}")
    return "\n".join(lines)


def host_tables(rows: Sequence[Row]) -> str:
    """The rows of `host.py`, one line an op and language; what was not run below."""
    statistic = f"the mean of {HOST_CALLS} calls, the least of {HOST_REPEATS} such means"
    parts = [
        f"Microseconds: {statistic}. Ops at their `small` case, in bfloat16.",
        f"## A launch with nine arguments\n\n{_by_measure(rows, LAUNCHES)}",
        f"## A call\n\n{_by_measure(rows, HOST_MEASURES)}",
    ]
    notes = [f"- {row['what']} in {row['language']}: {row['note']}" for row in rows if row["note"]]
    if notes:
        parts.append("## Not run\n\n" + "\n".join(notes))
    return "\n\n".join(parts)


def _by_measure(rows: Sequence[Row], measures: Sequence[str]) -> str:
    times_by_place: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["measure"] in measures:
            times_by_place.setdefault((row["what"], row["language"]), {})[row["measure"]] = row["us"]
    lines = [[*place, *(times.get(measure, "") for measure in measures)] for place, times in times_by_place.items()]
    return table(["", "language", *measures], lines)


def speed_table(rows: Sequence[Row]) -> str:
    """Table with a line for each benchmark of `test_speed.py`."""
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
    parts = [
        "A peer's number is followed by how many times the best of ours it is: above 1×, ours is better.",
        *(
            f"## The best peer's time over that of {ours}\n\n{best_peers(rows, ours)}"
            for ours in dict.fromkeys(str(row["provider"]) for row in rows if is_ours(row["provider"]))
        ),
        "## Time, ms\n\n" + _side_by_side(rows, "ms", "{:.4g}", rates={"our GB/s": "gbps", "our TFLOP/s": "tflops"}),
        "## Peak memory beyond the inputs, MiB\n\n" + _side_by_side(rows, "peak_mib", "{:.0f}"),
        "## Error relative to the reference in higher precision\n\n"
        + _side_by_side(rows, "error", "{:.1e}", ratios=False),
    ]
    notes = [
        f"- {row['provider']}, {row['op']} {row['case']} {row['mode']}: {row['note']}" for row in rows if row["note"]
    ]
    if notes:
        parts.append("## Not run, or not checked\n\n" + "\n".join(notes))
    return "\n\n".join(parts)


def best_peers(rows: Sequence[Row], ours: str) -> str:
    """Table with a line per op, a column per case and mode: the fastest peer's time as a multiple of that of `ours`."""
    times = _times([row for row in rows if row["provider"] == ours or not is_ours(row["provider"])])
    columns = list(dict.fromkeys(place[1:] for place in times))
    lines = []
    for op in dict.fromkeys(place[0] for place in times):
        cells = []
        for column in columns:
            by_provider = dict(times.get((op, *column), {}))
            time = by_provider.pop(ours, None)
            cells.append(
                "{:.2f}× {}".format(*min((ms / time, peer) for peer, ms in by_provider.items()))
                if time and by_provider
                else ""
            )
        lines.append([op, *cells])
    return table(["op", *(", ".join(column) for column in columns)], lines)


def beside(rows: Sequence[Row], ours: str, others: Sequence[str]) -> str:
    """Table with a line per op: times and rates of `ours` in one group's cases, and the others' times as multiples of them."""
    times = _times(rows)
    rates = {(row["op"], row["mode"]): _rate(row) for row in rows if row["provider"] == ours}
    modes = list(dict.fromkeys(mode for _, _, mode in times))
    lines = []
    for op, case in dict.fromkeys(place[:2] for place in times):
        line = [op]
        for mode in modes:
            by_provider = times.get((op, case, mode), {})
            time = by_provider.get(ours)
            line += [f"{time:.3f}" if time < 10 else f"{time:.1f}", rates[op, mode]] if time else ["", ""]
            line += [f"{by_provider[other] / time:.2f}×" if time and other in by_provider else "" for other in others]
        lines.append(line)
    return table(["op", *(column for mode in modes for column in (f"{mode}, ms", "", *others))], lines)


def _times(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Milliseconds by op, case and mode, then by provider."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row["ms"] not in ("", None):
            times.setdefault((row["op"], row["case"], row["mode"]), {})[str(row["provider"])] = float(row["ms"])
    return times


def _rate(row: Row) -> str:
    if row["tflops"]:
        return f"{float(row['tflops']):.0f} TFLOP/s"
    return f"{float(row['gbps']) / 1000:.2f} TB/s" if row["gbps"] else ""


def _side_by_side(
    rows: Sequence[Row], key: str, form: str, *, ratios: bool = True, rates: Mapping[str, str] | None = None
) -> str:
    """Table with a line per job and a column per provider; `rates` are columns for what the fastest of ours reaches."""
    providers = list(dict.fromkeys(str(row["provider"]) for row in rows))
    jobs: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if row[key] not in ("", None):
            jobs.setdefault((row["op"], row["case"], row["mode"]), {})[row["provider"]] = row
    lines = []
    for job, by_provider in jobs.items():
        ours = [row for provider, row in by_provider.items() if is_ours(provider)]
        best = min(ours, key=lambda row: float(row[key]), default=None)
        cells = []
        for provider in providers:
            cell = form.format(float(by_provider[provider][key])) if provider in by_provider else ""
            if cell and ratios and best and float(best[key]) and not is_ours(provider):
                cell += f" ({float(by_provider[provider][key]) / float(best[key]):.2f}×)"
            cells.append(cell)
        lines.append([*job, *cells, *(str(best[column]) if best else "" for column in (rates or {}).values())])
    return table(["op", "case", "mode", *providers, *(rates or {})], lines)


def is_ours(provider: str) -> bool:
    """Whether a provider of `compare.py` is a language of this project."""
    return provider.startswith("ours-")
